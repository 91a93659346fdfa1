"""Golden files: a preset's final configuration, written out, so that a changed default shows in a diff.

After an intended change, write them anew with `python -m tests.test_presets`.
"""

from pathlib import Path

import pytest

from jaxdl.commandline import parse, run_yaml
from jaxdl.config import ImageConfig

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden"
PRESETS = sorted((ROOT / "configs").glob("resnet50/*.yaml"))


def final(preset: Path) -> str:
    flags = ["--config", str(preset)]
    if any(f"name: {source}" in preset.read_text() for source in ("fashion_mnist", "image_folder", "tfds")):
        flags += ["--data.dir", "DIRECTORY"]
    return run_yaml(parse("test", flags, ImageConfig))


def golden(preset: Path) -> Path:
    return GOLDEN / f"{preset.parent.name}_{preset.name}"


@pytest.mark.parametrize("preset", PRESETS, ids=golden)
def test_preset_is_what_it_was(preset):
    assert final(preset) == golden(preset).read_text()


@pytest.mark.parametrize("preset", PRESETS, ids=golden)
def test_header_tells_command_and_hardware(preset):
    header = preset.read_text().split("\n\n")[0]
    assert "# Command:" in header
    assert "# Hardware:" in header


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for preset in PRESETS:
        golden(preset).write_text(final(preset))
