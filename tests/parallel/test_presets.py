"""The presets of `configs/parallel` go with any other."""

from pathlib import Path

import jax
import pytest

from jaxdl.commandline import parse
from jaxdl.config import ImageConfig
from jaxdl.parallel.mesh import make_mesh
from tests.conftest import ROOT

PRESETS = sorted((ROOT / "configs" / "parallel").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_of_parallelism_takes_all_devices_after_one_of_a_model(path: Path):
    resnet = ROOT / "configs" / "resnet50" / "test.yaml"
    config = parse(
        "", ["--config", str(resnet), "--config", str(path), "--data.batch_size", "64"], ImageConfig
    )
    mesh = make_mesh(config.parallel, batch_size=64, accumulate=1)
    assert mesh.size == (1 if path.stem == "single" else jax.device_count())
    assert config.data.name == "digits"
