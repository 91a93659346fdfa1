"""Pre-training as its users meet it: real processes, a small text of their own, and what is refused."""

import json
import signal
import subprocess

import jax
import pytest

from experiments.bert import run as run_here
from jaxdl.commandline import parse
from jaxdl.config import BertConfig
from jaxdl.errors import ConfigError, JaxdlError
from jaxdl.models.bert import Sizes, flops
from tests.conftest import ROOT
from tests.data.text.corpora import texts
from tests.experiments.processes import command, environment, lines, parameters, run, summary

TEST = str(ROOT / "configs" / "bert" / "test.yaml")
PEAK = 0.5
"""Tera-operations a second that the device is said to do."""


def records(workdir, split):
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["split"] == split]


def text_directory(path, documents=40):
    path.mkdir()
    for number, text in enumerate(texts(documents=documents)):
        (path / f"{number:03}.txt").write_text(text)
    return path


def flags_of(directory, cache):
    """A small text, of which a tenth of the documents is held out."""
    return [
        "--config", TEST, "--data.name", "text", "--data.dir", str(directory), "--data.cache", str(cache),
        "--data.vocabulary_size", "300", "--data.held_out", "0.1", "--data.processes", "1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    return [
        *flags_of(text_directory(directory / "text"), directory / "cache"),
        "--data.sequences", "sentence_pairs", "--profile.peak_tflops", str(PEAK),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """A run that was never disturbed."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    done = run(*small, "--workdir", workdir, experiment="bert")
    assert done.returncode == 0, done.stderr
    return workdir, done


def test_a_run_leaves_its_metrics_its_vocabulary_and_what_network_it_is(finished):
    workdir, done = finished
    assert "Traceback" not in done.stderr
    training, evaluations = records(workdir, "train"), records(workdir, "eval")
    assert [record["step"] for record in training] == [2, 4, 6]
    assert [record["step"] for record in evaluations] == [3, 6]
    for record in evaluations:
        assert {"loss", "accuracy", "perplexity", "next_accuracy", "count"} <= record.keys()
        assert 0 < record["unigram_accuracy"] < 1
        assert 1 < record["unigram_perplexity"] < 300
        assert record["unigram_accuracy"] == evaluations[0]["unigram_accuracy"]
    assert summary(workdir)["status"] == "done"
    network = json.loads((workdir / "network.json").read_text())
    assert network["sizes"]["words"] == len(
        json.loads((workdir / "tokenizer.json").read_text())["model"]["vocab"]
    )
    assert (network["sizes"]["width"], network["pre_norm"]) == (32, False)


def test_rates_are_told_in_tokens_and_as_a_share_of_the_peak_that_is_given(finished):
    workdir, _ = finished
    sizes = Sizes(**json.loads((workdir / "network.json").read_text())["sizes"])
    # 15% of 32 tokens, rounded up to a multiple of 4.
    counted = flops(sizes, length=32, predictions=8, pooled=True)
    for record in records(workdir, "train"):
        rate = record["examples_per_second"]
        assert record["tokens_per_second"] == pytest.approx(32 * rate, rel=1e-2)
        assert record["mfu"] == pytest.approx(counted * rate / (PEAK * 1e12), rel=1e-2)


def test_a_stopped_run_goes_on_to_the_bit(finished, small, tmp_path):
    reference, _ = finished
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        command(*small, "--workdir", workdir, experiment="bert"),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "step 2/" in line:
            process.send_signal(signal.SIGTERM)
            break
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 75, stderr
    assert summary(workdir)["status"] == "stopped"
    resumed = run("--workdir", workdir, "--resume", "true", experiment="bert")
    assert resumed.returncode == 0, resumed.stderr
    assert lines(workdir) == lines(reference)
    assert parameters(workdir) == parameters(reference)


@pytest.mark.slow
def test_the_test_preset_runs_on_the_embedded_corpus_without_a_share_of_an_unknown_peak(tmp_path):
    workdir = tmp_path / "run"
    done = run("--config", TEST, "--workdir", workdir, experiment="bert")
    assert done.returncode == 0, done.stderr
    last = records(workdir, "eval")[-1]
    assert last["step"] == 6
    assert {"accuracy", "perplexity", "unigram_accuracy"} <= last.keys()
    assert "next_accuracy" not in last
    assert all("tokens_per_second" in each and "mfu" not in each for each in records(workdir, "train"))


def started_here(flags, workdir):
    config = parse("", [*flags, "--workdir", str(workdir), "--parallel.data", "1"], BertConfig)
    with jax.numpy_dtype_promotion("standard"):
        return run_here(config)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--data.length", "600"], 2, "data.length 600 is more than model.positions 512"),
        (["--data.length", "6"], 2, "data.length 6 is too short"),
        (["--model.heads", "5"], 2, "model.width 32 is not a multiple of model.heads 5"),
        (["--model.name", "pretrained"], 2, "set model.weights"),
        (["--model.weights", "NONE"], 5, "NONE"),
        (["--data.dir", "NONE"], 4, "NONE is no file or directory"),
        (["--data.vocabulary", "NONE"], 4, "NONE"),
        (["--data.name", "text_tfds"], 2, "set data.dataset"),
        (["--parallel.pipeline", "2", "--parallel.schedule", "gpipe"], 2, "take circular"),
        (["--model.weights", "~nobody_of_this_name/x"], 5, "is no directory"),
        (["--optimizer.label_smoothing", "0.1"], 2, "optimizer.label_smoothing 0.1 is for classes"),
        (["--model.attention", "cudnn"], 2, "set model.attention_dropout to 0"),
        (["--model.attention", "cudnn", "--model.attention_dropout", "0"], 2, "model.attention cudnn"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_cannot_be_is_refused(small, tmp_path, flags, code, words):
    none = str(tmp_path / "none")
    flags = [flag.replace("NONE", none) for flag in flags]
    with pytest.raises(JaxdlError) as caught:
        started_here([*small, *flags], tmp_path / "run")
    assert caught.value.exit_code == code, caught.value
    assert words.replace("NONE", none) in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_weights_come_with_their_vocabulary_and_no_other_will_do(finished, small, tmp_path):
    other = text_directory(tmp_path / "other", documents=30)
    workdir, _ = finished
    flags = [*small, "--model.weights", str(workdir), "--data.dir", str(other), "--train.steps", "1"]
    assert started_here(flags, tmp_path / "run") == 0
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (workdir / "tokenizer.json").read_bytes()
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]))
    with pytest.raises(ConfigError, match="is not that of the weights"):
        started_here([*flags, "--data.vocabulary", str(words)], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("documents", [1, 2])
def test_sentence_pairs_of_a_single_document_are_refused(tmp_path, documents):
    """Of two, one is held out."""
    flags = flags_of(text_directory(tmp_path / "text", documents), tmp_path / "cache")
    flags += ["--data.sequences", "sentence_pairs", "--data.held_out", "0.5"]
    with pytest.raises(JaxdlError, match="sentence pairs need two documents") as caught:
        started_here(flags, tmp_path / "run")
    assert caught.value.exit_code == 4
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--data.length", "600"], 2, "model.positions 512"),
        (["--data.dir", "/nowhere"], 4, "/nowhere is no file or directory"),
    ],
)
def test_bad_input_ends_a_program_with_one_paragraph_and_the_contracts_code(
    small, tmp_path, flags, code, words
):
    result = run(*small, *flags, "--workdir", tmp_path / "run", experiment="bert")
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1
    assert not (tmp_path / "run").exists()
