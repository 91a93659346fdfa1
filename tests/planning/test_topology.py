"""Chips that are not there."""

import importlib.util
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """
from jaxdl.errors import ConfigError
from jaxdl.planning.topology import described_devices
try:
    devices = described_devices({name!r})
    print(len(devices), "in", len({{device.process_index for device in devices}}))
except ConfigError as error:
    print(error)
"""


def described(name: str) -> str:
    """In a process of its own: the platform of this one is settled."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_an_unknown_chip_is_refused_with_those_that_are_known():
    assert "h99 is no chip that is described here: take one of h100" in described("h99")


def test_gpus_that_fill_no_whole_nodes_are_refused():
    assert "h100x12 are no whole nodes of 8" in described("h100x12")


@pytest.mark.parametrize(
    ("name", "plugin", "expected"),
    [
        ("h100x8", "jax_plugins.xla_cuda12", "8 in 1"),
        ("h100x16", "jax_plugins.xla_cuda12", "16 in 2"),
        ("h100:4x2", "jax_plugins.xla_cuda12", "8 in 4"),
        ("v5e:2x4", "libtpu", "8 in 2"),
    ],
)
def test_described_chips_give_as_many_devices_and_processes_or_say_what_to_install(name, plugin, expected):
    try:
        installed = importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:
        installed = False
    found = described(name)
    assert found == expected if installed else "pip install -e '.[plan]'" in found
