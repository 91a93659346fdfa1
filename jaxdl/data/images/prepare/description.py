"""TFDS's description of the data set, and the records that it describes."""

import shutil
from collections.abc import Mapping
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from jaxdl.data.files import replace_file
from jaxdl.data.images.prepare.contents import Contents
from jaxdl.data.images.prepare.plan import SPLITS, VERSION, Plan
from jaxdl.data.images.prepare.writing import reported
from jaxdl.data.images.types import Source
from jaxdl.data.types import Split

INFO = "dataset_info.json"
"""The file that a reader looks for."""


def describe(plan: Plan, source: Source, made: Mapping[Split, list[Contents]]) -> None:
    """Writes TFDS's description, the file that a reader looks for as the last."""
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=plan.name, version=tfds.core.Version(VERSION), data_dir=str(plan.directory), module_name=""
    )
    info = tfds.core.DatasetInfo(
        builder=identity, features=_features(source), supervised_keys=("image", "label")
    )
    info.set_file_format("array_record")
    splits = [
        tfds.core.SplitInfo(
            name=SPLITS[split],
            shard_lengths=[each.examples for each in contents],
            num_bytes=sum(each.bytes for each in contents),
        )
        for split, contents in made.items()
    ]
    info.set_splits(tfds.core.SplitDict(splits))
    scratch = plan.directory / ".description.tmp"
    with reported(plan.directory):
        scratch.mkdir()
        info.write_to_directory(scratch)
        for path in sorted(scratch.iterdir(), key=lambda path: path.name == INFO):
            replace_file(plan.directory / path.name, path.read_bytes())
        shutil.rmtree(scratch)


def serialized(image: bytes, label: int, file: str) -> bytes:
    """Makes a record: an `Example` of TensorFlow with the features of `_features`."""
    example = tf_example_pb2.Example()
    feature = example.features.feature
    feature["image"].bytes_list.value.append(image)
    feature["label"].int64_list.value.append(label)
    feature["file"].bytes_list.value.append(file.encode())
    # Otherwise the order of the three would vary from process to process.
    return bytes(example.SerializeToString(deterministic=True))


def _features(source: Source) -> Any:
    names = source.class_names and list(source.class_names)
    classes = {"names": names} if names else {"num_classes": source.num_classes}
    return tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(**classes),
            "file": tfds.features.Text(),
        }
    )
