"""Data sets prepared in this process, and read back by the reader for TFDS."""

import fcntl
import io
import json
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.prepare import Plan, prepare, verify
from jaxdl.data.images.prepare.encoding import shrunk
from jaxdl.data.images.prepare.shards import order
from jaxdl.data.images.sources import open_source
from jaxdl.data.images.transforms import resize
from jaxdl.data.images.types import Pixels
from jaxdl.errors import ConfigError, DataError


def gradient(height, width, blue=60):
    """A smooth picture, which JPEG hardly changes, and with no symmetry."""
    rows, columns = np.mgrid[:height, :width]
    channels = (rows * (200 / height) + 20, columns * (150 / width) + 50, np.full((height, width), blue))
    return np.rint(np.stack(channels, axis=2)).astype(np.uint8)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.fromarray(gradient(40, 60)), "JPEG", exif=exif, quality=95)


ODD = {
    "animated.gif": encoded(
        Image.fromarray(gradient(40, 60)).quantize(),
        "GIF",
        save_all=True,
        append_images=[Image.new("P", (60, 40))],
    ),
    "deep.png": encoded(Image.fromarray(gradient(40, 60)[:, :, 0].astype(np.uint16) * 256 + 9), "PNG"),
    "print.jpg": encoded(Image.fromarray(gradient(40, 60)).convert("CMYK"), "JPEG", quality=95),
    "turned.jpg": turned(),
    "clear.webp": encoded(Image.fromarray(gradient(40, 60)).convert("RGBA"), "WEBP", lossless=True),
}


def write(root, files):
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return ImageDataConfig(name="image_folder", dir=str(root))


def pictures():
    """16 files for training and 4 for evaluation, of two classes, in many sizes."""
    files = {}
    for i in range(20):
        data = encoded(Image.fromarray(gradient(40 + 3 * i, 90 - 2 * i, blue=10 * i)), ("JPEG", "PNG")[i % 2])
        files[
            f"{'train' if i < 16 else 'val'}/{('ant', 'bee')[i % 3 == 0]}/{i:02d}.{('jpg', 'png')[i % 2]}"
        ] = data
    return files


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "folder", pictures())


def plan(config, root, **other):
    return Plan(config, root, "insects", **{"shard_size": 5, **other})


def made(config, root, **other):
    prepare(plan(config, root, **other), 1, lambda line: None)
    return plan(config, root, **other).directory


def opened(root, split="train"):
    return open_source(ImageDataConfig(name="tfds", dir=str(root), dataset="insects"), split)


def files(root):
    """The feature `file` of the records of both splits, in their order."""
    builder = tfds.builder_from_directory(str(root / "insects/1.0.0"))
    decoders = {"image": tfds.decode.SkipDecoding()}
    return {
        split: [record["file"].decode() for record in builder.as_data_source(split, decoders=decoders)]
        for split in ("train", "validation")
    }


def state(directory):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.glob("*record-*")}


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 255
    path.write_bytes(data)


# What is stored


def test_files_are_stored_as_they_are(tmp_path, folder):
    directory = made(folder, tmp_path)
    names = sorted(path.name for path in directory.glob("*record-*"))
    assert names == [
        *(f"insects-train.array_record-0000{i}-of-00004" for i in range(4)),
        "insects-validation.array_record-00000-of-00001",
    ]
    assert not [path for path in directory.rglob(".*") if path.name != ".lock"]
    for split, count in (("train", 16), ("eval", 4)):
        before, after = open_source(folder, split), opened(tmp_path, split)
        assert len(after) == count
        assert (after.class_names, after.num_classes) == (("ant", "bee"), 2)
        for i, index in enumerate(order(count)):
            one, other = before[int(index)], after[i]
            assert other["label"] == one["label"]
            assert other["image"].data == one["image"].data
            np.testing.assert_array_equal(other["image"].pixels(), one["image"].pixels())
    found = files(tmp_path)
    assert sorted(found["train"] + found["validation"]) == sorted(pictures())  # without the directory
    assert verify(directory, 1, print) == 20


def test_the_order_never_changes():
    assert order(10).tolist() == [2, 8, 4, 9, 1, 6, 7, 3, 0, 5]


def test_images_are_shrunk_but_not_enlarged(tmp_path, folder):
    made(folder, tmp_path, size=50)
    before, after = open_source(folder, "train"), opened(tmp_path)
    for i, index in enumerate(order(16)):
        picture, result = before[int(index)]["image"], after[i]["image"]
        assert result.data.startswith(b"\xff\xd8\xff")
        short, long = sorted((picture.height, picture.width))
        size = min(short, 50)
        assert sorted((result.height, result.width)) == [size, round(long * size / short)]
        assert (result.height <= result.width) == (picture.height <= picture.width)
        wanted = resize(picture.pixels(), result.height, result.width)
        assert np.abs(result.pixels().astype(int) - wanted).max() < 12


def test_the_decoder_does_the_coarse_part_of_shrinking():
    asked = []

    class Spied(Pixels):
        def pixels(self, reduce=1):
            asked.append(reduce)
            return super().pixels(reduce)

    picture = Spied(gradient(400, 640))
    sizes = (50, 51, 100, 150, 201, 400, 500)
    shapes = [shrunk(picture, size).shape[:2] for size in sizes]
    assert shapes == [(50, 80), (51, 82), (100, 160), (150, 240), (201, 322), (400, 640), (400, 640)]
    assert asked == [8, 4, 4, 2, 1, 1, 1]


@pytest.mark.parametrize("size", [None, 30])
def test_odd_formats(tmp_path, size):
    config = write(
        tmp_path / "odd", {f"{split}/a/{name}": ODD[name] for name in ODD for split in ("train", "val")}
    )
    made(config, tmp_path, size=size)
    source = opened(tmp_path)
    for i, file in enumerate(files(tmp_path)["train"]):
        wanted = Encoded(ODD[file.rpartition("/")[2]], file).pixels()
        image = source[i]["image"].pixels()
        if size is None:
            np.testing.assert_array_equal(image, wanted)
            continue
        assert image.shape == ((45, 30, 3) if "turned" in file else (30, 45, 3))
        assert np.abs(image.astype(int) - resize(wanted, *image.shape[:2])).max() < 25


def test_images_that_are_no_files(tmp_path):
    config = ImageDataConfig(name="digits")
    made(config, tmp_path, shard_size=1000)
    before, after = open_source(config, "eval"), opened(tmp_path, "eval")
    first = order(360)[0]
    np.testing.assert_array_equal(after[0]["image"].pixels(), before[int(first)]["image"].pixels())
    assert after.class_names == tuple("0123456789")
    assert files(tmp_path)["validation"][0] == f"digits validation example {first}"


def test_a_prepared_set_can_be_prepared_anew(tmp_path, folder):
    made(folder, tmp_path)
    config = ImageDataConfig(name="tfds", dir=str(tmp_path), dataset="insects", train_split="train[:8]")
    made(config, tmp_path / "half", size=20)
    assert len(opened(tmp_path / "half")) == 8


def test_class_names_that_tfds_confuses(tmp_path):
    config = write(tmp_path / "folder", {f"{split}/{name}/1.gif": ODD["animated.gif"]
                                         for split in ("train", "val") for name in ("a", "a ")})  # fmt: skip
    with pytest.raises(DataError, match="the same but for spaces"):
        made(config, tmp_path)


# Damaged images


def test_a_damaged_image_is_named(tmp_path, folder):
    broken = tmp_path / "folder/train/ant/05.png"
    broken.write_bytes(broken.read_bytes()[:60])
    for size in (None, 30):
        with pytest.raises(DataError, match=r"train/ant/05\.png cannot be decoded"):
            made(folder, tmp_path / "to", size=size)
        with pytest.raises(DataError):  # not a whole data set
            opened(tmp_path / "to")
        assert not list((tmp_path / "to").rglob(".*.tmp"))
        shutil.rmtree(tmp_path / "to")


def test_damaged_images_are_left_out(tmp_path, folder):
    for number in ("05.png", "07.png"):
        (tmp_path / f"folder/train/ant/{number}").write_bytes(b"\x89PNG\r\n\x1a\n")
    skipping = {"name": "image_folder", "dir": folder.dir, "on_bad": "skip"}
    allowed = ImageDataConfig(**skipping, max_bad=0.2)
    contents = prepare(plan(allowed, tmp_path, shard_size=1), 1, print)
    messages = [message for each in contents["train"] for message in each.skipped]
    assert len(messages) == 2
    assert all("cannot be decoded" in message for message in messages)
    assert len(opened(tmp_path)) == 14  # two shards are empty
    assert [opened(tmp_path)[i]["image"].height > 0 for i in range(14)]
    assert verify(plan(allowed, tmp_path).directory, 1, print) == 18
    with pytest.raises(DataError, match=r"2 of 16 images .* more than data.max_bad 0.1 allows"):
        made(ImageDataConfig(**skipping, max_bad=0.1), tmp_path / "other")
    # Who allows no gaps does not get the shards that have some.
    with pytest.raises(DataError, match=r"0[57]\.png cannot be decoded"):
        made(folder, tmp_path, shard_size=1)


def test_no_image_is_left(tmp_path):
    config = write(tmp_path / "folder", {"train/a/1.png": b"-", "val/a/1.png": b"-"})
    config = ImageDataConfig(name="image_folder", dir=config.dir, on_bad="skip", max_bad=0.99)
    with pytest.raises(DataError):
        made(config, tmp_path)


# Going on


def test_finished_shards_are_kept(tmp_path, folder):
    directory = made(folder, tmp_path)
    before = state(directory)
    lost, damaged, *_ = sorted(before)
    (directory / lost).unlink()
    flip(directory / damaged, 3000)
    (directory / f".{lost}.77.tmp").write_bytes(b"of a process that was killed")
    made(folder, tmp_path)
    after = state(directory)
    assert [name for name in before if before[name] != after[name]] == [lost, damaged]
    assert verify(directory, 1, print) == 20
    assert not list(directory.glob(".*.tmp"))


def test_other_settings_are_refused(tmp_path, folder):
    directory = made(folder, tmp_path)
    before = state(directory)
    for other in ({"size": 20}, {"shard_size": 4}):
        with pytest.raises(ConfigError, match=f"{next(iter(other))}: .* there, .* now"):
            made(folder, tmp_path, **other)
    write(tmp_path / "folder", {"val/ant/new.png": ODD["deep.png"]})
    with pytest.raises(ConfigError, match="validation: 4 there, 5 now"):
        made(folder, tmp_path)
    with pytest.raises(ConfigError, match=r"source: .*image_folder.* there, .*digits.* now"):
        made(ImageDataConfig(name="digits"), tmp_path)
    assert state(directory) == before


def test_other_settings_are_fine_while_nothing_is_finished(tmp_path, folder):
    broken = tmp_path / "folder/train/ant/05.png"
    data = broken.read_bytes()
    broken.write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        made(folder, tmp_path, shard_size=99)
    broken.write_bytes(data)
    made(folder, tmp_path, size=20)
    assert len(opened(tmp_path)) == 16


def test_other_data_sets_are_not_touched(tmp_path, folder):
    directory = plan(folder, tmp_path).directory
    directory.mkdir(parents=True)
    (directory / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match="was not prepared here"):
        made(folder, tmp_path)
    assert (directory / "dataset_info.json").read_text() == "{}"


def test_only_one_prepares(tmp_path, folder):
    directory = plan(folder, tmp_path).directory
    directory.mkdir(parents=True)
    (directory / ".prepared.json.7.tmp").touch()  # of a process that was killed at once
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process"):
            made(folder, tmp_path)
    made(folder, tmp_path)
    assert not list(directory.glob(".*.tmp"))


def test_a_place_that_cannot_be_written(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"insects/1\.0\.0 cannot be written \(Not a directory\)"):
        made(folder, tmp_path / "file")


def test_progress(tmp_path, folder):
    lines = []
    prepare(plan(folder, tmp_path), 1, lines.append)
    prepare(plan(folder, tmp_path), 1, lines.append)
    assert lines[0].startswith("5/5 shards; ")
    assert lines[0].endswith(" examples/s, 0:00:00 left")
    assert lines[1] == "5/5 shards, 5 of them there before"


# Reading back


@pytest.mark.parametrize("place", [70_000, 200, -3])
def test_flipped_bytes_are_found(tmp_path, folder, place):
    directory = made(folder, tmp_path)
    name = "insects-train.array_record-00002-of-00004"
    flip(directory / name, place)
    with pytest.raises(DataError, match=name):
        verify(directory, 1, print)


def test_a_damaged_record_is_named(tmp_path, folder):
    directory = made(folder, tmp_path)
    path = directory / "insects-train.array_record-00002-of-00004"
    # Within the pixels of some image.
    flip(path, path.read_bytes().index(opened(tmp_path)[13]["image"].data) + 100)
    with pytest.raises(DataError, match=r"00002-of-00004 record 3: ") as caught:
        verify(directory, 1, print)
    assert "record 2" not in str(caught.value)


def test_what_else_may_be_wrong(tmp_path, folder):
    directory = made(folder, tmp_path)
    first, second, third, *_ = sorted(directory.glob("*record-*"))
    first.unlink()
    shutil.copy(third, second)
    record = directory / f"shards/{third.name}.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": "0"}))
    with pytest.raises(DataError) as caught:
        verify(directory, 1, print)
    text = str(caught.value)
    assert f"{first} is missing" in text
    assert f"{second}: its SHA-256 is not the recorded one" in text
    assert f"{third}: its SHA-256 is not the recorded one" in text
    (directory / "dataset_info.json").unlink()
    with pytest.raises(DataError, match="no finished data set"):
        verify(directory, 1, print)


def test_what_a_source_is_goes_with_its_images(tmp_path):
    """Digits stay digits: shifted and never mirrored, shown whole, with their own mean."""
    config = ImageDataConfig(name="digits", image_size=8)
    made(config, tmp_path, shard_size=1000)
    plain, prepared = open_source(config, "train"), opened(tmp_path)
    for name in ("augment", "photographs", "mean", "std", "num_classes", "class_names"):
        assert getattr(prepared, name) == getattr(plain, name)
    assert (prepared.augment, prepared.photographs) == ("shift", False)
    settings_file = tmp_path / "insects/1.0.0/prepared.json"
    settings_file.write_text("{")
    with pytest.raises(DataError, match=r"prepared\.json cannot be read"):
        opened(tmp_path)


def test_records_that_cannot_be_read_are_left_out_too(tmp_path, folder):
    first = made(folder, tmp_path / "first", shard_size=4)
    flip(first / "insects-train.array_record-00001-of-00004", 200)
    config = ImageDataConfig(
        name="tfds", dir=str(tmp_path / "first"), dataset="insects", on_bad="skip", max_bad=0.9
    )
    made(config, tmp_path / "second")
    assert 1 <= 16 - len(opened(tmp_path / "second")) <= 4
    with pytest.raises(DataError, match="cannot be read"):
        made(ImageDataConfig(name="tfds", dir=config.dir, dataset="insects"), tmp_path / "third")
