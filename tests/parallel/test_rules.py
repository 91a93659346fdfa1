"""Which mesh axis divides which dimension, and what is refused rather than left whole."""

import shlex

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxdl.commandline import parse
from jaxdl.config import ImageConfig, ParallelConfig
from jaxdl.errors import ConfigError
from jaxdl.parallel.layout import rows
from jaxdl.parallel.mesh import make_mesh
from jaxdl.parallel.plan import abstract
from jaxdl.parallel.rules import Rules
from tests.parallel.plans import Run, configuration


def rules(**settings):
    config = ParallelConfig(**settings)
    return Rules.of(config, make_mesh(config, batch_size=16, accumulate=1))


@pytest.mark.parametrize(
    ("settings", "shape", "names", "spec"),
    [
        ({}, (64, 256), ("embed", "mlp"), P(None, None)),
        ({"tensor": 4}, (64, 256), ("embed", "mlp"), P(None, "tensor")),
        ({"tensor": 4}, (256, 64), ("mlp", "embed"), P("tensor", None)),
        ({"tensor": 4}, (8, 4, 16, 64), ("layers", "heads", None, "embed"), P(None, "tensor", None, None)),
        ({"tensor": 4}, (10,), ("classes",), P(None)),
        ({"fsdp": 8}, (64, 256), ("embed", "mlp"), P(None, "fsdp")),
        ({"fsdp": 8}, (256,), ("mlp",), P(None)),
        ({"fsdp": 8}, (7, 7, 3, 64), (None, None, "channel_in", "channel"), P(None, None, None, "fsdp")),
        ({"fsdp": 8}, (512, 128, 8), ("layers", "embed", "heads"), P(None, "fsdp", None)),
        ({"fsdp": 2, "tensor": 2}, (64, 256), ("embed", "mlp"), P("fsdp", "tensor")),
        ({"pipeline": 2}, (4, 64, 256), ("layers", "embed", "mlp"), P("pipeline", None, None)),
    ],
)  # fmt: skip
def test_the_table(settings, shape, names, spec):
    assert rules(**settings).spec("some/kernel", shape, names) == spec


def test_what_cannot_be_divided_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="does not divide the 6 heads of some/kernel") as refused:
        rules(tensor=4).spec("some/kernel", (64, 6), ("embed", "heads"))
    way_out = str(refused.value).split("--parallel.layout ")[1].strip("'")
    assert rules(tensor=4, layout=(way_out,)).spec("some/kernel", (64, 6), ("embed", "heads")) == P(
        None, None
    )
    with pytest.raises(ConfigError, match="none of the dimensions of some/kernel, "):
        rules(fsdp=8).spec("some/kernel", (99, 99), ("embed", "mlp"))


def test_the_first_exception_that_fits_wins():
    found = rules(fsdp=8, layout=("head/*=fsdp -", "*=- -"))
    assert found.spec("head/kernel", (64, 100), (None, None)) == P("fsdp", None)
    assert found.spec("other/kernel", (64, 4096), (None, None)) == P(None, None)


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("head/kernel", "is not a pattern, ="),
        ("head/kernel=- modle", "one of node, pipeline, data, fsdp, tensor"),
        ("head/kernel=fsdp fsdp", "each at most once"),
        ("head/kernel=fsdp", "has 2 dimensions, .* but 1 are laid out"),
        ("head/kernel=fsdp -", "63 of head/kernel does not divide evenly among parallel.fsdp 8"),
    ],
)
def test_an_exception_that_does_not_fit_is_refused(exception, message):
    with pytest.raises(ConfigError, match=message):
        rules(fsdp=8, layout=(exception,)).spec("head/kernel", (63, 64), (None, None))


def test_the_command_line_takes_what_a_message_advises():
    with pytest.raises(ConfigError) as refused:
        rules(fsdp=8).spec("some/kernel", (99, 99), ("embed", "mlp"))
    flags = shlex.split("--parallel.layout " + str(refused.value).split("--parallel.layout ")[1])
    config = parse("", ["--train.steps", "1", *flags, "--parallel.fsdp", "8"], ImageConfig)
    assert config.parallel.layout == ("some/kernel=- -",)
    two = parse(
        "", ["--train.steps", "1", "--parallel.layout", "a/kernel=fsdp -, */b=- tensor -"], ImageConfig
    )
    assert two.parallel.layout == ("a/kernel=fsdp -", "*/b=- tensor -")


def test_an_exception_that_fits_no_parameter_is_refused():
    run = Run.of("resnet", configuration(fsdp=8, layout=("hed/kernel=- -",)))
    with pytest.raises(ConfigError, match="layout hed/kernel fits no parameter; did you mean head/kernel"):
        run.plan.state_layout(run.abstract)


WIDE = {"encoder": {"width": 256}, "resnet": {"width": 128}}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["encoder", "resnet"])
@pytest.mark.parametrize(
    ("settings", "parameters", "optimizer"),
    [
        ({}, 1, 1),
        ({"fsdp": 8}, 8, 8),
        ({"zero1": True}, 1, 8),
        ({"tensor": 4}, 4, 4),
        ({"fsdp": 2, "tensor": 2}, 4, 4),
        ({"fsdp": 4, "tensor": 2}, 8, 8),
        ({"tensor": 2, "zero1": True}, 2, 8),
    ],
)
def test_bytes_on_each_device_are_the_total_by_the_shards(task, settings, parameters, optimizer):
    run = Run.of(task, configuration(**settings), optax.adam(1e-3), **WIDE[task])
    state = run.start()

    def share(tree):
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for device in jax.devices():
            yield total / sum(
                shard.data.nbytes
                for leaf in jax.tree.leaves(tree)
                for shard in leaf.addressable_shards
                if shard.device == device
            )

    np.testing.assert_allclose([*share(state.params)], parameters, rtol=0.05)
    np.testing.assert_allclose([*share(state.opt_state)], optimizer, rtol=0.05)
    # What is printed on request says the same.
    layout = abstract(run.abstract, run.plan.state_layout(run.abstract))
    table = rows(layout.params, layout.opt_state)
    for line, tree in zip(table[-2:], (state.params, state.opt_state), strict=True):
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        assert line[-1] == f"{held:,}"
    assert len(table) == len(jax.tree.leaves(state.params)) + 2
