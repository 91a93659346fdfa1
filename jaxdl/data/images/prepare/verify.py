"""Reading a prepared data set back."""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader

from jaxdl.data.files import printable
from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.prepare.contents import SHARDS, recorded
from jaxdl.data.images.prepare.description import INFO
from jaxdl.data.images.prepare.progress import TELL_EVERY
from jaxdl.data.images.prepare.writing import digested
from jaxdl.data.parallel import process_map
from jaxdl.errors import DataError

_NAMED = 5  # damages in one message


def verify(directory: Path, processes: int, say: Callable[[str], None]) -> int:
    """Reads a prepared data set back: parses every record, decodes every image, compares all digests.

    Args:
        directory: of the version, as `Plan.directory`.
        processes: how many read.
        say: takes lines about the progress.

    Returns:
        The number of examples.

    Raises:
        DataError: something is not as it was prepared; the message names shards and records.
    """
    where = printable(directory)
    if not (directory / INFO).is_file():
        raise DataError(f"{where} holds no finished data set ({INFO} is missing): prepare it first")
    try:
        splits = tfds.builder_from_directory(str(directory)).info.splits
        lengths = {
            Path(path): length
            for split in splits.values()
            for path, length in zip(split.filepaths, split.shard_lengths, strict=True)
        }
    except Exception as error:  # a damaged description raises whatever its parser raises
        raise DataError(f"{where} has a damaged description ({error}): prepare it again") from error
    _stored_features.cache_clear()
    told, damages = time.monotonic(), []
    with process_map(min(processes, len(lengths))) as over:
        for done, damage in enumerate(over(_damage, lengths.items()), 1):
            damages += damage
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                say(f"{done:,}/{len(lengths):,} shards read, {len(damages):,} damages")
    if damages:
        more = [f"and {len(damages) - _NAMED} more"] if len(damages) > _NAMED else []
        raise DataError(
            "\n  ".join([f"{where} is damaged (preparing it again mends it):", *damages[:_NAMED], *more])
        )
    return sum(lengths.values())


def _damage(shard: tuple[Path, int]) -> list[str]:
    """Reads a shard of so many examples back; returns what is wrong."""
    path, length = shard
    where, entry, digest = printable(path), recorded(path), digested(path)
    if digest is None:
        return [f"{where} is missing or cannot be read"]
    if entry is None or entry.examples != length:
        return [f"{where} has no entry in {SHARDS}, or one with another number of examples"]
    features, decoders = _stored_features(path.parent), {"image": tfds.decode.SkipDecoding()}
    damages = []
    try:
        reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
        found = reader.num_records()
    except (RuntimeError, ValueError) as error:
        return [f"{where} cannot be read ({printable(error)})"]
    if found != length:
        return [f"{where} has {found} records that can be read, not {length}"]
    for index in range(length):
        try:
            example = features.deserialize_example_np(reader.read([index])[0], decoders=decoders)
            Encoded(example["image"], f"the image of {printable(example['file'].decode())}").pixels()
            label = int(example["label"])
            if not 0 <= label < features["label"].num_classes:
                raise ValueError(f"label {label} is not in 0..{features['label'].num_classes - 1}")
        except Exception as error:  # noqa: BLE001 - the reader is C++, the parser protobuf's, the rest ours
            damages.append(f"{where} record {index}: {printable(error)}")
    reader.close()
    if not damages and digest != (entry.bytes, entry.sha256):
        damages.append(f"{where}: its SHA-256 is not the recorded one")
    return damages


@cache
def _stored_features(directory: Path) -> Any:
    return tfds.builder_from_directory(str(directory)).info.features
