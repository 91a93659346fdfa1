"""The presets of `configs/parallel` go with any other; those of large networks divide them as they say."""

from pathlib import Path

import jax
import pytest

from jaxdl.commandline import parse
from jaxdl.config import BertConfig, ImageConfig
from jaxdl.parallel.mesh import make_mesh
from tests.conftest import ROOT

PRESETS = sorted((ROOT / "configs" / "parallel").glob("*.yaml"))
MODELS = {"resnet50": (ImageConfig, "digits"), "bert": (BertConfig, "english")}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_of_parallelism_takes_all_devices_after_one_of_a_model(path: Path, model: str):
    kind, data = MODELS[model]
    small = ROOT / "configs" / model / "test.yaml"
    config = parse("", ["--config", str(small), "--config", str(path), "--data.batch_size", "64"], kind)
    mesh = make_mesh(config.parallel, batch_size=64, accumulate=1)
    assert mesh.size == (1 if path.stem == "single" else jax.device_count())
    assert config.data.name == data


def test_the_hybrid_of_a_large_network_has_two_of_each_on_eight_devices():
    folder = ROOT / "configs" / "bert"
    files = [str(folder / name) for name in ("large_phase1.yaml", "large_8gpu_hybrid.yaml")]
    config = parse("", ["--config", *files], BertConfig)
    mesh = make_mesh(config.parallel, batch_size=config.data.batch_size, accumulate=config.memory.accumulate)
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == {
        "data": 2, "tensor": 2, "pipeline": 2
    }  # fmt: skip
    assert config.parallel.circular
