"""Directories and files as they come: odd names, odd colours, odd links, damage."""

import io
import logging
import os
import struct

import numpy as np
import pytest
from PIL import Image

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable
from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.sources import open_source
from jaxdl.errors import DataError

RED = (220, 30, 30)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(colour=RED, size=(6, 4), kind="PNG"):
    return encoded(Image.new("RGB", size, colour), kind)


def write(root, *names, data=None):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plain() if data is None else data)


def folder(root, split="train"):
    return open_source(ImageDataConfig(name="image_folder", dir=str(root)), split)


def decode_image(data, name):
    return Encoded(data, name).pixels()


def near(image, colour, tolerance=40):
    assert (image.dtype, image.shape[2]) == (np.uint8, 3)
    assert np.abs(image.astype(int) - colour).max() <= tolerance


# Layout


def test_classes_are_sorted_and_order_is_stable(tmp_path):
    write(
        tmp_path,
        "train/cat/2.png",
        "train/cat/1.JPG",
        "train/ant/deep/er/x.jpeg",
        "train/Bee/z.Png",
        "val/cat/1.png",
    )
    source = folder(tmp_path)
    assert source.class_names == ("Bee", "ant", "cat")
    assert (source.num_classes, source.augment, source.photographs) == (3, "crop_flip", True)
    assert [source[i]["label"] for i in range(len(source))] == [0, 1, 2, 2]
    held_out = folder(tmp_path, "eval")
    assert (held_out.class_names, len(held_out), held_out[0]["label"]) == (source.class_names, 1, 2)


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_names_of_the_evaluation_directory(tmp_path, name):
    write(tmp_path, "train/a/1.png", f"{name}/a/1.png", "test/a/2.png")
    assert len(folder(tmp_path, "eval")) == (2 if name == "test" else 1)


def test_missing_split_lists_what_is_there(tmp_path):
    write(tmp_path, "cat/1.png", "dog/1.png")
    with pytest.raises(DataError, match=r"has no train/<class>/; it has: cat, dog"):
        folder(tmp_path)
    write(tmp_path, "train/cat/1.png")
    with pytest.raises(
        DataError, match=r"val/<class>/ or validation/<class>/ or test/<class>/; it has: cat, dog, train"
    ):
        folder(tmp_path, "eval")


def test_images_without_class_directories(tmp_path):
    write(tmp_path, "train/1.png", "train/2.png")
    with pytest.raises(DataError, match=r"train has no class directories; it has: 1\.png, 2\.png"):
        folder(tmp_path)


def test_class_without_images(tmp_path):
    write(tmp_path, "train/cat/1.png", "train/dog/notes.txt")
    with pytest.raises(DataError, match=r"dog has no images .*: add some or remove the directory"):
        folder(tmp_path)


def test_unknown_evaluation_classes_are_named(tmp_path):
    write(tmp_path, "train/cat/1.png", "val/cat/1.png", "val/kat/1.png")
    with pytest.raises(DataError, match=r"val has 1 classes that .*train has not: kat"):
        folder(tmp_path, "eval")


def test_hidden_and_other_files_are_counted(tmp_path, caplog):
    write(
        tmp_path,
        "train/.ipynb_checkpoints/1.png",
        "train/.DS_Store",
        "train/a/.1.png",
        "train/a/b.txt",
        "train/a/1.png",
    )
    with caplog.at_level(logging.WARNING):
        source = folder(tmp_path)
    assert (source.class_names, len(source)) == (("a",), 1)
    (record,) = caplog.records
    assert "1 images in 1 classes; ignored 4 entries" in record.getMessage()
    caplog.clear()
    write(tmp_path, "val/a/1.png")
    folder(tmp_path, "eval")
    assert not caplog.records


# Links


def test_links(tmp_path, caplog):
    write(tmp_path, "train/a/1.png", "train/b/1.png", data=plain())
    write(tmp_path, "elsewhere/c/1.png")
    (tmp_path / "train/a/link.jpg").symlink_to("../b/1.png")
    (tmp_path / "train/a/loop").symlink_to("..")
    (tmp_path / "train/a/loop.jpg").symlink_to("..")
    (tmp_path / "train/up").symlink_to("..")
    (tmp_path / "train/here").symlink_to(".")
    (tmp_path / "train/c").symlink_to("../elsewhere/c")
    with caplog.at_level(logging.WARNING):
        source = folder(tmp_path)
    assert source.class_names == ("a", "b", "c")
    assert [source[i]["label"] for i in range(len(source))] == [0, 0, 1, 2]
    assert "ignored 4 entries" in caplog.text


def test_dangling_link(tmp_path):
    write(tmp_path, "train/a/1.png")
    (tmp_path / "train/a/2.png").symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"2\.png is a link to a file that does not exist"):
        folder(tmp_path)


# Names


def test_odd_names(tmp_path, caplog):
    for name in (
        b"train/\xc3\xa9t\xc3\xa9/\xe5\x9b\xbe.jpg",
        b"train/\xff/\xfe a,b\n.PNG",
        b"train/\xff/bad\xfd\n.jpg",
    ):
        write(tmp_path, os.fsdecode(name), data=b"" if b"bad" in name else plain())
    write(tmp_path, os.fsdecode(b"train/\xff/x\xff.txt"))
    with caplog.at_level(logging.WARNING):
        source = folder(tmp_path)
    assert source.class_names == ("été", r"\udcff")
    assert len(source) == 3
    near(source[0]["image"].pixels(), RED)
    near(source[2]["image"].pixels(), RED)
    caplog.text.encode()
    assert r"x\udcff.txt" in caplog.text
    with pytest.raises(DataError) as caught:
        source[1]["image"].pixels()
    assert r"\udcff/bad\udcfd\n.jpg is empty" in str(caught.value)
    str(caught.value).encode()


def test_printable():
    assert printable("a é 图") == "a é 图"
    assert printable("a\n\udcff\x1b[0m\ud800") == r"a\n\udcff\x1b[0m\ud800"


# Damage


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF"])
def test_truncated_file_is_named(tmp_path, kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    write(tmp_path, "train/a/broken.jpg", data=data[: len(data) // 2])
    with pytest.raises(DataError, match=r"train/a/broken\.jpg cannot be decoded .*: replace or remove it"):
        folder(tmp_path)[0]["image"].pixels()


@pytest.mark.parametrize(("data", "message"), [(b"", "is empty"), (b"<html>not found", "cannot be decoded")])
def test_file_that_is_no_image(tmp_path, data, message):
    write(tmp_path, "train/a/x.jpg", data=data)
    with pytest.raises(DataError, match=rf"x\.jpg {message}"):
        folder(tmp_path)[0]["image"].pixels()


def test_file_removed_later(tmp_path):
    write(tmp_path, "train/a/x.jpg")
    source = folder(tmp_path)
    (tmp_path / "train/a/x.jpg").unlink()
    with pytest.raises(DataError, match=r"x\.jpg cannot be read: No such file"):
        source[0]


def test_programs_are_not_started_for_a_picture():
    """Pillow alone would hand EPS to Ghostscript."""
    with pytest.raises(DataError, match="its content is none of JPEG"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "x.jpg")


# Colours: every mode becomes RGB, by content and not by name


def test_content_decides_not_the_name(tmp_path):
    write(tmp_path, "train/a/x.JPEG", data=plain(kind="PNG"))
    near(folder(tmp_path)[0]["image"].pixels(), RED, 0)


def test_cmyk_stays_red():
    near(decode_image(encoded(Image.new("RGB", (8, 8), RED).convert("CMYK"), "JPEG", quality=95), "x"), RED)


def test_grey_and_bits():
    near(decode_image(encoded(Image.new("L", (5, 3), 77)), "x"), 77, 0)
    near(decode_image(encoded(Image.new("L", (5, 3), 77), "JPEG"), "x"), 77, 2)
    near(decode_image(encoded(Image.new("1", (5, 3), 1)), "x"), 255, 0)
    near(decode_image(encoded(Image.fromarray(np.full((3, 5), 77 * 256 + 99, np.uint16))), "x"), 77, 0)
    near(
        decode_image(encoded(Image.fromarray(np.full((3, 5), 77 * 256 + 99, np.uint16)), "TIFF"), "x"), 77, 0
    )
    with pytest.raises(DataError, match="mode F has no known range"):
        decode_image(encoded(Image.fromarray(np.ones((3, 5), np.float32)), "TIFF"), "x")


def test_transparency_is_laid_on_white():
    near(decode_image(encoded(Image.new("RGBA", (5, 3), (*RED, 0))), "x"), 255, 0)
    near(decode_image(encoded(Image.new("RGBA", (5, 3), (*RED, 255))), "x"), RED, 0)
    near(decode_image(encoded(Image.new("RGBA", (5, 3), (0, 0, 0, 128))), "x"), 127, 1)
    near(decode_image(encoded(Image.new("LA", (5, 3), (50, 0))), "x"), 255, 0)
    near(decode_image(encoded(Image.new("LA", (5, 3), (50, 255))), "x"), 50, 0)
    near(decode_image(encoded(Image.new("RGB", (5, 3), RED), transparency=RED), "x"), 255, 0)


def test_palette():
    image = Image.new("P", (5, 3), 1)
    image.putpalette([0, 0, 0, *RED])
    near(decode_image(encoded(image), "x"), RED, 0)
    near(decode_image(encoded(image, transparency=1), "x"), 255, 0)
    near(decode_image(encoded(image, transparency=b"\xff\x00"), "x"), 255, 0)
    near(decode_image(encoded(image, "GIF", transparency=1), "x"), 255, 0)


# Orientation and animation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(kind):
    image = Image.new("RGB", (80, 40), "black")
    image.paste((255, 255, 255), (0, 0, 40, 40))  # white left, so white on top once turned clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_image(encoded(image, kind, exif=exif), "x")
    assert turned.shape == (80, 40, 3)
    assert turned[:30].min() > 200
    assert turned[-30:].max() < 50


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_agrees_with_pillow(orientation):
    from PIL import ImageOps

    pixels = np.random.default_rng(0).integers(256, size=(3, 5, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(pixels), exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    np.testing.assert_array_equal(decode_image(data, "x"), expected)


def test_damaged_exif_does_not_spoil_the_pixels():
    exif = b"Exif\0\0garbage!" + struct.pack("<I", 2**31)
    near(decode_image(encoded(Image.new("RGB", (8, 8), RED), "JPEG", exif=exif), "x"), RED)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (6, 4), colour) for colour in ((250, 5, 5), (5, 250, 5), (5, 5, 250))]
    image = decode_image(encoded(frames[0], kind, save_all=True, append_images=frames[1:]), "x.jpg")
    assert image.shape == (4, 6, 3)
    near(image, (250, 5, 5))
