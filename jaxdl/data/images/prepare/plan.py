"""What is to be prepared, and where."""

from dataclasses import dataclass
from pathlib import Path

from jaxdl.config import ImageDataConfig
from jaxdl.data.types import Split

VERSION = "1.0.0"
SPLITS: dict[Split, str] = {"train": "train", "eval": "validation"}


@dataclass(frozen=True)
class Plan:
    """What is to be prepared.

    Attributes:
        config: the source.
        root: the data directory; the data set lies in `root`/`name`/1.0.0.
        name: of the data set: lower-case letters, digits and underscores.
        size: shorter side of the stored images in pixels, smaller ones are left as they are; None: the
            files are stored as they are.
        quality: of the JPEG files that are made where `size` is given, 1 to 100.
        shard_size: examples in a shard.
    """

    config: ImageDataConfig
    root: Path
    name: str
    size: int | None = None
    quality: int = 95
    shard_size: int = 1280

    @property
    def directory(self) -> Path:
        """Where the data set lies."""
        return self.root / self.name / VERSION
