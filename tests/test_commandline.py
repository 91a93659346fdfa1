"""Files and flags become a ImageConfig, or one message that a person can act on."""

import dataclasses
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jaxdl.commandline import config_diff, main, parse, run_yaml
from jaxdl.commandline.programs import Parser
from jaxdl.config import ImageConfig, ImageDataConfig, ImageModelConfig, OptimizerConfig, TrainConfig
from jaxdl.errors import ConfigError, DataError

STEPS = ("--train.steps", "10")
ROOT = Path(__file__).resolve().parents[1]


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def from_flags(*argv: str) -> ImageConfig:
    return parse("prog", [*STEPS, *argv], ImageConfig)


def from_file(tmp_path: Path, key: str, text: str) -> ImageConfig:
    section, _, leaf = key.rpartition(".")
    body = f"{section}:\n  {leaf}: {text}\n" if section else f"{leaf}: {text}\n"
    return parse("prog", [*STEPS, "--config", str(write(tmp_path / "c.yaml", body))], ImageConfig)


def refuse(*argv: str, preset: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse("prog", argv, ImageConfig, preset)
    message = str(caught.value)
    assert not any(jargon in message for jargon in ("pydantic", "http", "type=", "Input should", "input_"))
    return message


# ---------------------------------------------------------------- values


VALUES: list[tuple[str, str, object]] = [
    *[("optimizer.learning_rate", text, value) for text, value in
      (("1e-4", 1e-4), ("1E5", 1e5), (".1", 0.1), ("0.1", 0.1), ("3", 3.0), ("1_000.5", 1000.5))],
    *[("train.log_every", text, value) for text, value in
      (("1e3", 1000), ("1.5e1", 15), ("10e-1", 1), ("1_000", 1000), ("7", 7), ("+7", 7), ("010", 10))],
    *[("optimizer.nesterov", text, False) for text in ("False", "false", "no", "No", "off", "0")],
    *[("optimizer.nesterov", text, True) for text in ("True", "true", "yes", "on", "ON", "1")],
    *[("optimizer.clip_norm", text, None) for text in ("null", "None", "none", "~")],
    ("memory.remat", "none", "none"),
    ("precision.loss_scale", "none", "none"),
    *[("data.train_split", text, text) for text in ("no", "010", "12:30", "1e5", "true", "a=b,c[:5%]")],
    *[("optimizer.step_epochs", text, (2.0, 4.0)) for text in
      ("[2,4]", "2,4", "(2,4)", "[2, 4.0]", "( 2 , 4 , )", "2, 4")],
    *[("optimizer.step_epochs", text, (8.0,)) for text in ("(8,)", "[8]", "8", "8,", "8e0")],
    *[("optimizer.step_epochs", text, ()) for text in ("[]", "()", "( )")],
    ("data.augment", "none", "none"),
    ("data.dir", "/data/a b=c, d", "/data/a b=c, d"),
    ("data.workers", "0", 0),
    ("parallel.data", "-1", -1),
    ("seed", "5", 5),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_text_means_the_same_in_flags_and_files(tmp_path: Path, key: str, text: str, value: object) -> None:
    configs = [from_flags(f"--{key}", text), from_flags(f"--{key}={text}"), from_file(tmp_path, key, text)]
    for config in configs:
        found = attrgetter(key)(config)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.learning_rate", '"0.1"', 0.1),
        ("optimizer.step_epochs", "\n    - 2\n    - 4", (2.0, 4.0)),
        ("optimizer.clip_norm", "", None),
        ("model.weights", '"null"', "null"),
        ("model.weights", "'none'", "none"),
        ("model.weights", '""', ""),
        ("data.train_split", "~x", "~x"),
    ],
)
def test_yaml_notation(tmp_path: Path, key: str, text: str, value: object) -> None:
    assert attrgetter(key)(from_file(tmp_path, key, text)) == value


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.log_every", "1.5", "'1.5' is not a whole number of at least 1"),
        ("train.log_every", "15e-1", "'15e-1' is not a whole number"),
        ("train.log_every", "1e999999999", "is not a whole number"),
        ("train.log_every", "''", "'' is not a whole number"),
        ("train.log_every", "null", "null is not a whole number"),
        ("train.log_every", "0", "'0' is not a whole number of at least 1"),
        ("train.log_every", "[1]", " a whole number"),
        ("optimizer.nesterov", "''", "'' is not true or false"),
        ("optimizer.nesterov", "maybe", "'maybe' is not true or false"),
        ("optimizer.learning_rate", "''", "'' is not a number above 0"),
        ("optimizer.learning_rate", "~", "null is not a number above 0"),
        ("optimizer.learning_rate", "nan", "'nan' is not a finite number above 0"),
        ("optimizer.clip_norm", ".inf", "is not a number above 0, or null"),
        ("optimizer.clip_norm", "1e999", "is not a finite number above 0, or null"),
        ("optimizer.clip_norm", "''", "'' is not a number above 0, or null"),
        ("optimizer.step_epochs", "2,x", "'x' is not a number above 0"),
        ("optimizer.step_epochs", "null", "null is not a list as 2,4"),
        ("optimizer.momentum", "1", "'1' is not a number of at least 0 and below 1"),
        ("data.train_split", "none", "null is not text"),
        ("model.name", "resnet5O", "one of resnet18, resnet34, resnet50, resnet101, resnet152; did"),
        ("model.name", "resnet5O", "; did you mean resnet50?"),
        ("model.name", "ResNet50", "did you mean resnet50?"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_alike(tmp_path: Path, key: str, text: str, message: str) -> None:
    flag = refuse(*STEPS, f"--{key}", text.strip("'"))
    assert flag.startswith(f"--{key}: ")
    assert message in flag
    section, _, leaf = key.partition(".")
    path = write(tmp_path / "c.yaml", f"# a preset\n{section}:\n  {leaf}: {text}\n")
    file = refuse(*STEPS, "--config", str(path))
    assert file.startswith(f"{path}, line 3: {key}: ")
    assert message in file


STRINGS = ["", " x ",
           "no", "null", "None", "~", "1e5", "010", "12:30", "é", "a: b", "#x", "-", "- a", "[2]", "{a}",
           "'", '"', "x\ny", "\ttab", "end\n",
           "\u2028", "\ufeff", "\x85", "\x00", "\U0001f600", "\udcff", "!!str",
           "&a", "*a", "%", "@", "=", "<<", "a # b",
           "true", "2020-01-01", "a\\b", "x" * 300, "word " * 60]  # fmt: skip


@pytest.mark.parametrize("text", STRINGS)
def test_dump_and_load_is_the_identity_for_text(tmp_path: Path, text: str) -> None:
    config = ImageConfig(
        data=ImageDataConfig(train_split=text, dir=text),
        model=ImageModelConfig(weights=text),
        train=TrainConfig(steps=1),
    )
    path = write(tmp_path / "c.yaml", run_yaml(config))
    assert parse("prog", ["--config", str(path)], ImageConfig) == config


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(clip_norm=None, ema_decay=0.9999, epsilon=1e-12, learning_rate=1e300),
        OptimizerConfig(clip_norm=0.1 + 0.2, step_epochs=(), nesterov=True),
        OptimizerConfig(step_epochs=(1e-7, 1 / 3, 80.0), weight_decay=0.0, name="adamw"),
    ],
)
def test_dump_and_load_is_the_identity_for_values(tmp_path: Path, optimizer: OptimizerConfig) -> None:
    config = ImageConfig(optimizer=optimizer, train=TrainConfig(epochs=1.5), seed=2**31 - 1)
    path = write(tmp_path / "c.yaml", run_yaml(config))
    assert parse("prog", ["--config", str(path)], ImageConfig) == config


def test_dump_says_what_a_run_is_and_not_where() -> None:
    config = from_flags("--workdir", "/runs/a", "--resume", "true")
    assert "workdir" not in run_yaml(config)
    assert "resume" not in run_yaml(config)
    assert "step_epochs: [30.0, 60.0, 80.0]\n" in run_yaml(config)


# ---------------------------------------------------------------- layers


def test_layers_merge_left_to_right_and_flags_win(tmp_path: Path) -> None:
    preset = write(tmp_path / "p.yaml", "seed: 1\ntrain: {steps: 5, keep: 9}\n")
    one = write(
        tmp_path / "1.yaml", "seed: 2\ndata: {workers: 3, batch_size: 32}\noptimizer:\ntrain: {epochs: 1}"
    )
    two = write(tmp_path / "2.yaml", "seed: 3\ndata: {workers: 4}\n")
    empty = write(tmp_path / "e.yaml", "# nothing\n")
    assert parse("prog", [], ImageConfig, preset) == ImageConfig(seed=1, train=TrainConfig(steps=5, keep=9))
    for files in (["--config", str(one), str(two), str(empty)], [f"--config={one}", "--config", str(two)]):
        config = parse("prog", [*files, "--seed=4", "--seed", "5"], ImageConfig, preset)
        assert (config.seed, config.data.workers, config.data.batch_size, config.train.keep) == (5, 4, 32, 2)


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        (["--train.steps", "10"], (10, None)),
        (["--train.epochs", "3"], (None, 3.0)),
        (["--train.epochs", "null", "--train.steps", "10"], (10, None)),
        (["--train.steps", "null"], (None, 20.0)),
        ([], (None, 20.0)),
    ],
)
def test_steps_and_epochs_replace_each_other(tmp_path: Path, flags: list[str], length: Any) -> None:
    preset = write(tmp_path / "p.yaml", "train: {epochs: 20}\n")
    config = parse("prog", flags, ImageConfig, preset)
    assert (config.train.steps, config.train.epochs) == length
    dumped = write(tmp_path / "d.yaml", run_yaml(ImageConfig(train=TrainConfig(epochs=20))))
    config = parse("prog", ["--config", str(dumped), *flags], ImageConfig)
    assert (config.train.steps, config.train.epochs) == length


def test_resume_starts_from_the_stored_configuration(tmp_path: Path) -> None:
    run = tmp_path / "run"
    preset = write(tmp_path / "p.yaml", f"seed: 1\nworkdir: {run}\ntrain: {{steps: 5}}\n")
    resume = ["--resume", "yes"]
    assert parse("prog", resume, ImageConfig, preset).seed == 1  # nothing stored yet
    run.mkdir()
    first = parse("prog", ["--train.epochs", "7", "--data.workers", "5", "--seed", "3"], ImageConfig, preset)
    write(run / "config.yaml", run_yaml(first))
    again = parse("prog", resume, ImageConfig, preset)
    assert again == dataclasses.replace(first, resume=True)
    extra = write(tmp_path / "x.yaml", f"seed: 8\nworkdir: {run}\n")
    again = parse("prog", [*resume, "--config", str(extra), "--train.steps", "9"], ImageConfig, preset)
    assert (again.seed, again.data.workers, again.train.steps, again.train.epochs) == (8, 5, 9, None)
    assert parse("prog", [], ImageConfig, preset).seed == 1  # not resumed: the preset counts
    write(run / "config.yaml", "optimizer: {lr: 1}")
    assert f"{run}/config.yaml, line 1: optimizer.lr is unknown" in refuse(*resume, preset=preset)


def test_config_diff() -> None:
    assert config_diff(from_flags(), from_flags("--seed", "0")) == []
    new = from_flags("--optimizer.learning_rate", "1", "--train.keep", "3", "--workdir", "x")
    assert config_diff(from_flags(), new) == [
        ("optimizer.learning_rate", 0.1, 1.0),
        ("train.keep", 2, 3),
        ("workdir", None, "x"),
    ]


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--learning_rate 1", "--learning_rate is unknown; did you mean --optimizer.learning_rate?"),
        ("--optimizer.learning-rate=1", "did you mean --optimizer.learning_rate?"),
        ("--optimzer.lr 1", "--optimzer.lr is unknown; did you mean --optimizer.learning_rate?"),
        ("--optimizer.learning 1", "did you mean --optimizer.learning_rate?"),
        ("--data.batch 1", "did you mean --data.batch_size?"),
        ("--steps 3", "did you mean --train.steps or --profile.steps?"),
        ("--train.step 3", "did you mean --train.steps?"),
        ("--wokrdir x", "did you mean --workdir?"),
        ("-seed 3", "-seed is unknown; did you mean --seed?"),
        ("--print-config", "did you mean --print_config?"),
        ("--optimizer.foo 1", "optimizer has name, learning_rate, "),
        ("--optimizer 1", "optimizer has name, learning_rate, "),
        ("--zzz", "the sections are model, data, "),
        ("--", "-- is unknown"),
        ("--seed", "--seed: the value is missing; it takes a whole number of at least 0"),
        ("--data.dir --seed 3", "--data.dir: the value is missing; it takes text, or null"),
        ("--seed -3", "--seed: '-3' is not a whole number of at least 0 and below 2147483648"),
        ("--seed 3 4", "4: options are written --section.key VALUE"),
        ("train.steps=10", "options are written --section.key VALUE; did you mean --train.steps=10?"),
        ("a.yaml", "did you mean --config a.yaml?"),
        ("--config", "--config: name one or more YAML files"),
        ("--print_config=yes", "--print_config takes no value"),
        ("--optimizer.step_epochs [2,,4]", "--optimizer.step_epochs: '' is not a number above 0"),
        ("--train.epochs 3", "exclude each other: give only one (set by --train.steps and --train.epochs)"),
        ("--train.steps null", "set train.steps or train.epochs"),
        ("--memory.accumulate 3", "take 255 or 258 (set by --memory.accumulate)"),
        ("--precision.loss_scale 1e39", "precision.loss_scale '1e39' is not auto, none, dynamic or a number"),
        ("--precision.policy params=float32,params=float16", "precision.policy 'params=float32,p"),
        ("--train.steps 1000000000000", "'1000000000000' is not a whole number of at least 1 and below"),
        ("--train.steps 1e12", "1000000000000 is not a whole number of at least 1 and below 2147483648"),
    ],
)  # fmt: skip
def test_bad_flags(argv: str, message: str) -> None:
    found = refuse(*STEPS, *argv.split())
    assert message in found
    assert "\n" not in found


def test_a_value_may_look_like_a_flag() -> None:
    assert from_flags("--data.dir=--x").data.dir == "--x"
    assert from_flags("--data.dir", "-x").data.dir == "-x"
    assert from_flags("--data.dir=").data.dir == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", ", line 2: seed is given twice"),
        ("train: {steps: 1}\ntrain: {keep: 2}\n", ", line 2: train is given twice"),
        ("\nmodel: resnet50\n", ", line 2: model is a section: write its keys indented below it"),
        ("model: [resnet50]\n", ", line 1: model is a section"),
        (
            "seed: {a: 1}\n",
            ", line 1: seed takes a whole number of at least 0 and below 2147483648; it has no keys",
        ),
        ("optimizer: {step_epochs: [[1], 2]}\n", "optimizer.step_epochs takes a list"),
        ("optimzer: {lr: 1}\n", ", line 1: optimzer is unknown; did you mean optimizer?"),
        ("optimizer:\n  lr: 1\n", ", line 2: optimizer.lr is unknown; did you mean optimizer.learning_rate?"),
        ("learning_rate: 1\n", "learning_rate is unknown; did you mean optimizer.learning_rate?"),
        ("? [a]\n: 1\n", "is unknown"),
        ("a: b: c\n", ", line 1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb: [1\n", "not valid YAML"),
        ("a: \x01\n", "not valid YAML: unacceptable character"),
        ("- a\n", ": needs `section:`"),
        ("hello\n", ": needs `section:`"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("train: {epochs: 1, steps: 1}\n", "train.epochs)"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "c.yaml", text)
    found = refuse("--config", str(path))
    assert found.startswith((f"{path}", "train.steps and train.epochs"))
    assert message in found
    assert "\n" not in found


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "cnofig.yaml"
    write(tmp_path / "config.yaml", "")
    assert (
        refuse("--config", str(path))
        == f"{path}: there is no such file; did you mean {tmp_path}/config.yaml?"
    )
    assert refuse("--config", str(tmp_path)) == f"{tmp_path}: cannot be read (Is a directory)"
    assert "there is no such file" in refuse(preset=tmp_path / "none" / "x.yaml")
    path.write_bytes("seed: 1\n# é\n".encode("latin-1"))
    assert refuse("--config", str(path)) == f"{path}, line 2: the file is not UTF-8 text"
    path.write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert from_flags("--config", str(path)).seed == 1


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "seed: x\nmodle: {name: resnet18}\n")
    message = refuse("--config", str(path), "gone.yaml", "--optimizer.learning_rate", "0", "--lr", "1")
    title, *lines = message.splitlines()
    assert title == "5 problems:"
    assert len(lines) == 5
    assert all(
        any(word in line for line in lines) for word in ("seed", "modle", "gone", "--lr", "'0' is not")
    )


# ---------------------------------------------------------------- help and exit


def test_help_is_a_manual(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = write(
        tmp_path / "digits.yaml", "# Digits in a minute.\n# More.\noptimizer: {learning_rate: 0.05}\n"
    )
    write(tmp_path / "test.yaml", "# Ten steps.\n")
    with pytest.raises(SystemExit) as caught:
        parse("python -m experiments.x", ["--nonsense", "--help"], ImageConfig, preset, "Train things.")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "usage: python -m experiments.x [--config FILE.yaml ...]",
        "Train things.",
        "digits.yaml (used where no --config is given): Digits in a minute.",
        "test.yaml: Ten steps.",
        "--model.stem one of auto, imagenet, small (default auto) First layers: `imagenet` is 7x7",
        f"--optimizer.learning_rate a number above 0 (default 0.05 in {preset}, else 0.1) Peak learning rate",
        "--optimizer.clip_norm a number above 0, or null (default null) Clip the gradient",
        "optimizer: The update rule and its schedule.",
        "--resume true or false (default false)",
        "2 The configuration is unknown",
        "75 Stopped by SIGTERM",
    ):
        assert words in text
    sections = [each for each in dataclasses.fields(ImageConfig) if dataclasses.is_dataclass(each.type)]
    for key in [f"{s.name}.{f.name}" for s in sections for f in dataclasses.fields(s.type)]:
        assert f"--{key} " in text


def test_print_config_repeats_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--train.steps", "3", "--data.dir", "é"]
    with pytest.raises(SystemExit) as caught:
        parse("prog", [*argv, "--print_config"], ImageConfig)
    assert caught.value.code == 0
    path = write(tmp_path / "c.yaml", capsys.readouterr().out)
    assert parse("prog", ["--config", str(path)], ImageConfig) == parse("prog", argv, ImageConfig)


def run_main(monkeypatch: pytest.MonkeyPatch, run: Any, *argv: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["prog", *argv])
    with pytest.raises(SystemExit) as caught:
        main(run, program="prog", config=ImageConfig)
    return caught.value.code or 0


def test_main_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> Any:
        def run(config: ImageConfig) -> NoReturn:
            raise error

        return run

    assert run_main(monkeypatch, lambda config: None, *STEPS) == 0
    assert run_main(monkeypatch, lambda config: 3, *STEPS) == 3
    assert run_main(monkeypatch, fail(DataError("no train/ in /data")), *STEPS) == 4
    assert capsys.readouterr().err == "error: no train/ in /data\n"
    monkeypatch.setattr("os._exit", sys.exit)
    assert run_main(monkeypatch, fail(KeyboardInterrupt()), *STEPS) == 75
    assert run_main(monkeypatch, fail(AssertionError()), "--seed") == 2  # never runs
    monkeypatch.setattr(sys, "argv", ["prog", *STEPS])
    with pytest.raises(ZeroDivisionError):
        main(fail(ZeroDivisionError()), program="prog", config=ImageConfig)


SCRIPT = """
import atexit, sys
from jaxdl.commandline import main
HEAVY = {"jax", "flax", "numpy"}
from jaxdl.config import ImageConfig
atexit.register(lambda: sys.stderr.write("imported " * len(HEAVY & set(sys.modules))))
main(lambda config: print("dir", config.data.dir), program="prog", config=ImageConfig)
"""


def python(*argv: str, **env: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *argv],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_bad_key_exits_before_jax_is_imported() -> None:
    process = python("--optimizer.lr", "1")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert err == b"error: --optimizer.lr is unknown; did you mean --optimizer.learning_rate?\n"


def test_text_beyond_ascii_needs_no_locale() -> None:
    process = python(*STEPS, "--data.dir", "é\U0001f600", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"dir ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")  # noqa: PTH110
@pytest.mark.parametrize("flag", ["--help", "--print_config"])
def test_output_that_cannot_be_written_is_reported(flag: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, *STEPS, flag],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert ended.returncode == 5
    assert ended.stderr == b"error: standard output cannot be written (No space left on device).\n"


def test_help_into_a_closed_pipe_is_silent() -> None:
    process = python("--help")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()


INTERRUPTED_IN_A_CALLBACK = """
import gc, os, signal, time
from jaxdl.commandline.programs import leave_after

def run():
    gc.callbacks.append(lambda phase, info: os.kill(os.getpid(), signal.SIGTERM))
    gc.collect()
    time.sleep(60)

leave_after(run)
"""


def test_an_interruption_that_python_cannot_raise_ends_the_program_all_the_same():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN_A_CALLBACK],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 75
    assert done.stderr.strip() == "error: interrupted"


def test_a_program_for_one_process_refuses_to_be_one_of_several(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ConfigError, match="x works in one process"):
        Parser("python -m experiments.x", None).parse_args([])
