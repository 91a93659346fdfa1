"""ILSVRC 2012 in all the ways it is distributed, in miniature: three classes."""

import io
import logging
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.sources import archives
from jaxdl.data.images.sources.imagenet import open_imagenet
from jaxdl.errors import DataError

COLOURS = {"n02119789": (200, 30, 30), "n01440764": (30, 200, 30), "n04120489": (30, 30, 200)}
CLASSES = tuple(sorted(COLOURS))
TRAIN = {
    f"{wnid}_{number}.JPEG": wnid for wnid in COLOURS for number in ((7, 10026, 3) if wnid < "n03" else (5,))
}
VAL = {
    "ILSVRC2012_val_00000001.JPEG": "n04120489",
    "ILSVRC2012_val_00000002.JPEG": "n01440764",
    "ILSVRC2012_val_00000003.JPEG": "n04120489",
    "ILSVRC2012_val_00000004.JPEG": "n02119789",
}
TEXT = "imagenet_2012_validation_synset_labels.txt"
KIT = "ILSVRC2012_devkit_t12"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxdl" / "images"


@pytest.fixture
def root(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    return directory


def jpeg(wnid):
    buffer = io.BytesIO()
    Image.new("RGB", (12, 8), COLOURS[wnid]).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def tar(files, **options):
    """A tar of files, name -> content, in that order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def class_tars(**options):
    return {
        f"{wnid}.tar": tar({name: jpeg(wnid) for name, of in TRAIN.items() if of == wnid}, **options)
        for wnid in COLOURS
    }


def train_tar(root, **options):
    write(root / "ILSVRC2012_img_train.tar", tar(class_tars(**options), **options))


def train_class_tars(root):
    for name, content in class_tars().items():
        write(root / name, content)


def train_class_tars_below(root):
    train_class_tars(root / "train")


def train_directories(root):
    for name, wnid in TRAIN.items():
        write(root / "train" / wnid / name, jpeg(wnid))


def val_tar(root, **options):
    files = {name: jpeg(wnid) for name, wnid in reversed(VAL.items())}
    write(root / "ILSVRC2012_img_val.tar", tar(files, **options))


def val_flat_below(root):
    for name, wnid in VAL.items():
        write(root / "val" / name, jpeg(wnid))


def val_flat(root):
    for name, wnid in VAL.items():
        write(root / name, jpeg(wnid))


def val_directories(root):
    for name, wnid in VAL.items():
        write(root / "val" / wnid / name, jpeg(wnid))


def text_labels(root, name=TEXT, wnids=None):
    wnids = VAL.values() if wnids is None else wnids
    write(root / name, "".join(f"{wnid}\n" for wnid in wnids))


def table_labels(root, images=VAL, header="ImageId,PredictionString"):
    rows = [
        f"{Path(name).stem},{wnid} 85 1 499 272 {wnid} 1 2 3 4" for name, wnid in reversed(images.items())
    ]
    write(root / "LOC_val_solution.csv", "\r\n".join([header, *rows, ""]))


def kit_files(numbers=None):
    # The kit's own numbers, and two synsets that are not of the lowest level.
    order = ["n04120489", "n02119789", "n01440764"]
    numbers = [order.index(wnid) + 1 for wnid in VAL.values()] if numbers is None else numbers
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O"), ("gloss", "O")]
    rows = [(number, wnid, f"{wnid}, words", 0, "gloss") for number, wnid in enumerate(order, 1)]
    rows += [(1001, "n00001740", "entity", 2, "-"), (1002, "n00021939", "artifact", 1, "-")]
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": np.array(rows, kind).reshape(-1, 1)})
    return {
        f"{KIT}/readme.txt": b"read me",
        f"{KIT}/data/ILSVRC2012_validation_ground_truth.txt": "".join(f"{n}\n" for n in numbers).encode(),
        f"{KIT}/data/meta.mat": buffer.getvalue(),
    }


def packed_kit(root, **changes):
    buffer = tar(kit_files(**changes))
    with (
        tarfile.open(root / f"{KIT}.tar.gz", "w:gz") as packed,
        tarfile.open(fileobj=io.BytesIO(buffer)) as plain,
    ):
        for member in plain:
            packed.addfile(member, plain.extractfile(member))


def unpacked_kit(root, **changes):
    for name, content in kit_files(**changes).items():
        write(root / name, content)


def opened(root, split="train"):
    return open_imagenet(ImageDataConfig(name="image_folder", dir=str(root)), split)


def check(source, wnids):
    """Labels and content of all images."""
    assert [CLASSES[source[i]["label"]] for i in range(len(source))] == wnids
    for i, wnid in enumerate(wnids):
        pixels = source[i]["image"].pixels()
        assert (pixels.shape, pixels.dtype) == ((8, 12, 3), np.uint8)
        assert np.abs(pixels.astype(int) - COLOURS[wnid]).max() < 20


# Layouts


TRAIN_LAYOUTS = [train_tar, train_class_tars, train_class_tars_below, train_directories]
VAL_LAYOUTS = [val_tar, val_flat_below, val_flat, val_directories]
LABELS = [text_labels, table_labels, packed_kit, unpacked_kit]


@pytest.mark.parametrize("layout", TRAIN_LAYOUTS)
def test_training_images(root, layout):
    layout(root)
    source = opened(root)
    assert (source.name, source.split, source.num_classes) == ("imagenet", "train", 3)
    assert (source.augment, source.photographs, source.class_names) == ("crop_flip", True, CLASSES)
    check(source, ["n01440764"] * 3 + ["n02119789"] * 3 + ["n04120489"])
    # The order does not depend on the layout.
    names = [Path(source[i]["image"].name.split()[-1]).name for i in range(len(source))]
    assert names == sorted(TRAIN)


@pytest.mark.parametrize("train", TRAIN_LAYOUTS)
@pytest.mark.parametrize("layout", VAL_LAYOUTS)
def test_evaluation_images(root, train, layout):
    train(root)
    layout(root)
    text_labels(root)
    source = opened(root, "eval")
    assert (source.name, source.split, source.num_classes) == ("imagenet", "eval", 3)
    assert (source.augment, source.photographs, source.class_names) == ("crop_flip", True, CLASSES)
    check(source, sorted(VAL.values()) if layout is val_directories else list(VAL.values()))


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("layout", [val_tar, val_flat])
def test_labels_of_flat_images(root, layout, labels):
    train_class_tars(root)
    layout(root)
    labels(root)
    check(opened(root, "eval"), list(VAL.values()))


@pytest.mark.parametrize("name", ["val_labels.txt", "synset_labels.txt"])
def test_other_names_of_the_label_text(root, name):
    train_tar(root)
    val_tar(root)
    text_labels(root, name)
    check(opened(root, "eval"), list(VAL.values()))


def test_first_labels_found_count(root):
    train_tar(root)
    val_tar(root)

    def labels():
        source = opened(root, "eval")
        return [source[i]["label"] for i in range(4)]

    unpacked_kit(root, numbers=[1, 1, 1, 1])
    assert labels() == [2, 2, 2, 2]
    packed_kit(root, numbers=[2, 2, 2, 2])
    assert labels() == [1, 1, 1, 1]
    table_labels(root)
    assert labels() == [2, 0, 2, 1]
    text_labels(root, wnids=["n01440764"] * 4)
    assert labels() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats_of_tar(root, kind):
    train_tar(root, format=kind)
    check(opened(root), ["n01440764"] * 3 + ["n02119789"] * 3 + ["n04120489"])


def test_names_of_images(root):
    train_tar(root)
    val_tar(root)
    text_labels(root)
    assert opened(root)[0]["image"].name == "ILSVRC2012_img_train.tar: n01440764/n01440764_10026.JPEG"
    assert opened(root, "eval")[0]["image"].name == "ILSVRC2012_img_val.tar: ILSVRC2012_val_00000001.JPEG"


def test_odd_members(root, caplog):
    """Long and undecodable names, directories, hidden and other files, and one name twice."""
    long = "x" * 150 + ".JPEG"
    files = {
        "./": b"",
        "./._a.JPEG": b"no",
        "notes.txt": b"no",
        long: jpeg("n01440764"),
        "a\udcff\n.JPEG": b"",
    }
    content = tar(files | {"sub/b.JPEG": b"old", "./b.JPEG": jpeg("n01440764")})
    write(root / "n01440764.tar", content)
    with caplog.at_level(logging.WARNING):
        source = opened(root)
    assert len(source) == 3
    assert "ignored 3 members that are no images: " in caplog.text
    assert source[1]["image"].pixels().shape == source[2]["image"].pixels().shape == (8, 12, 3)
    assert source[2]["image"].name == f"n01440764.tar: n01440764/{long}"
    with pytest.raises(DataError, match=r"n01440764\.tar: n01440764/a\\udcff\\n\.JPEG is empty"):
        source[0]["image"].pixels()


# Missing things


def test_no_training_images(root):
    for split in ("train", "eval"):
        with pytest.raises(
            DataError, match=r"no training images: neither ILSVRC2012_img_train\.tar nor"
        ) as caught:
            opened(root, split)
        assert "data has: nothing" in str(caught.value)
    write(root / "train" / "1.JPEG", b"")
    with pytest.raises(DataError, match=r"data has: train; .*train has: 1\.JPEG"):
        opened(root)
    with pytest.raises(DataError, match="nowhere"):
        opened(root / "nowhere")


def test_no_evaluation_images(root):
    train_class_tars(root)
    write(root / "val" / "notes.txt", b"")
    with pytest.raises(
        DataError, match=r"no evaluation images: neither ILSVRC2012_img_val\.tar nor val/"
    ) as caught:
        opened(root, "eval")
    assert "data has: n01440764.tar, n02119789.tar, n04120489.tar, val; " in str(caught.value)
    assert "val has: notes.txt" in str(caught.value)


def test_no_labels(root):
    train_tar(root)
    val_tar(root)
    with pytest.raises(
        DataError, match=rf"no labels for the images of .*img_val\.tar: none of {TEXT}.*; .*data has: ILSVRC"
    ):
        opened(root, "eval")


def test_archive_without_class_archives(root):
    write(root / "ILSVRC2012_img_train.tar", tar({"n01440764/1.JPEG": b"x"}))
    with pytest.raises(
        DataError, match=r"img_train\.tar has no archives of classes.*; it has: n01440764/1\.JPEG"
    ):
        opened(root)


def test_class_without_images(root):
    write(root / "n01440764.tar", tar({"notes.txt": b""}))
    with pytest.raises(DataError, match=r"n01440764\.tar has no images \(\.bmp "):
        opened(root)
    write(root / "ILSVRC2012_img_train.tar", tar({"n01440764.tar": tar({})}))
    with pytest.raises(DataError, match=r"img_train\.tar: n01440764\.tar has no images"):
        opened(root)


def test_unknown_class_directory(root):
    train_tar(root)
    write(root / "val" / "n00000001" / "1.JPEG", b"")
    with pytest.raises(DataError, match=r"val has 1 classes that the training set has not: n00000001"):
        opened(root, "eval")


# Labels that do not fit


@pytest.mark.parametrize("layout", [val_tar, val_flat, val_flat_below])
@pytest.mark.parametrize(
    ("labels", "file"),
    [
        (lambda root: text_labels(root, wnids=["n01440764"] * 3), TEXT),
        (lambda root: table_labels(root, dict(list(VAL.items())[:3])), r"LOC_val_solution\.csv"),
        (lambda root: packed_kit(root, numbers=[1, 2, 3]), rf"{KIT}\.tar\.gz"),
        (lambda root: unpacked_kit(root, numbers=[1, 2, 3]), KIT),
    ],
)
def test_number_of_labels(root, layout, labels, file):
    train_class_tars(root)
    layout(root)
    labels(root)
    with pytest.raises(DataError, match=rf"{file} has 3 labels but .* has 4 images: fetch both again"):
        opened(root, "eval")


@pytest.mark.parametrize(
    "labels",
    [
        lambda root: text_labels(root, wnids=["n01440764", "n09999999"] * 2),
        lambda root: table_labels(root, VAL | {"ILSVRC2012_val_00000002.JPEG": "n09999999"}),
    ],
)
def test_unknown_class_in_labels(root, labels):
    train_class_tars(root)
    val_tar(root)
    labels(root)
    with pytest.raises(DataError, match=r"has 1 classes that the training set has not: n09999999"):
        opened(root, "eval")


def test_unknown_class_in_the_kit(root):
    train_class_tars(root)
    val_tar(root)
    unpacked_kit(root, numbers=[1, 2, 3, 1001])
    with pytest.raises(DataError, match=rf"{KIT}: data/.*_truth\.txt has 1 classes that .*mat has not: 1001"):
        opened(root, "eval")


def test_table_that_does_not_fit(root):
    train_class_tars(root)
    val_tar(root)
    table_labels(root, header="ImageId;PredictionString")
    with pytest.raises(
        DataError, match=r"LOC_val_solution\.csv does not begin with ImageId,PredictionString"
    ):
        opened(root, "eval")
    images = dict(VAL)
    images["ILSVRC2012_val_00000009.JPEG"] = images.pop("ILSVRC2012_val_00000003.JPEG")
    table_labels(root, images)
    with pytest.raises(
        DataError, match=r"csv lacks 1 images that .*img_val\.tar has: ILSVRC2012_val_00000003"
    ):
        opened(root, "eval")
    write(root / "LOC_val_solution.csv", "ImageId,PredictionString\nILSVRC2012_val_00000001,\n")
    with pytest.raises(DataError, match=r"csv line 2 is no image and its class"):
        opened(root, "eval")


@pytest.mark.parametrize("name", ["data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"])
def test_damaged_kit(root, name):
    train_class_tars(root)
    val_tar(root)
    unpacked_kit(root)
    write(root / KIT / name, b"\x00damaged")
    with pytest.raises(DataError, match=rf"{KIT} cannot be read"):
        opened(root, "eval")
    (root / KIT / name).unlink()
    with pytest.raises(DataError, match=rf"{KIT} has no {name}: fetch it again"):
        opened(root, "eval")


def test_damaged_packed_kit(root):
    train_class_tars(root)
    val_tar(root)
    packed_kit(root)
    path = root / f"{KIT}.tar.gz"
    write(path, path.read_bytes()[:300])
    with pytest.raises(DataError, match=rf"{KIT}\.tar\.gz cannot be read"):
        opened(root, "eval")
    write(path, tar({}))
    with pytest.raises(
        DataError, match=rf"{KIT}\.tar\.gz has no data/ILSVRC2012_validation_ground_truth\.txt"
    ):
        opened(root, "eval")


# Damaged archives


def cut_end(content):
    """Without the end, exactly between two members."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        last = archive.getmembers()[-1]
    return content[: last.offset]


def damage_header(content):
    """A wrong byte in the second header."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        at = archive.getmembers()[1].offset + 20
    return content[:at] + b"\xff" + content[at + 1 :]


DAMAGES = [lambda b: b"", lambda b: b"<html>", lambda b: b[:900], lambda b: b[:-9800], cut_end, damage_header]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tar_is_named(root, damage):
    damaged = "is not a tar or is damaged or incomplete.*: fetch it again"
    path = root / "ILSVRC2012_img_train.tar"
    train_tar(root)
    whole = path.read_bytes()
    write(path, damage(whole))
    for split in ("train", "eval"):
        with pytest.raises(DataError, match=rf"ILSVRC2012_img_train\.tar {damaged}"):
            opened(root, split)
    inner = class_tars()
    inner["n02119789.tar"] = damage(inner["n02119789.tar"])
    write(path, tar(inner))
    with pytest.raises(DataError, match=rf"ILSVRC2012_img_train\.tar: n02119789\.tar {damaged}"):
        opened(root)
    path.unlink()
    for name, content in inner.items():
        write(root / name, content)
    with pytest.raises(DataError, match=rf"/n02119789\.tar {damaged}"):
        opened(root)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_evaluation_tar_is_named(root, damage):
    train_class_tars(root)
    val_tar(root)
    text_labels(root)
    path = root / "ILSVRC2012_img_val.tar"
    write(path, damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"img_val\.tar is not a tar or is damaged or incomplete"):
        opened(root, "eval")


def test_compressed_tar(root):
    with tarfile.open(root / "ILSVRC2012_img_train.tar", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"ILSVRC2012_img_train\.tar is not a tar"):
        opened(root)


def test_archive_that_changes_later(root):
    train_tar(root)
    source = opened(root)
    path = root / "ILSVRC2012_img_train.tar"
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(DataError, match=rf"had {size} bytes when the run began and has {size // 2} now"):
        source[0]
    path.unlink()
    with pytest.raises(
        DataError, match=r"train\.tar: n01440764/n01440764_10026\.JPEG cannot be read: No such"
    ):
        source[0]


def test_archive_that_shrinks_while_it_is_open(root):
    train_tar(root)
    source = opened(root)
    source[0]
    os.truncate(root / "ILSVRC2012_img_train.tar", 2048)
    with pytest.raises(DataError, match=r"n04120489_5\.JPEG cannot be read: the archive ends within it"):
        source[6]


# Reading from threads and other processes


@pytest.mark.parametrize("layout", TRAIN_LAYOUTS)
def test_read_is_pickled_without_open_files(root, layout):
    layout(root)
    source = opened(root)
    source[0]  # an archive is open now
    read = cloudpickle.loads(cloudpickle.dumps(source.read))
    for i in range(len(source)):
        again, example = read(i), source[i]
        assert (again["label"], again["image"].name) == (example["label"], example["image"].name)
        assert again["image"].data == example["image"].data


@pytest.mark.parametrize("layout", [val_tar, val_flat])
def test_evaluation_read_is_pickled(root, layout):
    train_tar(root)
    layout(root)
    text_labels(root)
    source = opened(root, "eval")
    read = cloudpickle.loads(cloudpickle.dumps(source.read))
    assert [read(i)["image"].data for i in range(4)] == [source[i]["image"].data for i in range(4)]


@pytest.mark.parametrize("layout", [train_tar, train_class_tars])
def test_threads(root, layout, monkeypatch):
    """Also while archives are closed because too many are open."""
    one = archives.functools.lru_cache(maxsize=1)(archives._opened.__wrapped__)
    monkeypatch.setattr(archives, "_opened", one)
    layout(root)
    source = opened(root)
    expected = [source[i]["image"].data for i in range(len(source))]
    together = threading.Barrier(4)

    def work(seed):
        together.wait()
        order = np.random.default_rng(seed).integers(len(source), size=500).tolist()
        return all(source[i]["image"].data == expected[i] for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


# The index is kept


@pytest.fixture
def scans(monkeypatch):
    """Names of the files that tarfile has opened to read."""
    names = []
    plain = tarfile.open

    def counted(*arguments, fileobj=None, **options):
        if isinstance(fileobj, io.BufferedReader):
            names.append(Path(fileobj.name).name)
        return plain(*arguments, fileobj=fileobj, **options)

    monkeypatch.setattr(tarfile, "open", counted)
    return names


def test_index_is_kept(root, cache, scans):
    train_class_tars(root)
    val_tar(root)
    text_labels(root)
    for split, expected in (
        ("train", sorted(f"{wnid}.tar" for wnid in CLASSES)),
        ("eval", ["ILSVRC2012_img_val.tar"]),
    ):
        first = opened(root, split)
        assert scans == expected
        scans.clear()
        second = opened(root, split)
        assert scans == []
        for i in range(len(first)):
            assert first[i]["image"].name == second[i]["image"].name
            assert first[i]["image"].data == second[i]["image"].data
            assert first[i]["label"] == second[i]["label"]
        assert (first.class_names, len(first)) == (second.class_names, len(second))
    assert len(list(cache.iterdir())) == 2  # nothing else is left there


def test_index_of_the_whole_archive_is_kept(root, scans):
    train_tar(root)
    opened(root)
    assert len(scans) == 4
    opened(root)
    assert len(scans) == 4


def test_evaluation_does_not_scan_the_training_images(root, scans):
    train_tar(root)
    val_tar(root)
    text_labels(root)
    opened(root, "eval")
    assert scans == ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"]


@pytest.mark.parametrize("change", ["size", "time"])
def test_index_of_a_changed_archive(root, scans, change):
    train_class_tars(root)
    assert len(opened(root)) == 7
    scans.clear()
    path = root / "n04120489.tar"
    if change == "size":
        write(path, tar({f"{i:03}.JPEG": jpeg("n04120489") for i in range(30)}))
    else:
        os.utime(path, ns=(0, 1))
    assert len(opened(root)) == (36 if change == "size" else 7)
    assert len(scans) == 3
    check(
        opened(root), ["n01440764"] * 3 + ["n02119789"] * 3 + ["n04120489"] * (30 if change == "size" else 1)
    )


def test_damaged_index_is_made_anew(root, cache, scans, caplog):
    train_class_tars(root)
    opened(root)
    (place,) = cache.iterdir()
    whole = place.read_bytes()
    other = io.BytesIO()
    np.savez(other, wnids=np.zeros(3))
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 1
    for content in (b"", whole[: len(whole) // 2], b"no index", other.getvalue(), bytes(flipped)):
        write(place, content)
        scans.clear()
        caplog.clear()
        check(opened(root), ["n01440764"] * 3 + ["n02119789"] * 3 + ["n04120489"])
        assert "is damaged and is made anew" in caplog.text
        assert len(scans) == 3
        opened(root)
        assert len(scans) == 3


def test_cache_that_cannot_be_written(root, tmp_path, caplog):
    train_tar(root)
    write(tmp_path / "cache", b"a file")
    check(opened(root), ["n01440764"] * 3 + ["n02119789"] * 3 + ["n04120489"])
    assert "every run will index the archives anew" in caplog.text
