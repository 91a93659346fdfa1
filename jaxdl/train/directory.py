"""The directory of a run that starts or goes on."""

from pathlib import Path

from jaxdl.commandline import STORED, config_diff, parse, run_yaml
from jaxdl.config import Config
from jaxdl.errors import ConfigError
from jaxdl.train import rundir

FIXED = (
    "model.",
    "seed",
    "data.name",
    "data.dataset",
    "data.train_split",
    "data.batch_size",
    "data.image_size",
    "data.augment",
    "data.policy",
    "data.randaugment",
    "data.color_jitter",
    "data.erasing",
    "data.mixup",
    "data.cutmix",
    "data.remainder",
    "data.synthetic_",
    "data.documents",
    "data.feature",
    "data.split",
    "data.vocabulary",
    "data.lowercase",
    "data.sequences",
    "data.length",
    "data.held_out",
    "data.mask",
    "data.max_predictions",
    "data.whole_words",
    "data.train_file",
    "data.text_",
    "data.label_column",
    "data.stride",
    "data.question_length",
    "optimizer.name",
    "optimizer.momentum",
    "optimizer.ema_decay",
    "parallel.batch_norm",
    "precision.",
)
"""Beginnings of the keys that a resumed run must keep.

Another value would not fit the saved state, or would make the rest of the run
something that no uninterrupted run could have been. All other keys may change,
and the new value wins.
"""


def open_directory(config: Config, experiment: str) -> tuple[str, list[str]]:
    """Makes the directory of a new run, or takes up that of an earlier one.

    Args:
        config: the whole run; `resume` decides. Where there is nothing to
            resume, a run starts afresh, so one command serves first and later attempts.
        experiment: name of the program.

    Returns:
        The directory, locked for this process, and a line for each key that
        differs from the earlier attempt. The stored configuration is still that
        one's: the caller replaces it once nothing stands against the new one.

    Raises:
        ConfigError: the directory is taken, or a key was changed that must not be.
        CheckpointError: the directory cannot be read or written.
    """
    workdir = None if config.workdir is None else Path(config.workdir)
    text = run_yaml(config)
    if workdir is None or not config.resume or not rundir.is_run(workdir):
        return str(rundir.create(workdir, experiment, text)), []
    rundir.reopen(workdir)
    stored = parse("", ["--config", str(workdir / STORED)], type(config))
    changes = [
        (key, old, new) for key, old, new in config_diff(stored, config) if key not in ("workdir", "resume")
    ]
    refused = [change for change in changes if change[0].startswith(FIXED)]
    if refused:
        listed = "; ".join(f"{key} was {old}, now {new}" for key, old, new in refused)
        raise ConfigError(
            f"{workdir} cannot be resumed with other values of what defines it: {listed}. "
            "Leave them as they were, or start a new run in another --workdir."
        )
    return str(workdir), [f"{key}: {old} -> {new}" for key, old, new in changes]
