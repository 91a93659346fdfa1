"""TFDS data sets, made here as array_record files from encoded images, without TensorFlow."""

import importlib.machinery
import io
import itertools
import json
import shutil
import sys
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.batches import train_batches
from jaxdl.data.images.sources import open_source
from jaxdl.errors import ConfigError, DataError

tfds.disable_progress_bar()


def picture(i, kind):
    buffer = io.BytesIO()
    Image.new("RGB", (12, 10 + i), (20 * i, 50, 100)).save(buffer, kind)
    buffer.seek(0)
    return buffer


def builder_class(name, *, label="label", shape=(None, None, 3), supervised=None, version="1.0.0"):
    """A data set of 6 examples for training and 3 for validation; labels are the number modulo 3."""
    label_feature = tfds.features.ClassLabel(names=["ant", "bee", "cat"])

    def info(self):
        features = {
            "image": tfds.features.Image(shape=shape),
            label: label_feature,
            "file": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=supervised
        )

    def examples(first, last):
        for i in range(first, last):
            kind = "JPEG" if i % 2 else "PNG"
            yield i, {"image": picture(i, kind), label: i % 3, "file": f"{i}.{kind}"}

    def splits(self, manager):
        return {"train": examples(0, 6), "validation": examples(6, 9)}

    return type(
        name,
        (tfds.core.GeneratorBasedBuilder,),
        {
            # Of any other module TFDS wants the file's path, by a package that it does not install.
            "__module__": "__main__",
            "VERSION": tfds.core.Version(version),
            "_info": info,
            "_split_generators": splits,
            "_generate_examples": examples,
        },
    )


def prepare(root, cls):
    cls(data_dir=str(root), file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    prepare(root, builder_class("Pictures"))
    return root


@pytest.fixture
def copy(root, tmp_path):
    """A copy of the version's directory that a test may damage."""
    return shutil.copytree(root / "pictures/1.0.0", tmp_path / "copy")


def config(directory, dataset="pictures", **other):
    return ImageDataConfig(name="tfds", dir=str(directory), dataset=dataset, image_size=8, **other)


def check(source, count):
    assert len(source) == count
    seen = []
    for i in range(count):
        example = source[i]
        number = example["image"].height - 10
        assert example["label"] == number % 3
        assert np.abs(example["image"].pixels().astype(int) - (20 * number, 50, 100)).max() < 5
        seen.append(number)
    return sorted(seen)


@pytest.mark.parametrize("dataset", ["pictures", "pictures:1.0.0"])
def test_from_the_root(root, dataset):
    source = open_source(config(root, dataset=dataset), "train")
    assert check(source, 6) == [0, 1, 2, 3, 4, 5]
    assert check(open_source(config(root, dataset=dataset), "eval"), 3) == [6, 7, 8]
    assert (source.num_classes, source.class_names) == (3, ("ant", "bee", "cat"))
    assert (source.augment, source.photographs) == ("crop_flip", True)


def test_from_the_directory_of_a_version(copy):
    assert check(open_source(config(copy), "train"), 6) == [0, 1, 2, 3, 4, 5]


def test_split_slices(root):
    settings = config(root, train_split="train[:4]", eval_split="train[4:]")
    both = check(open_source(settings, "train"), 4) + check(open_source(settings, "eval"), 2)
    assert sorted(both) == [0, 1, 2, 3, 4, 5]


def test_without_tensorflow(root):
    settings = config(root, batch_size=5, workers=3)
    batches = train_batches(open_source(settings, "train"), settings, seed=0)
    for batch in itertools.islice(batches, 10):
        assert batch["image"].shape == (5, 8, 8, 3)
    batches.close()
    assert "tensorflow" not in sys.modules


def test_newest_version(tmp_path, root):
    for version in ("9.0.0", "10.0.0"):
        directory = tmp_path / "pictures" / version
        shutil.copytree(root / "pictures/1.0.0", directory)
        info = json.loads((directory / "dataset_info.json").read_text())
        info["version"] = version
        info["splits"] = info["splits"][: 1 if version == "9.0.0" else 2]
        (directory / "dataset_info.json").write_text(json.dumps(info))
    assert len(open_source(config(tmp_path), "eval")) == 3
    with pytest.raises(ConfigError, match="it has: train"):
        open_source(config(tmp_path, dataset="pictures:9.0.0"), "eval")
    with pytest.raises(DataError, match=r"has no version 8\.0\.0 .*it has: 10\.0\.0, 9\.0\.0"):
        open_source(config(tmp_path, dataset="pictures:8.0.0"), "eval")


def test_supervised_keys_and_small_images(tmp_path):
    prepare(tmp_path, builder_class("Small", label="kind", shape=(28, 28, 1), supervised=("image", "kind")))
    source = open_source(config(tmp_path, dataset="small"), "train")
    assert (source.augment, source.photographs) == ("shift", False)
    assert source[0]["image"].pixels().shape[2] == 3


def test_not_images_with_labels(tmp_path):
    prepare(tmp_path, builder_class("Odd", label="kind"))
    with pytest.raises(DataError, match=r"does not pair an image with a class label; .*: file, image, kind"):
        open_source(config(tmp_path, dataset="odd"), "train")


def test_unknown_names(root):
    with pytest.raises(ConfigError, match=r"data.train_split 'trian' .* it has: train, validation"):
        open_source(config(root, train_split="trian"), "train")
    with pytest.raises(DataError, match=r"has no data set nothing; it has: .*pictures"):
        open_source(config(root, dataset="nothing"), "train")
    with pytest.raises(DataError, match=r"holds pictures, but data\.dataset is other:1\.0\.0"):
        open_source(config(root / "pictures/1.0.0", dataset="other:1.0.0"), "train")


def test_damage(copy):
    (copy / "pictures-validation.array_record-00000-of-00001").unlink()
    with pytest.raises(DataError, match=r"pictures-validation\.array_record-00000-of-00001 is missing"):
        open_source(config(copy), "eval")

    shard = copy / "pictures-train.array_record-00000-of-00001"
    data = bytearray(shard.read_bytes())
    data[200] ^= 255
    shard.write_bytes(data)
    source = open_source(config(copy), "train")
    with pytest.raises(DataError, match=r"copy train record \d cannot be read"):
        [source[i] for i in range(6)]

    (copy / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="copy is not a readable TFDS data set"):
        open_source(config(copy), "train")


def test_other_file_format(copy):
    info = json.loads((copy / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    (copy / "dataset_info.json").write_text(json.dumps(info))
    for shard in copy.glob("*array_record*"):
        shard.rename(shard.with_name(shard.name.replace("array_record", "tfrecord")))
    with pytest.raises(DataError, match="tfds convert_format"):
        open_source(config(copy), "train")


def test_label_out_of_range(copy):
    features = json.loads((copy / "features.json").read_text())
    features["featuresDict"]["features"]["label"]["classLabel"]["numClasses"] = "2"
    (copy / "features.json").write_text(json.dumps(features))
    (copy / "label.labels.txt").write_text("ant\nbee\n")
    source = open_source(config(copy), "train")
    with pytest.raises(DataError, match=r"label 2 is not in 0\.\.1"):
        [source[i] for i in range(6)]


def test_tensorflow_where_it_is_installed_gets_no_gpu(monkeypatch, root):
    """It would take all the memory of the GPUs that JAX is to have."""
    hidden = []
    fake = types.ModuleType("tensorflow")
    fake.__spec__ = importlib.machinery.ModuleSpec("tensorflow", None)
    fake.config = types.SimpleNamespace(set_visible_devices=lambda *args: hidden.append(args))
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    open_source(config(root), "train")
    assert hidden == [([], "GPU")]
