"""Files as people have them: each loads, or is refused, exactly as `jaxdl.data.images.decode` says.

What loads has one size (12 x 20, or as stated) and one colour, red, wherever the format can hold it.
"""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.batches import eval_batches, train_batches
from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.sources import open_source
from jaxdl.errors import DataError

RED, WHITE, GREY = (220, 30, 30), (255, 255, 255), (77, 77, 77)
HEIGHT, WIDTH = 12, 20


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def red(mode="RGB", size=(WIDTH, HEIGHT)):
    return Image.new("RGB", size, RED).convert(mode)


def grey(mode="L"):
    return Image.new("L", (WIDTH, HEIGHT), GREY[0]).convert(mode)


def jpeg(image=None, **options):
    return encoded(image or red(), "JPEG", **({"quality": 95} | options))


def oriented(kind, orientation, **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(red(), kind, exif=exif, **options)


def png_chunks(data):
    """Splits a PNG into its signature and its chunks."""
    place, chunks = 8, []
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        chunks.append(data[place : place + length + 12])
        place += length + 12
    return data[:8], chunks


def png_with(chunk_type, content):
    """A red PNG with one more chunk after its header."""
    signature, chunks = png_chunks(encoded(red(), "PNG"))
    body = chunk_type + content
    extra = struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))
    return signature + chunks[0] + extra + b"".join(chunks[1:])


def frames(kind, **options):
    others = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ((5, 250, 5), (5, 5, 250))]
    return encoded(red(), kind, save_all=True, append_images=others, **options)


def with_comment(data):
    """A JPEG with a comment of 64 KiB before all else."""
    return data[:2] + b"\xff\xfe\xff\xff" + b"x" * (2**16 - 3) + data[2:]


def with_restarts(image):
    return encoded(image, "JPEG", quality=95, restart_marker_blocks=2)


def palette(**options):
    image = Image.new("P", (WIDTH, HEIGHT), 1)
    image.putpalette([0, 0, 0, *RED])
    return encoded(image, options.pop("kind", "PNG"), **options)


def sixteen_bits(kind):
    return encoded(Image.fromarray(np.full((HEIGHT, WIDTH), GREY[0] * 257, np.uint16)), kind)


NOISE = Image.fromarray(np.random.default_rng(0).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8))

# name in the folder -> content, colour, (height, width)
LOADS = {
    "plain.jpg": (jpeg(), RED),
    "upper.JPEG": (jpeg(), RED),
    "progressive.jpg": (jpeg(progressive=True), RED),
    "subsampled-444.jpg": (jpeg(subsampling=0), RED),
    "subsampled-422.jpg": (jpeg(subsampling=1), RED),
    "optimised.jpg": (jpeg(optimize=True), RED),
    "restarts.jpg": (with_restarts(red()), RED),
    "grey.jpg": (jpeg(grey()), GREY),
    "cmyk.jpg": (jpeg(red("CMYK")), RED),
    "ycbcr.jpg": (jpeg(red("YCbCr")), RED),
    "rgb-without-transform.jpg": (jpeg(keep_rgb=True), RED),
    "long-comment.jpg": (with_comment(jpeg()), RED),
    "profile.jpg": (jpeg(icc_profile=b"no profile at all"), RED),
    "damaged-exif.jpg": (jpeg(exif=b"Exif\0\0garbage!" + struct.pack("<I", 2**31)), RED),
    "trailing-bytes.jpg": (jpeg() + b"\0" * 500, RED),
    "extraneous-bytes.jpg": (jpeg()[:20] + b"\0\0\0" + jpeg()[20:], RED),
    "one-pixel.jpg": (jpeg(red(size=(1, 1))), RED, (1, 1)),
    "one-row.jpg": (jpeg(red(size=(300, 1))), RED, (1, 300)),
    "one-column.png": (encoded(red(size=(1, 300)), "PNG"), RED, (300, 1)),
    "orientation-6.jpg": (oriented("JPEG", 6, quality=95), RED, (WIDTH, HEIGHT)),
    "orientation-8.png": (oriented("PNG", 8), RED, (WIDTH, HEIGHT)),
    "orientation-3.webp": (oriented("WEBP", 3, quality=95), RED),
    "orientation-99.jpg": (oriented("JPEG", 99, quality=95), RED),
    "png-in-a.jpeg": (encoded(red(), "PNG"), RED),
    "jpeg-in-a.png": (jpeg(), RED),
    "gif-in-a.jpg": (frames("GIF"), RED),
    "webp-in-a.jpg": (encoded(red(), "WEBP", quality=95), RED),
    "bmp-in-a.jpg": (encoded(red(), "BMP"), RED),
    "tiff-in-a.jpg": (encoded(red(), "TIFF"), RED),
    "16-bit.ppm": (b"P5 20 12 65535\n" + bytes([GREY[0], 200]) * 240, GREY),
    "ppm-in-a.jpg": (encoded(red(), "PPM"), RED),
    "animated.png": (frames("PNG"), RED),
    "animated.webp": (frames("WEBP", quality=95), RED),
    "pages.tiff": (frames("TIFF"), RED),
    "grey.png": (encoded(grey(), "PNG"), GREY),
    "grey-alpha.png": (encoded(grey("LA"), "PNG"), GREY),
    "hidden-grey.png": (encoded(Image.new("LA", (WIDTH, HEIGHT), (50, 0)), "PNG"), WHITE),
    "one-bit.png": (encoded(Image.new("1", (WIDTH, HEIGHT), 1), "PNG"), WHITE),
    "16-bit.png": (sixteen_bits("PNG"), GREY),
    "16-bit.tiff": (sixteen_bits("TIFF"), GREY),
    "palette.png": (palette(), RED),
    "palette.gif": (palette(kind="GIF"), RED),
    "hidden-palette.png": (palette(transparency=1), WHITE),
    "opaque.png": (encoded(Image.new("RGBA", (WIDTH, HEIGHT), (*RED, 255)), "PNG"), RED),
    "hidden-red.png": (encoded(Image.new("RGBA", (WIDTH, HEIGHT), (*RED, 0)), "PNG"), WHITE),
    "half-black.png": (encoded(Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 128)), "PNG"), (127,) * 3),
    "key-colour.png": (encoded(red(), "PNG", transparency=RED), WHITE),
    "interlaced-text.png": (png_with(b"tEXt", b"Comment\0" + b"x" * 1000), RED),
    "unknown-chunk.png": (png_with(b"prVt", b"anything"), RED),
    "cmyk.tiff": (encoded(red("CMYK"), "TIFF"), RED),
    "lzw.tiff": (encoded(red(), "TIFF", compression="tiff_lzw"), RED),
    "lossless.webp": (encoded(red(), "WEBP", lossless=True), RED),
    "name with spaces, a comma\nand a line.jpg": (jpeg(), RED),
    "图é.jpg": (jpeg(), RED),
}

# name -> content, part of the message
REFUSED = {
    "empty.jpg": (b"", "is empty"),
    "html.jpg": (b"<html>not found</html>", "cannot be decoded"),
    "half.jpg": (jpeg(NOISE)[: len(jpeg(NOISE)) // 2], "cannot be decoded"),
    "half.png": (encoded(NOISE, "PNG")[:200], "cannot be decoded"),
    "half.webp": (encoded(NOISE, "WEBP", lossless=True)[:200], "cannot be decoded"),
    "header-only.jpg": (jpeg()[:20], "cannot be decoded"),
    "signature-only.png": (encoded(red(), "PNG")[:8], "cannot be decoded"),
    "zeros.jpg": (bytes(1000), "cannot be decoded"),
    "flipped.png": (encoded(NOISE, "PNG").replace(b"IDAT", b"IDBT"), "cannot be decoded"),
    "svg.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded"),
    "postscript.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
    "floats.tiff": (
        encoded(Image.fromarray(np.ones((3, 5), np.float32)), "TIFF"),
        "mode F has no known range",
    ),
    "bomb.png": (
        encoded(red(), "PNG").replace(struct.pack(">II", WIDTH, HEIGHT), struct.pack(">II", 2**15, 2**15)),
        "cannot be decoded",
    ),
}


def folder(root, files):
    for split in ("train", "val"):
        for name, data in files.items():
            path = root / split / "a" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return ImageDataConfig(name="image_folder", dir=str(root), image_size=8, batch_size=4, workers=2)


def test_the_zoo_is_large():
    assert len(LOADS) + len(REFUSED) >= 40


@pytest.mark.parametrize("name", LOADS)
def test_loads(tmp_path, name):
    data, colour, *shape = LOADS[name]
    config = folder(tmp_path, {name: data})
    source = open_source(config, "train")
    picture = source[0]["image"]
    height, width = shape[0] if shape else (HEIGHT, WIDTH)
    assert (picture.height, picture.width) == (height, width)
    for reduce in (1, 2, 8):
        image = picture.pixels(reduce)
        assert (image.dtype, image.shape) == (np.uint8, (-(-height // reduce), -(-width // reduce), 3))
        assert np.abs(image.astype(int) - colour).max() <= 40
    # The same colour reaches the network in training and in evaluation.
    (trained,) = next(iter(train_batches(source, config, seed=0)))["image"][:1]
    (evaluated,) = next(iter(eval_batches(open_source(config, "eval"), config)))["image"][:1]
    for image in (trained, evaluated):
        assert np.abs(image.astype(int) - colour).max() <= 40


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    data, message = REFUSED[name]
    config = folder(tmp_path, {name: data})
    with pytest.raises(DataError) as caught:
        next(train_batches(open_source(config, "train"), config, seed=0))
    assert f"{name} " in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(DataError, match=r"is empty|cannot be decoded"):
        list(eval_batches(open_source(config, "eval"), config))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [(20, 12), (33, 17), (1, 1), (64, 64)])
def test_jpegs_have_the_pixels_that_pillow_gives(subsampling, size):
    """Both are libjpeg-turbo; that holds for what is decoded whole, as evaluation decodes."""
    noise = np.random.default_rng(1).integers(256, size=(size[1], size[0], 3), dtype=np.uint8)
    data = jpeg(Image.fromarray(noise), subsampling=subsampling)
    with Image.open(io.BytesIO(data)) as opened:
        np.testing.assert_array_equal(Encoded(data, "x").pixels(), np.asarray(opened))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("reduce", [1, 2, 4])
def test_reduced_pictures_are_the_means(orientation, reduce):
    """A smooth picture, decoded at a fraction of its resolution, is the mean of its pixels, upright too."""
    rows, columns = np.mgrid[:64, :96]
    smooth = np.stack([rows * 3, columns * 2, 255 - rows * 2], axis=-1).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Encoded(jpeg(Image.fromarray(smooth), exif=exif, subsampling=0), "x")
    whole = picture.pixels().astype(float)
    assert whole.shape[:2] == ((64, 96) if orientation < 5 else (96, 64))
    height, width = (length // reduce for length in whole.shape[:2])
    means = whole.reshape(height, reduce, width, reduce, 3).mean((1, 3))
    np.testing.assert_allclose(picture.pixels(reduce), means, atol=4)


def test_bad_files_are_skipped_on_request(tmp_path, caplog):
    """Training puts the next example in their place and keeps the shape; evaluation does not count them."""
    files = {f"{i}.png": encoded(Image.new("RGB", (9, 9), (20 * i, 0, 0)), "PNG") for i in range(6)}
    config = folder(tmp_path, files | {"2.png": b"", "5.png": b"nothing"})
    skipping = ImageDataConfig(**{**vars(config), "on_bad": "skip", "augment": "none"})
    source = open_source(skipping, "train")
    batches = train_batches(source, skipping, seed=0)
    seen = [next(batches) for _ in range(3)]  # two epochs
    batches.close()
    assert all(batch["image"].shape == (4, 8, 8, 3) for batch in seen)
    skipped = np.concatenate([batch["skipped"] for batch in seen])
    colours = np.concatenate([batch["image"][:, 0, 0, 0] for batch in seen])
    assert skipped.sum() == 4
    # 3 stands in for 2, and 0 for 5.
    assert sorted(colours.tolist()) == sorted([0, 20, 60, 60, 80, 0] * 2)
    (batch,) = eval_batches(
        open_source(skipping, "eval"), ImageDataConfig(**{**vars(skipping), "eval_batch_size": 6})
    )
    assert batch["mask"].tolist() == [1, 1, 0, 1, 1, 0]
    assert not batch["image"][batch["mask"] == 0].any()
    for name in ("2.png is empty", "5.png cannot be decoded"):
        # Once for training, and once for the other directory.
        assert caplog.text.count(name) == 2


def test_nothing_but_bad_files(tmp_path):
    config = folder(tmp_path, {"1.png": b"", "2.png": b""})
    skipping = ImageDataConfig(**{**vars(config), "on_bad": "skip"})
    with pytest.raises(DataError, match=r"in a row cannot be read, or all of them; the last one: .*is empty"):
        next(train_batches(open_source(skipping, "train"), skipping, seed=0))
