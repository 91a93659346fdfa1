"""Shards: which examples one has, and making it unless it is there."""

import contextlib
import json
import logging
import math
import multiprocessing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from numpy.typing import NDArray

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable, replace_file, temporary_name
from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.prepare.contents import Contents, record_of, recorded
from jaxdl.data.images.prepare.description import serialized
from jaxdl.data.images.prepare.encoding import stored
from jaxdl.data.images.prepare.plan import SPLITS, Plan
from jaxdl.data.images.prepare.writing import digested, reported
from jaxdl.data.images.sources import open_source
from jaxdl.data.images.types import Source
from jaxdl.data.types import Split
from jaxdl.errors import DataError

# One record a chunk is what a reader by index wants. Encoded images do not compress any further.
_WRITER = "group_size:1,uncompressed"


@dataclass(frozen=True)
class Shard:
    """One shard to make: number `number` of `count`, of a split with `length` examples."""

    plan: Plan
    split: Split
    number: int
    count: int
    length: int

    @property
    def path(self) -> Path:
        """Its file."""
        place = f"{self.number:05d}-of-{self.count:05d}"
        return self.plan.directory / f"{self.plan.name}-{SPLITS[self.split]}.array_record-{place}"

    @property
    def indices(self) -> NDArray[np.int64]:
        """Numbers of its examples in the source: int64 [examples]."""
        first = self.number * self.plan.shard_size
        return order(self.length)[first : first + self.plan.shard_size]


def shards_of(plan: Plan, split: Split, length: int) -> list[Shard]:
    """Returns the shards of a split with `length` examples."""
    count = math.ceil(length / plan.shard_size)
    return [Shard(plan, split, number, count, length) for number in range(count)]


def order(length: int) -> NDArray[np.int64]:
    """In which order the examples of a source are stored: int64 [length], a shuffle that is always the same.

    Readers of TFDS expect one: of a source sorted by class the slice `train[:10%]` would have few classes.
    """
    # NumPy promises never to change the stream of this generator, unlike that of default_rng.
    return np.random.RandomState(0).permutation(length).astype(np.int64)


@cache
def cached_source(config: ImageDataConfig, split: Split) -> Source:
    """Opens a source, once in each process."""
    if multiprocessing.parent_process() is not None:
        logging.disable(logging.WARNING)  # the first process has opened it too and has said this
    return open_source(config, split)


def made_shard(shard: Shard) -> tuple[Contents, bool]:
    """Makes a shard unless it is there and sound.

    Returns:
        What is in it, and whether it was made.

    Raises:
        DataError: the source has changed, an image is damaged (unless `on_bad` says to skip it), or the shard
            cannot be written.
    """
    kept = recorded(shard.path)
    # One with gaps is no use to who does not allow them.
    usable = kept is not None and (shard.plan.config.on_bad == "skip" or not kept.skipped)
    if kept is not None and usable and digested(shard.path) == (kept.bytes, kept.sha256):
        return kept, False
    temporary = temporary_name(shard.path)
    try:
        examples, skipped = _write(shard, temporary)
        with reported(shard.path):
            digest = digested(temporary)
            if digest is None:
                raise FileNotFoundError(f"{temporary.name} was removed")
            contents = Contents(examples, *digest, skipped)
            temporary.replace(shard.path)
            replace_file(record_of(shard.path), json.dumps(asdict(contents)).encode())
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return contents, True


def _write(shard: Shard, path: Path) -> tuple[int, list[str]]:
    """Writes a shard's file; returns the number of examples, and why others were left out."""
    plan, source = shard.plan, cached_source(shard.plan.config, shard.split)
    if len(source) != shard.length:
        raise DataError(f"{source.name} has changed: {len(source)} examples, not {shard.length}: start again")
    prefix = "" if plan.config.dir is None else f"{printable(Path(plan.config.dir).expanduser())}/"
    skipped: list[str] = []
    with reported(shard.path):
        writer = ArrayRecordWriter(str(path), _WRITER)
        try:
            for index in map(int, shard.indices):
                name = f"{source.name} {SPLITS[shard.split]} example {index}"
                try:
                    example = source[index]
                    picture = example["image"]
                    if isinstance(picture, Encoded):
                        name = picture.name
                    image = stored(picture, name, plan.size, plan.quality)
                except DataError as error:
                    if plan.config.on_bad == "error":
                        raise
                    skipped.append(str(error))
                    continue
                # Without the directory: the same data give the same bytes wherever they lie.
                writer.write(serialized(image, example["label"], name.removeprefix(prefix)))
        finally:
            writer.close()
    return len(shard.indices) - len(skipped), skipped
