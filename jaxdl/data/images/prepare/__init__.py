"""Any source of images, written as a TFDS data set in array_record files; TensorFlow is not needed.

The directory of the data set holds

- `NAME-train.array_record-00000-of-00012` ...: the shards, each written under another name and then renamed;
- `shards/`: for each a JSON file with its examples, bytes, SHA-256 and what was left out;
- `prepared.json`: what the data set is made of and how, so that nothing else is mixed into it;
- `dataset_info.json`, `features.json`, `label.labels.txt`: TFDS's description. They are written last, so an
  unfinished data set cannot be opened.

Which examples a shard has, and their order, depend on nothing but the source's length. So shards are made in
any order by any number of processes, and a second run makes those that are missing. It knows the source by
its directory, lengths and class names, not by what its files contain.
"""

from collections.abc import Callable
from fractions import Fraction

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.prepare.contents import Contents
from jaxdl.data.images.prepare.description import describe
from jaxdl.data.images.prepare.plan import SPLITS, Plan
from jaxdl.data.images.prepare.progress import Progress
from jaxdl.data.images.prepare.settings import begin, settings_of
from jaxdl.data.images.prepare.shards import cached_source, made_shard, shards_of
from jaxdl.data.images.prepare.verify import verify
from jaxdl.data.images.prepare.writing import locked, reported
from jaxdl.data.images.types import Source
from jaxdl.data.parallel import process_map
from jaxdl.data.types import Split
from jaxdl.errors import DataError

__all__ = ["Plan", "prepare", "verify"]


def prepare(plan: Plan, processes: int, say: Callable[[str], None]) -> dict[Split, list[Contents]]:
    """Makes the shards that are not there yet, and then TFDS's description.

    Args:
        plan: what to prepare.
        processes: how many read, resize and write; the result is the same for any number.
        say: takes lines about the progress.

    Returns:
        What is in the shards of each split.

    Raises:
        ConfigError: the directory holds something else, or another process prepares it.
        DataError: the source cannot be read, an image is damaged (unless `on_bad` says to skip it, and then
            if more than `max_bad` are), or the directory cannot be written.
    """
    cached_source.cache_clear()  # an earlier call may have been before the files changed
    sources: dict[Split, Source] = {split: cached_source(plan.config, split) for split in SPLITS}
    _check_class_names(sources["train"])
    directory = plan.directory
    with reported(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        begin(directory, settings_of(plan, sources))
        shards = [shard for split, source in sources.items() for shard in shards_of(plan, split, len(source))]
        made: dict[Split, list[Contents]] = {split: [] for split in SPLITS}
        progress = Progress(shards, say)
        with process_map(min(processes, len(shards))) as over:
            for shard, (contents, new) in zip(shards, over(made_shard, shards), strict=True):
                made[shard.split].append(contents)
                _check_bad(plan.config, sources[shard.split], made[shard.split])
                progress.shard(contents, new=new)
        for split, contents_of_split in made.items():
            if not sum(contents.examples for contents in contents_of_split):
                raise DataError(f"{SPLITS[split]}: none of the images can be decoded")
        describe(plan, sources["train"], made)
    return made


def _check_class_names(source: Source) -> None:
    """Refuses names that TFDS, which keeps them as stripped lines of a text file, cannot tell apart."""
    names = source.class_names or ()
    if len({name.strip() for name in names} - {""}) < len(names):
        raise DataError(f"{source.name}: class names are empty or the same but for spaces: rename them")


def _check_bad(config: ImageDataConfig, source: Source, made: list[Contents]) -> None:
    bad = [message for contents in made for message in contents.skipped]
    if len(bad) > Fraction(str(config.max_bad)) * len(source):
        raise DataError(
            f"{source.name} {source.split}: {len(bad):,} of {len(source):,} images cannot be decoded, more "
            f"than data.max_bad {config.max_bad:g} allows; the last: {bad[-1]}"
        )
