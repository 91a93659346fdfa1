import gzip
import itertools
import struct

import numpy as np
import pytest

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.batches import eval_batches, train_batches
from jaxdl.data.images.sources import SOURCES, open_source
from jaxdl.data.images.types import Source
from jaxdl.errors import DataError


def idx(array, *, magic=None, shape=None):
    """An array as an idx file."""
    shape = array.shape if shape is None else shape
    magic = bytes((0, 0, 8, len(shape))) if magic is None else magic
    return magic + struct.pack(f">{len(shape)}I", *shape) + array.tobytes()


PIXELS = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
LABELS = np.array([9, 0, 3, 7], np.uint8)


def fashion(tmp_path, *, images=None, labels=None, prefix="train", suffix=""):
    for name, content in (
        ("images-idx3", idx(PIXELS) if images is None else images),
        ("labels-idx1", idx(LABELS) if labels is None else labels),
    ):
        path = tmp_path / f"{prefix}-{name}-ubyte{suffix}"
        path.write_bytes(gzip.compress(content) if suffix else content)
    return ImageDataConfig(name="fashion_mnist", dir=str(tmp_path), image_size=28)


def pixels_of(source, index):
    return source[index]["image"].pixels()


def test_every_configurable_source_opens():
    names = ImageDataConfig.__dataclass_fields__["name"].type.__args__
    assert set(SOURCES) == set(names)


@pytest.mark.parametrize("name", ["fashion_mnist", "image_folder", "tfds"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_empty_or_missing_directory(name, split, tmp_path):
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=str(directory)):
            open_source(ImageDataConfig(name=name, dir=str(directory), dataset="x"), split)


def test_digits():
    config = ImageDataConfig(name="digits", image_size=8)
    train, held_out = open_source(config, "train"), open_source(config, "eval")
    assert (len(train), len(held_out)) == (1437, 360)
    assert (train.num_classes, train.augment, train.class_names) == (10, "shift", tuple("0123456789"))
    counts = np.bincount([held_out[i]["label"] for i in range(360)])
    assert counts.min() >= 34
    assert counts.max() <= 38
    images = [pixels_of(source, i) for source in (train, held_out) for i in range(len(source))]
    assert {(image.shape, image.dtype) for image in images} == {((8, 8, 3), np.dtype(np.uint8))}
    everything = np.stack(images)
    assert (everything == everything[..., :1]).all()
    assert (everything.min(), everything.max()) == (0, 255)
    # The two parts are all 1,797 images (some are alike), and each part is the same every time.
    from sklearn.datasets import load_digits

    whole = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert sorted(i.tobytes() for i in everything[..., 0]) == sorted(i.tobytes() for i in whole)
    again = open_source(config, "eval")
    assert all(np.array_equal(pixels_of(again, i), pixels_of(held_out, i)) for i in range(360))
    pixels = everything[: len(train)] / 255
    assert train.mean == pytest.approx((pixels.mean(),) * 3)
    assert train.std == pytest.approx((pixels.std(),) * 3)
    assert held_out.mean == train.mean


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path, suffix):
    config = fashion(tmp_path, suffix=suffix)
    source = open_source(config, "train")
    assert (len(source), source.num_classes, source.augment) == (4, 10, "shift_flip")
    for i in range(4):
        assert source[i]["label"] == LABELS[i]
        np.testing.assert_array_equal(pixels_of(source, i), np.stack([PIXELS[i]] * 3, axis=-1))
    with pytest.raises(IndexError):
        source[4]
    with pytest.raises(DataError, match=r"neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte\.gz"):
        open_source(config, "eval")


def test_fashion_and_mnist_have_their_own_class_names(tmp_path):
    labels = np.array([9, 2, 1, 1, 6, 1, 4, 6, 5, 7, 4], np.uint8)
    images = idx(np.zeros((11, 2, 2), np.uint8))
    config = fashion(tmp_path, images=images, labels=idx(labels), prefix="t10k")
    assert open_source(config, "eval").class_names[9] == "Ankle boot"
    fashion(tmp_path, images=images, labels=idx(labels[::-1]), prefix="t10k")
    assert open_source(config, "eval").class_names[9] == "9"


IMAGES = r"train-images-idx3-ubyte"
TARGETS = r"train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": b""}, f"{IMAGES} starts with ''"),
        ({"images": idx(PIXELS)[:11]}, f"{IMAGES} ends within its header"),
        ({"images": idx(PIXELS)[:-1]}, f"{IMAGES} has 23 bytes of content but its header .* asks for 24"),
        ({"images": idx(PIXELS) + b"\0"}, f"{IMAGES} has 25 bytes"),
        ({"images": idx(PIXELS, magic=b"\0\0\x0d\x03")}, f"{IMAGES} starts with '00000d03'"),
        ({"images": idx(LABELS)}, f"{IMAGES} starts with '00000801'"),
        ({"images": idx(PIXELS[:0])}, f"{IMAGES} holds no examples"),
        ({"images": idx(PIXELS[:3])}, f"{IMAGES} has 3 images but .*{TARGETS} has 4 labels"),
        ({"labels": idx(LABELS)[:-2]}, f"{TARGETS} has 2 bytes of content"),
        ({"labels": idx(PIXELS)}, f"{TARGETS} starts with '00000803'"),
        ({"labels": idx(LABELS + 3)}, f"{TARGETS}: 2 of 4 labels are not in 0..9, the first is 12 at"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_errors_name_file_and_fault(tmp_path, change, message, suffix):
    message = message.replace("-ubyte", f"-ubyte{suffix}")
    with pytest.raises(DataError, match=message):
        open_source(fashion(tmp_path, suffix=suffix, **change), "train")


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b"plain" + b, lambda b: b[:20] + b"\xff" * 9 + b[29:]]
)
def test_damaged_gzip(tmp_path, damage):
    config = fashion(tmp_path, suffix=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        open_source(config, "train")


@pytest.mark.parametrize("size", [5, 32])
def test_synthetic(size):
    config = ImageDataConfig(name="synthetic", image_size=size, synthetic_examples=18, synthetic_classes=3)
    train, held_out = open_source(config, "train"), open_source(config, "eval")
    assert (len(train), len(held_out), train.num_classes, train.augment) == (18, 5, 3, "none")
    assert [train[i]["label"] for i in range(6)] == [0, 1, 2, 0, 1, 2]
    images = np.stack([pixels_of(source, i) for source in (train, held_out) for i in range(len(source))])
    assert (images.shape, images.dtype) == ((23, size, size, 3), np.uint8)
    assert len({image.tobytes() for image in images}) == 23
    np.testing.assert_array_equal(pixels_of(train, 7), pixels_of(open_source(config, "train"), 7))


def test_synthetic_can_be_learnt():
    config = ImageDataConfig(name="synthetic", image_size=16, synthetic_examples=40, synthetic_classes=4)
    train, held_out = open_source(config, "train"), open_source(config, "eval")
    means = np.stack([np.mean([pixels_of(train, i) for i in range(c, 40, 4)], axis=0) for c in range(4)])
    for i in range(len(held_out)):
        distances = ((means - pixels_of(held_out, i)) ** 2).sum(axis=(1, 2, 3))
        assert distances.argmin() == held_out[i]["label"]


@pytest.mark.parametrize("label", [-1, 3])
def test_label_out_of_range_is_found_at_the_example(label):
    image = np.zeros((2, 2, 3), np.uint8)
    source = Source("x", "train", 5, lambda index: {"image": image, "label": label}, 3, "none")
    with pytest.raises(DataError, match=rf"x train example 4: label {label} is not in 0\.\.2"):
        source[4]


def test_digits_through_the_loader():
    config = ImageDataConfig(name="digits", image_size=8, batch_size=50, eval_batch_size=100, workers=1)
    batches = train_batches(open_source(config, "train"), config, seed=0)
    images = np.concatenate([batch["image"] for batch in itertools.islice(batches, 3)])
    batches.close()
    assert images.shape == (150, 8, 8, 3)
    assert sum(int(batch["mask"].sum()) for batch in eval_batches(open_source(config, "eval"), config)) == 360
