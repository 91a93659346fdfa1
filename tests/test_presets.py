"""Golden files: a preset's final configuration, written out, so that a changed default shows in a diff.

After an intended change, write them anew with `python -m tests.test_presets`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxdl.commandline import parse, run_yaml
from jaxdl.config import BertConfig, Config, FinetuneConfig, ImageConfig

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden"
KINDS: Mapping[str, type[Config]] = {"resnet50": ImageConfig, "bert": BertConfig, "finetune": FinetuneConfig}
PRESETS = sorted(path for kind in KINDS for path in (ROOT / "configs" / kind).glob("*.yaml"))


def header(preset: Path) -> str:
    return preset.read_text().split("\n\n")[0]


def command(preset: Path) -> str:
    """What the header says to run: from `python` to the next entry, on one line."""
    lines = [line.removeprefix("#").strip() for line in header(preset).splitlines()]
    told = re.search(r"Command: .*?(python .*?)(?= (?:Source|Hardware): | where | after |$)", " ".join(lines))
    assert told, preset
    return told[1]


def files(preset: Path) -> list[str]:
    """The files that the header gives `--config`, of which the preset may be one; none: the default."""
    given = re.search(r"--config ((?:\S+\.yaml ?)+)", command(preset))
    return given[1].split() if given else []


def flags(preset: Path) -> list[str]:
    """What the header says to give, with stand-ins for what only the user knows."""
    text, kind = preset.read_text(), preset.parent.name
    layers = files(preset) or [str(preset.relative_to(ROOT))]
    found = ["--config", *(str(ROOT / file) for file in layers)]
    if any(f"name: {source}" in text for source in ("fashion_mnist", "image_folder", "tfds")):
        found += ["--data.dir", "DIRECTORY"]
    if kind == "finetune":
        found += ["--data.train_file", "TRAIN_FILE"]
        found += ["--data.eval_file", "EVAL_FILE"] if "name: squad" in text else []
        found += ["--model.weights", "DIRECTORY"] if "name: pretrained" in text else []
    return found


def final(preset: Path) -> str:
    return run_yaml(parse("test", flags(preset), KINDS[preset.parent.name]))


def golden(preset: Path) -> Path:
    return GOLDEN / f"{preset.parent.name}_{preset.name}"


@pytest.mark.parametrize("preset", PRESETS, ids=golden)
def test_preset_is_what_it_was(preset):
    assert final(preset) == golden(preset).read_text()


def test_every_golden_file_is_of_a_preset():
    assert set(GOLDEN.iterdir()) == set(map(golden, PRESETS))


@pytest.mark.parametrize("preset", PRESETS, ids=golden)
def test_header_tells_command_and_hardware(preset):
    assert "# Command:" in header(preset)
    assert "# Hardware:" in header(preset)


@pytest.mark.parametrize("preset", PRESETS, ids=golden)
def test_the_command_names_the_preset_or_takes_it_by_default(preset):
    own = str(preset.relative_to(ROOT))
    told = files(preset)
    assert all((ROOT / file).is_file() for file in told)
    source = (ROOT / "experiments" / f"{preset.parent.name}.py").read_text()
    assert (told and told[-1] == own) or f'PRESETS / "{preset.name}"' in source or own in source


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for preset in PRESETS:
        golden(preset).write_text(final(preset))
