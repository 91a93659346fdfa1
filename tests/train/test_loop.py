"""The loop within one process, where one can count and interfere."""

import contextlib
import itertools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxdl.commandline import parse
from jaxdl.config import ImageConfig
from jaxdl.data.images.batches import ImageFeed, train_batches
from jaxdl.data.images.sources import open_source
from jaxdl.data.images.types import Pixels
from jaxdl.errors import ConfigError, DataError, DivergedError
from jaxdl.train.loop import train
from jaxdl.train.program import prepare
from jaxdl.train.task import Classification
from tests.conftest import ROOT
from tests.experiments.processes import lines, parameters, summary


def configure(workdir, *flags):
    """The test preset on 40 generated images: two and a half batches an epoch."""
    generated = ["--data.name=synthetic", "--data.synthetic_examples=40", "--data.synthetic_classes=4"]
    preset = str(ROOT / "configs" / "resnet50" / "test.yaml")
    return parse(
        "", ["--config", preset, *generated, "--workdir", str(workdir), *map(str, flags)], ImageConfig
    )


class Linear(nn.Module):
    """As small as a classifier can be."""

    @nn.compact
    def __call__(self, images, train):
        return nn.Dense(4)(images.reshape(images.shape[0], -1))


class Watched(Classification):
    """Counts how often jax traces it; its loss is not finite where an image is all white."""

    def __init__(self):
        super().__init__(model=Linear(), image_size=8, mean=(0.5,) * 3, std=(0.2,) * 3)
        object.__setattr__(self, "traced", Counter())

    def loss(self, params, model_state, batch, key):
        self.traced["loss"] += 1
        total, weight, model_state = super().loss(params, model_state, batch, key)
        white = jnp.any(jnp.all(batch["image"] == 255, axis=(1, 2, 3)))
        return jnp.where(white, jnp.nan, total), weight, model_state

    def evaluate(self, params, model_state, batch):
        self.traced["evaluate"] += 1
        return super().evaluate(params, model_state, batch)


def run(config, task, train_source=None, eval_source=None):
    train_source = train_source or open_source(config.data, "train")
    eval_source = eval_source or open_source(config.data, "eval")
    with jax.numpy_dtype_promotion("standard"):  # of integers and floats, by optax's schedules
        return train(config, task, ImageFeed(config.data, train_source, eval_source), experiment="test")


def evaluated(workdir):
    return [line["step"] for line in lines(workdir) if line["split"] == "eval"]


def test_each_step_is_traced_once_a_process_whatever_is_left_over_at_the_ends(tmp_path):
    """Neither a batch across the end of an epoch nor the last one of an evaluation has another shape."""
    flags = ("--data.eval_batch_size", 8, "--train.eval_every", 2)
    first = Watched()
    assert run(configure(tmp_path / "run", "--train.epochs", 2, *flags), first) == 0
    assert evaluated(tmp_path / "run") == [2, 4, 5]
    assert first.traced == {"loss": 1, "evaluate": 1}

    resumed = Watched()
    longer = configure(tmp_path / "run", "--train.epochs", 4, "--resume", "true", *flags)
    assert run(longer, resumed) == 0
    assert evaluated(tmp_path / "run") == [2, 4, 5, 6, 8, 10]
    assert resumed.traced == {"loss": 1, "evaluate": 1}

    over = Watched()
    assert run(longer, over) == 0
    assert over.traced == {"evaluate": 1}


def tampered(source, *, white=(), unreadable=()):
    """The source with an all white image at some indices, and none at others."""

    def read(index):
        if index in unreadable:
            raise DataError(f"example {index} cannot be read")
        example = source.read(index)
        return example | {"image": Pixels(np.full((8, 8, 3), 255, np.uint8))} if index in white else example

    return replace(source, read=read)


def order(config, source, batches):
    """The indices of the examples in the order in which a run takes them."""
    told = replace(source, num_classes=len(source), read=lambda index: source.read(index) | {"label": index})
    with contextlib.closing(train_batches(told, config.data, seed=config.seed)) as taken:
        return np.concatenate([batch["label"] for batch in itertools.islice(taken, batches)]).tolist()


def test_an_update_that_is_not_finite_is_found_also_when_the_data_fails_right_after_it(tmp_path):
    """Its metrics are still in flight then; what is saved and told must not take it for sound."""
    config = configure(tmp_path / "run", "--train.log_every", 100, "--train.checkpoint_every", 100)
    source = open_source(config.data, "train")
    indices = order(config, source, 2)
    broken = tampered(source, white=[indices[0]], unreadable=[indices[config.data.batch_size]])
    with pytest.raises(DivergedError, match="update 1 is not finite"):
        run(config, Watched(), broken)
    assert (summary(tmp_path / "run")["status"], summary(tmp_path / "run")["step"]) == ("diverged", 1)
    assert not list((tmp_path / "run").glob("checkpoints/[0-9]*"))


def test_a_network_that_the_last_update_has_ruined_is_not_done(tmp_path):
    """The update is finite, as its parameters are; what they make of an image is not."""
    flags = ("--train.steps", 1, "--optimizer.learning_rate", 1e38, "--optimizer.scale_with_batch", "false")
    with pytest.raises(DivergedError, match="the last update was finite") as caught:
        run(configure(tmp_path / "run", *flags), Watched())
    assert caught.value.exit_code == 3
    assert summary(tmp_path / "run")["status"] == "diverged"


def test_300_updates_that_are_not_finite_end_the_run_and_leave_no_trace(tmp_path):
    """On eight devices, by micro-batches, after a sound beginning."""
    flags = ("--parallel.data", 8, "--memory.accumulate", 2, "--data.batch_size", 16)
    flags += ("--train.checkpoint_every", 50, "--precision.loss_scale", "dynamic")
    flags += ("--precision.max_skipped_updates", 300)
    workdir = tmp_path / "run"
    assert run(configure(workdir, "--train.steps", 5, *flags), Watched()) == 0
    step, sound = parameters(workdir)
    assert step == 5

    longer = configure(workdir, "--train.steps", 1000, "--resume", "true", *flags)
    white = tampered(open_source(longer.data, "train"), white=range(39))
    with pytest.raises(
        DivergedError, match=r"update 305 .* number 300 in a row .* scale is down to 1,"
    ) as caught:
        run(longer, Watched(), white)
    assert caught.value.exit_code == 3
    step, left = parameters(workdir)
    assert step == 300
    assert sound.keys() == left.keys()
    assert all(left[name] == sound[name] for name in sound if not name.startswith("loss_scale/"))
    last = lines(workdir)[-1]
    assert (last["step"], last["skipped_updates"], last["loss_scale"]) == (305, 300, 1.0)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_run_that_cannot_read_its_first_batch_says_so_and_goes_on_once_it_is_mended(tmp_path, split):
    workdir = tmp_path / "run"
    config = configure(workdir, "--resume", "true")
    source = open_source(config.data, split)
    first = order(config, source, 1)[0] if split == "train" else 0
    with pytest.raises(DataError, match=f"example {first} cannot be read"):
        run(config, Watched(), **{f"{split}_source": tampered(source, unreadable=[first])})
    assert (summary(workdir)["status"], summary(workdir)["step"]) == ("stopped by unreadable data", 0)
    assert run(config, Watched()) == 0
    assert (summary(workdir)["status"], summary(workdir)["step"]) == ("done", 6)
    assert run(configure(tmp_path / "reference"), Watched()) == 0
    assert lines(workdir) == lines(tmp_path / "reference")


@pytest.mark.parametrize("epochs", ["1e300", "1.7e308"])
def test_more_epochs_than_can_be_counted_are_refused(epochs):
    config = parse(
        "", ["--config", str(ROOT / "configs/resnet50/test.yaml"), "--train.epochs", epochs], ImageConfig
    )
    with pytest.raises(ConfigError, match=r"^train\.epochs: .*than the step counter holds"):
        prepare(config, Watched(), 1437)
