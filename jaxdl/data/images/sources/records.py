"""Data sets that TensorFlow Datasets has prepared as array_record files, read without TensorFlow."""

import contextlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable
from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.types import Augment, Example, Source
from jaxdl.data.types import Split
from jaxdl.errors import ConfigError, DataError

_INFO = "dataset_info.json"
PREPARED = "prepared.json"
"""What experiments.prepare writes beside it, of what and how the data set was made."""
_SMALL = 64  # longest side, in pixels, up to which images of one size are not treated as photographs


def open_tfds(config: ImageDataConfig, split: Split) -> Source:
    """Opens one split of a prepared data set.

    `config.dataset` is `name`, `name/configuration` or either with
    `:version`; `config.dir` is the directory of all data sets or that of one
    version. The split may be a slice, as `train[:90%]`. Images that
    all have one size of at most 64 pixels get `shift_flip` (greyscale ones
    `shift`, they are mostly characters), others are photographs.

    Raises:
        ConfigError: there is no such split.
        DataError: the data set is missing, damaged, in other files, or not of images with one label.
    """
    import tensorflow_datasets as tfds  # only this source needs it

    keep_tensorflow_from_gpus()
    assert config.dir is not None  # ImageDataConfig has checked both
    assert config.dataset is not None
    directory = version_directory(Path(config.dir).expanduser(), config.dataset)
    where = printable(directory)
    try:
        builder = tfds.builder_from_directory(str(directory))
        info, features = builder.info, dict(builder.info.features)
    except Exception as error:  # a damaged description raises whatever its parser raises
        raise DataError(f"{where} is not a readable TFDS data set ({error}): prepare it again") from error
    if info.name != re.split("[/:]", config.dataset)[0]:
        raise DataError(f"{where} holds {info.name}, but data.dataset is {config.dataset}")
    image_key, label_key = info.supervised_keys or ("image", "label")
    image, label = features.get(image_key), features.get(label_key)
    if not (isinstance(image, tfds.features.Image) and isinstance(label, tfds.features.ClassLabel)):
        raise DataError(
            f"{where} does not pair an image with a class label; its features are: "
            f"{', '.join(sorted(features))}"
        )

    wanted = config.train_split if split == "train" else config.eval_split
    try:
        instructions = info.splits[wanted].file_instructions
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"data.{split}_split {wanted!r} is not a split of {where}; it has: {', '.join(info.splits)}"
        ) from error
    missing = [file.filename for file in instructions if not Path(file.filename).exists()]
    if missing:
        raise DataError(
            f"{printable(missing[0])} is missing ({len(missing)} files are): prepare the data set again"
        )
    try:
        records = builder.as_data_source(wanted, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    except (NotImplementedError, ValueError) as error:
        raise DataError(
            f"{where} is not in array_record files: convert it, where TensorFlow is installed, by "
            f"`tfds convert_format --dataset_version_dir={where} --out_file_format=array_record`"
        ) from error
    if len(records) == 0:
        raise DataError(f"{where}: split {wanted!r} has no examples")

    # No other features: they cost time, and some of their decoders need TensorFlow.
    parsed = {image_key: image, label_key: label}
    if isinstance(features.get("file"), tfds.features.Text):  # where experiments.prepare had it from
        parsed["file"] = features["file"]
    record = tfds.features.FeaturesDict(parsed)
    decoders = {image_key: tfds.decode.SkipDecoding()}  # TFDS would refuse what is not exactly JPEG or PNG

    def read(index: int) -> Example:
        name = f"{where} {wanted} record {index}"
        try:
            example: dict[str, Any] = record.deserialize_example_np(records[index], decoders=decoders)
        except Exception as error:  # the reader is C++ (RuntimeError), the parser is protobuf's
            raise DataError(f"{name} cannot be read ({error}): prepare the data set again") from error
        if "file" in example:
            name += f" ({printable(example['file'].decode(errors='replace'))})"
        return {"image": Encoded(example[image_key], name), "label": int(example[label_key])}

    augment = _augment(image.shape)
    return Source(
        name="tfds",
        split=split,
        length=len(records),
        read=read,
        num_classes=label.num_classes,
        class_names=tuple(label.names) if label.names else None,
        **{"augment": augment, "photographs": augment == "crop_flip"} | _original(directory),
    )


def keep_tensorflow_from_gpus() -> None:
    """Hides all GPUs from TensorFlow, if it is installed: it would take their memory as soon as TFDS uses
    it."""
    if importlib.util.find_spec("tensorflow") is None:
        return
    import tensorflow as tf

    # A RuntimeError: the program has used TensorFlow already, and decided by itself.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def _augment(shape: tuple[int | None, ...]) -> Augment:
    height, width, channels = shape
    if height is None or width is None or max(height, width) > _SMALL:
        return "crop_flip"
    return "shift" if channels == 1 else "shift_flip"


def _original(directory: Path) -> dict[str, Any]:
    """What experiments.prepare kept of the source: how its images are treated, as arguments of `Source`."""
    try:
        kept = json.loads((directory / PREPARED).read_text("utf-8"))["treatment"]
        return {
            "augment": kept["augment"],
            "photographs": kept["photographs"],
            "mean": tuple(kept["mean"]),
            "std": tuple(kept["std"]),
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        file = printable(directory / PREPARED)
        raise DataError(f"{file} cannot be read ({error}): prepare the data set again") from error


def version_directory(root: Path, dataset: str) -> Path:
    """Finds the directory with the description; of several versions the newest.

    Not `tfds.builder`: it asks a bucket in the internet, and runs the data
    set's own code, part of which needs TensorFlow.
    """
    if (root / _INFO).is_file():
        return root
    name, _, version = dataset.partition(":")
    parent = root / name
    if not parent.is_dir():
        raise DataError(f"{printable(root)} has no data set {name}; it has: {_inside(root)}")
    found = sorted((path.parent for path in parent.glob(f"*/{_INFO}")), key=_version_key)
    chosen = [path for path in found if not version or path.name == version]
    if not chosen:
        raise DataError(
            f"{printable(parent)} has no {'version ' + version if version else 'prepared version'} "
            f"(a directory with {_INFO}); it has: {_inside(parent)}"
        )
    return chosen[-1]


def _version_key(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name))


def _inside(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    return ", ".join(map(printable, names)) or "nothing"
