"""`prepared.json`: what a data set is made of and how, so that nothing else is mixed into it."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdl.data.files import printable, replace_file
from jaxdl.data.images.prepare.contents import SHARDS
from jaxdl.data.images.prepare.plan import SPLITS, Plan
from jaxdl.data.images.prepare.writing import reported
from jaxdl.data.images.sources.records import PREPARED
from jaxdl.data.images.types import Source
from jaxdl.data.types import Split
from jaxdl.errors import ConfigError, DataError

_FORMAT = 1  # of all that the package's docstring describes
_NAMED = 5  # differences in one message


def settings_of(plan: Plan, sources: Mapping[Split, Source]) -> dict[str, Any]:
    """Returns all that decides what is in the shards, as JSON values."""
    config, train = plan.config, sources["train"]
    return {
        "format": _FORMAT,
        "source": config.name,
        "dir": config.dir and os.path.realpath(Path(config.dir).expanduser()),
        "dataset": config.dataset,
        "train_split": config.train_split,
        "eval_split": config.eval_split,
        "image_size": config.image_size if config.name == "synthetic" else None,
        **{SPLITS[split]: len(source) for split, source in sources.items()},
        "num_classes": train.num_classes,
        "class_names": train.class_names and list(train.class_names),
        # What the data set's reader cannot tell from the images.
        "treatment": {
            "augment": train.augment,
            "photographs": train.photographs,
            "mean": list(train.mean),
            "std": list(train.std),
        },
        "size": plan.size,
        "quality": None if plan.size is None else plan.quality,
        "shard_size": plan.shard_size,
    }


def begin(directory: Path, settings: Mapping[str, Any]) -> None:
    """Refuses a directory with anything else in it, and removes what a process that was killed has left.

    Args:
        directory: of the data set.
        settings: those of `settings_of`.

    Raises:
        ConfigError: it holds something else, or shards with other settings.
        DataError: it cannot be read or written.
    """
    where, file = printable(directory), directory / PREPARED
    try:
        earlier = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        earlier = None
    except (OSError, ValueError) as error:
        raise DataError(f"{printable(file)} cannot be read ({error}): remove {where}") from error
    with reported(directory):
        # Hidden are the lock and what a process that was killed at once has left.
        found = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
        if earlier is None and found:
            raise ConfigError(
                f"{where} is not empty and was not prepared here (it has {printable(found[0])}): choose "
                "another --to or --as"
            )
        if earlier != settings:
            if any((directory / SHARDS).glob("*.json")):
                raise ConfigError(
                    f"{where} was begun with other settings or from another source "
                    f"({_differences(earlier, settings)}): go on with those, choose another --to or --as, "
                    "or remove it"
                )
            replace_file(file, json.dumps(settings, indent=1).encode())
        (directory / SHARDS).mkdir(exist_ok=True)
        for path in (*directory.glob(".*.tmp"), *(directory / SHARDS).glob(".*.tmp")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        text = json.dumps(value)
        return text if len(text) <= 60 else f"{text[:57]}..."

    keys = [key for key in {**now, **earlier} if earlier.get(key) != now.get(key)]
    return "; ".join(
        f"{key}: {shown(earlier.get(key))} there, {shown(now.get(key))} now" for key in keys[:_NAMED]
    )
