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
    print(len(described_devices({name!r})))
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


@pytest.mark.parametrize(("name", "plugin"), [("h100x8", "jax_plugins.xla_cuda12"), ("v5e:2x4", "libtpu")])
def test_eight_described_chips_give_as_many_devices_or_say_what_to_install(name, plugin):
    try:
        installed = importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:
        installed = False
    found = described(name)
    assert found == "8" if installed else "pip install -e '.[plan]'" in found
