"""The finders as their users meet them."""

import json
import sys
from functools import partial

import pytest

from experiments import find
from jaxdl import commandline
from jaxdl.config import ImageConfig
from jaxdl.errors import ConfigError
from jaxdl.planning.batch_size import Need, Plan, Trial
from jaxdl.planning.isolated import Killed
from tests.experiments.processes import run as run_experiment

TEST = "configs/resnet50/test.yaml"


run = partial(run_experiment, experiment="find")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "learning_rate or batch_size"),
        (["lr"], "learning_rate or batch_size, not lr"),
        (["learning_rate", "--from", "abc"], "--from: 'abc' is not a number above 0"),
        (["learning_rate", "--from", "inf"], "--from: 'inf' is not a number above 0"),
        (["learning_rate", "--from", "1", "--to", "0.5"], "--from 1 must be less than --to 0.5"),
        (["learning_rate", "--updates", "9"], "whole number of at least 10"),
        (["learning_rate", "--limit", "9"], "--limit is unknown"),
        (["learning_rate", "--optimizer.learning_rat", "1"], "did you mean --optimizer.learning_rate"),
        (["learning_rate", "--workdir", "WORKDIR", "--resume", "true"], "resume"),
        (["learning_rate", "--workdir", "WORKDIR"], "learning_rate.json exists already"),
        (["batch_size", "--capacity", "16G"], "16GiB or 16GB"),
        (["batch_size", "--trial", "maybe"], "'maybe' is not true or false"),
        (["batch_size", "--limit", "0"], "whole number of at least 1"),
        (["batch_size", "--data.batch_size", "many"], "whole number"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, flags, words):
    (tmp_path / "find").mkdir()
    (tmp_path / "find" / "learning_rate.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["find", *(flag.replace("WORKDIR", str(tmp_path)) for flag in flags)])
    with pytest.raises(SystemExit) as left:
        find.main()
    told = capsys.readouterr()
    assert left.value.code == 2
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1
    assert words in told.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--help"], ["learning_rate", "batch_size"]),
        (["learning_rate", "--help"], ["--from", "1e-6", "--to", "--updates", "experiments.resnet50 --help"]),
        (["batch_size", "-h"], ["--limit", "4096", "--capacity", "16GiB", "--trial"]),
        (["batch_size", "--trial", "true", "--print_config", "--seed", "7"], ["seed: 7"]),
    ],
)
def test_help_and_print_config(monkeypatch, capsys, flags, words):
    monkeypatch.setattr(sys, "argv", ["find", *flags])
    with pytest.raises(SystemExit) as left:
        find.main()
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


def test_its_own_options_may_stand_between_those_of_the_run():
    own, rest = find.parse(
        ["learning_rate", "--config", "a.yaml", "b.yaml", "--from", "1e-3", "--parallel.data", "-1", "--to=2"]
    )
    assert (own.finder, own.first, own.last, own.updates) == ("learning_rate", 1e-3, 2.0, 100)
    assert rest == ["--config", "a.yaml", "b.yaml", "--parallel.data", "-1"]


def test_two_answers_of_the_same_second_get_directories_of_their_own(tmp_path):
    names = [find._new_directory(tmp_path / "runs" / "find-1").name for _ in range(3)]
    assert names == ["find-1", "find-1-2", "find-1-3"]


@pytest.mark.slow
def test_a_learning_rate_is_found_and_nothing_else_is_left(tmp_path):
    """Sixteen examples to know by heart: their loss falls fast."""
    workdir = tmp_path / "run"
    known = ["--data.name=synthetic", "--data.synthetic_examples=16", "--data.synthetic_classes=2"]
    range_of_rates = ["--from", "1e-2", "--to", "10", "--updates", "20"]
    done = run("learning_rate", "--config", TEST, *known, "--workdir", workdir, *range_of_rates)
    assert done.returncode == 0, done.stderr
    assert sorted(str(path.relative_to(workdir)) for path in workdir.rglob("*")) == [
        "find", "find/learning_rate.json", "find/learning_rate.png",
    ]  # fmt: skip
    assert (workdir / "find" / "learning_rate.png").read_bytes().startswith(b"\x89PNG")
    answer = json.loads((workdir / "find" / "learning_rate.json").read_text())
    # In units of the option: the step applied a sixteenth, for a batch of 16 in place of 256.
    assert answer["applied_per_unit"] == 16 / 256
    assert answer["learning_rates"][0] == pytest.approx(1e-2)
    assert answer["updates_made"] == len(answer["losses"]) == len(answer["smoothed_losses"]) <= 20
    assert 1e-2 < answer["suggestion"] < 10
    assert f"--optimizer.learning_rate {answer['suggestion']:.2g}" in done.stdout
    assert f"{answer['suggestion'] / 16:.2g}" in done.stdout
    assert answer["config"]["optimizer"]["schedule"] == "cosine"


@pytest.mark.slow
def test_a_batch_size_is_planned_and_tried(tmp_path):
    flags = ["batch_size", "--config", TEST, "--limit", "16", "--workdir", tmp_path]
    done = run(*flags, "--trial", "true")
    assert done.returncode == 0, done.stderr
    assert "suggestion: --data.batch_size 16" in done.stdout
    answer = json.loads((tmp_path / "find" / "batch_size.json").read_text())
    assert answer["suggestion"] == 16
    assert answer["configured"]["fits"]
    assert answer["usable_bytes"] == round(0.9 * answer["capacity_bytes"])
    (planned,), (tried,) = answer["plans"], answer["trials"]
    # ResNet-18 has 11.2 million parameters, and as many momenta: 4 bytes each.
    assert 2 * 4 * 11_172_032 < planned["needed"] < tried["peak"]
    assert tried["fits"]


def needs(batches, usable, per_example=10):
    return tuple(Need(batch, 1, per_example * batch, per_example * batch <= usable) for batch in batches)


def plan(configured, usable, candidates=(1, 2, 4, 8, 16)):
    fitting = [batch for batch in candidates if 10 * batch <= usable]
    return Plan(
        devices=1,
        device_kind="cpu",
        capacity=200,
        capacity_from="a test",
        usable=usable,
        needs=needs(sorted({*candidates, configured}), usable),
        best=fitting[-1] if fitting else None,
        candidates=candidates,
        configured=needs([configured], usable)[0],
    )


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Runs `find_batch_size` with what its processes answer: plan, trials by batch, micro-batches."""

    def find_with(planned, trials=None, accumulated=None):
        def answer(function, config, *arguments):
            if function is find.plan_batch_size:
                return planned
            if function is find.plan_accumulation:
                asked.append(arguments)
                return accumulated
            assert function is find.try_batch
            if trials[arguments[0]] is Killed:
                raise Killed
            return trials[arguments[0]]

        asked = []
        monkeypatch.setattr(find, "in_own_process", answer)
        flags = ["batch_size", "--trial", "true"] if trials else ["batch_size"]
        arguments, _ = find.parse(flags)
        batch_size = f"--data.batch_size={planned.configured.batch}"
        config = commandline.parse("", ["--train.steps=1", batch_size, f"--workdir={tmp_path}"], ImageConfig)
        try:
            code = find.find_batch_size(config, arguments)
        except ConfigError as error:
            code = str(error)
        return code, json.loads((tmp_path / "find" / "batch_size.json").read_text()), asked

    return find_with


def test_a_configured_batch_that_does_not_fit_gets_the_micro_batches_with_which_it_does(answers, capsys):
    code, answer, asked = answers(plan(12, usable=85), accumulated=Need(12, 2, 70, True))
    assert (code, answer["suggestion"], answer["configured"]["fits"]) == (0, 8, False)
    assert asked == [(8, 85)]
    assert answer["accumulate_for_configured"] == 2
    assert answer["plans"][-1] == {"batch": 12, "accumulate": 2, "needed": 70, "fits": True}
    shown = capsys.readouterr().out
    assert "data.batch_size 12, as configured, fits with --memory.accumulate 2" in shown
    assert "16" in shown.split("suggestion")[0]
    assert "suggestion: --data.batch_size 8\n" in shown


def test_a_configured_batch_that_fits_is_said_to(answers, capsys):
    code, answer, asked = answers(plan(12, usable=130))
    assert (code, answer["suggestion"], answer["configured"]["fits"], asked) == (0, 8, True, [])
    assert "data.batch_size 12, as configured, fits\n" in capsys.readouterr().out


def test_trials_go_down_until_one_goes_through(answers, capsys):
    trials = {16: Killed, 8: Trial(8, False, None, "RESOURCE_EXHAUSTED: no"), 4: Trial(4, True, 99)}
    code, answer, asked = answers(plan(8, usable=10**6), trials=trials)
    assert (code, answer["suggestion"]) == (0, 4)
    assert [(trial["batch"], trial["fits"]) for trial in answer["trials"]] == [
        (16, False), (8, False), (4, True),
    ]  # fmt: skip
    # By plan the configured 8 fits; the trial knows better.
    assert not answer["configured"]["fits"]
    assert asked == [(4, 10**6)]
    shown = capsys.readouterr().out
    assert "killed" in shown
    assert "RESOURCE_EXHAUSTED: no" in shown


def test_where_nothing_fits_the_answer_is_an_error_that_says_what_to_try(answers):
    message, answer, _ = answers(plan(4, usable=5))
    assert "not even one of 1" in message
    assert "precision.policy" in message
    assert answer["suggestion"] is None


def test_a_curve_that_tells_nothing_is_drawn_all_the_same():
    config = commandline.parse("", ["--train.steps=1"], ImageConfig)
    empty = {"learning_rates": [], "losses": [], "smoothed_losses": [], "from": 1e-6, "to": 10.0}
    assert find.chart(empty | {"suggestion": None, "minimum_tenth": None}, config).startswith(b"\x89PNG")
