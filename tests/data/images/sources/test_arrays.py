"""Arrays in an .npz file, laid out as Keras's data sets are."""

import cloudpickle
import numpy as np
import pytest

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.sources.arrays import open_arrays, open_digits
from jaxdl.errors import DataError

RANDOM = np.random.default_rng(0)


def images(count, *shape):
    return RANDOM.integers(256, size=(count, *shape), dtype=np.uint8)


def arrays(*shape, labels=np.uint8, column=False):
    """Six images for training and four for evaluation, of four classes."""
    train, test = np.array([0, 1, 2, 0, 1, 2], labels), np.array([3, 0, 0, 1], labels)
    return {
        "x_train": images(6, *shape),
        "y_train": train[:, None] if column else train,
        "x_test": images(4, *shape),
        "y_test": test[:, None] if column else test,
    }


def opened(tmp_path, content, split="train", save=np.savez):
    path = tmp_path / "data.npz"
    save(path, **content)
    return open_arrays(ImageDataConfig(name="image_folder", dir=str(path)), split)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    ("shape", "augment", "photographs"),
    [
        ((28, 28), "shift", False),
        ((5, 7), "shift", False),
        ((64, 64, 1), "shift", False),
        ((32, 32, 3), "shift_flip", False),
        ((8, 65), "crop_flip", True),
        ((65, 8, 1), "crop_flip", True),
        ((96, 96, 3), "crop_flip", True),
    ],
)
def test_images_and_labels(tmp_path, shape, augment, photographs, save):
    content = arrays(*shape)
    for split, part in (("train", "train"), ("eval", "test")):
        source = opened(tmp_path, content, split, save)
        expected = content[f"x_{part}"]
        expected = expected[..., None] if len(shape) == 2 else expected
        assert (source.name, source.split, len(source)) == ("arrays", split, len(expected))
        assert (source.num_classes, source.class_names) == (4, None)
        assert (source.augment, source.photographs) == (augment, photographs)
        for i in range(len(source)):
            picture = source[i]["image"]
            assert (picture.height, picture.width) == shape[:2]
            assert picture.pixels().dtype == np.uint8
            np.testing.assert_array_equal(picture.pixels(), np.broadcast_to(expected[i], (*shape[:2], 3)))
            assert source[i]["label"] == content[f"y_{part}"][i]


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.uint64])
def test_types_of_labels(tmp_path, kind, column):
    source = opened(tmp_path, arrays(4, 4, labels=kind, column=column), "eval")
    assert [source[i]["label"] for i in range(4)] == [3, 0, 0, 1]
    assert type(source[0]["label"]) is int


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 1), (9, 7, 3), (700, 700, 3)])
def test_statistics_are_those_of_the_training_images(tmp_path, shape):
    content = arrays(*shape)
    content["x_train"][..., 0] //= 2
    channels = shape[2] if len(shape) == 3 else 1
    values = content["x_train"].reshape(-1, channels) / 255
    for split in ("train", "eval"):
        source = opened(tmp_path, content, split)
        assert source.mean == pytest.approx(np.broadcast_to(values.mean(axis=0), 3))
        assert source.std == pytest.approx(np.broadcast_to(values.std(axis=0), 3))
        assert {type(value) for value in (*source.mean, *source.std)} == {float}


def test_statistics_of_one_colour(tmp_path):
    content = arrays(4, 4, 3)
    content["x_train"][:] = (0, 255, 51)
    source = opened(tmp_path, content)
    assert source.mean == pytest.approx((0, 1, 0.2))
    assert min(source.std) > 0


def test_digits_keep_their_statistics():
    train = open_digits(ImageDataConfig(name="digits"), "train")
    pixels = np.stack([train[i]["image"].pixels() for i in range(len(train))]) / 255
    assert (train.mean, train.std) == (
        pytest.approx((pixels.mean(),) * 3),
        pytest.approx((pixels.std(),) * 3),
    )
    assert (train.augment, train.num_classes, pixels.shape) == ("shift", 10, (1437, 8, 8, 3))


def test_read_is_picklable_and_holds_its_split_only(tmp_path):
    content = arrays(30, 30, 3)
    content["x_train"] = images(6000, 30, 30, 3)
    content["y_train"] = np.zeros(6000, np.uint8)
    source = opened(tmp_path, content, "eval")
    pickled = cloudpickle.dumps(source.read)
    assert len(pickled) < 100_000
    read = cloudpickle.loads(pickled)
    np.testing.assert_array_equal(read(2)["image"].pixels(), source[2]["image"].pixels())


# What is refused


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": None}, r"has no x_train but y_train, x_test, y_test: set data\.dir to"),
        ({"y_test": None}, r"has no y_test but x_train, y_train, x_test: set data\.dir"),
        ({"x_train": np.zeros((6, 4, 4), np.float32)}, r"x_train is float32 \[6, 4, 4\], wanted is uint8"),
        ({"x_test": np.zeros((4, 4, 4), np.int64)}, r"x_test is int64 \[4, 4, 4\], wanted is uint8"),
        ({"x_train": images(6, 4, 4, 4)}, r"x_train is uint8 \[6, 4, 4, 4\], wanted is uint8"),
        ({"x_train": images(6, 3, 4, 4)}, r"x_train is uint8 \[6, 3, 4, 4\], wanted is uint8"),
        ({"x_train": images(6, 16)}, r"x_train is uint8 \[6, 16\], wanted is uint8"),
        ({"x_train": np.uint8(3)}, r"x_train is uint8 \[\], wanted is uint8"),
        ({"x_test": images(0, 4, 4)}, r"x_test is uint8 \[0, 4, 4\], wanted is uint8"),
        ({"x_test": images(4, 4, 0)}, r"x_test is uint8 \[4, 4, 0\], wanted is uint8"),
        ({"y_train": np.zeros(6)}, r"y_train is float64 \[6\], wanted is integers \[N\] or \[N, 1\]"),
        ({"y_train": np.zeros(6, bool)}, r"y_train is bool \[6\], wanted is integers"),
        ({"y_train": np.eye(6, dtype=int)}, r"y_train is int64 \[6, 6\], wanted is integers"),
        ({"y_train": np.int64(3)}, r"y_train is int64 \[\], wanted is integers"),
        ({"y_train": np.zeros(5, int)}, r"x_train has 6 images but y_train has 5 labels"),
        ({"y_test": np.zeros((0, 1), int)}, r"x_test has 4 images but y_test has 0 labels"),
        ({"y_test": np.array([0, -1, 2, -1])}, r"2 of 4 labels of y_test .* first is -1 at example 1"),
        ({"x_test": images(4, 4, 5)}, r"image of x_train is \[4, 4, 1\] but one of x_test is \[4, 5, 1\]"),
        ({"x_test": images(4, 4, 4, 3)}, r"image of x_train is \[4, 4, 1\] but one of x_test is \[4, 4, 3\]"),
        ({"y_train": np.array([None] * 6)}, r"y_train cannot be read \(Object arrays cannot be loaded"),
    ],
)  # fmt: skip
def test_errors_name_file_and_fault(tmp_path, split, change, message):
    content = {name: array for name, array in (arrays(4, 4) | change).items() if array is not None}
    with pytest.raises(DataError, match=rf"data\.npz.*{message}"):
        opened(tmp_path, content, split)


def damaged(tmp_path, content):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"data\.npz: x_train cannot be read .*: set data\.dir to an \.npz file"
    ):
        open_arrays(ImageDataConfig(name="image_folder", dir=str(path)), "train")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_file(tmp_path, save):
    opened(tmp_path, arrays(30, 30), save=save)
    content = (tmp_path / "data.npz").read_bytes()
    damaged(tmp_path, content[: len(content) // 2])
    damaged(tmp_path, content[:1000] + b"\xff\x00\xff" + content[1003:])


def test_other_files(tmp_path):
    damaged(tmp_path, b"")
    damaged(tmp_path, b"<html>not found")
    with (tmp_path / "array.npy").open("wb") as file:
        np.save(file, images(6, 4, 4))
    damaged(tmp_path, (tmp_path / "array.npy").read_bytes())
    for path in (tmp_path, tmp_path / "nowhere.npz"):
        with pytest.raises(DataError, match=rf"{path}: x_train cannot be read .*set data\.dir"):
            open_arrays(ImageDataConfig(name="image_folder", dir=str(path)), "train")
