"""Fine-tuning as its users meet it: files of labelled texts and questions, weights of both kinds."""

import csv
import json

import jax
import numpy as np
import pytest

from experiments.finetune import run as run_here
from jaxdl.commandline import parse
from jaxdl.config import FinetuneConfig
from jaxdl.errors import JaxdlError
from jaxdl.models.bert import Sizes
from jaxdl.models.huggingface import save_bert
from jaxdl.train.finetuning import SequenceClassification
from tests.conftest import ROOT
from tests.data.text.corpora import vocabulary
from tests.experiments.processes import parameters, run, summary
from tests.experiments.test_bert import flags_of, records, text_directory
from tests.models.test_bert import bert_of

TEST = str(ROOT / "configs" / "finetune" / "test.yaml")
TOKENIZER = vocabulary()
SIZES = Sizes(depth=2, width=16, heads=2, mlp=24, words=len(TOKENIZER), positions=24)


def rows(count=40, seed=0):
    """Texts of two classes that have no word in common."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        good = number % 2
        first = "ab" if good else "xy"
        words = [first[rng.integers(2)] + "abcdefgh"[rng.integers(8)] for _ in range(rng.integers(2, 9))]
        found.append((" ".join(words), "good" if good else "bad"))
    return found


def table(path, columns=("text", "label"), **settings):
    delimiter = "," if path.suffix == ".csv" else "\t"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(rows(**settings))
    return path


def squad(path, *, impossible):
    words = [f"{a}{b}" for a in "abcd" for b in "abcdefgh"]
    qas = [
        {"id": word, "question": "xy", "answers": [{"text": word, "answer_start": 3 * i}]}
        for i, word in enumerate(words[:9])
    ]
    if impossible:
        qas.append({"id": "none", "question": "zz", "answers": [], "is_impossible": True})
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": " ".join(words), "qas": qas}]}]}))
    return path


@pytest.fixture
def words_file(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(TOKENIZER.tokens) + "\n")
    return path


@pytest.fixture
def hugging_face(tmp_path, words_file):
    """A directory with a network without head, all of whose values are random."""
    directory = tmp_path / "weights"
    task = SequenceClassification(bert_of(SIZES), 16, classes=2)
    rng = np.random.default_rng(5)
    shapes, _ = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    del shapes["classifier"]
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    save_bert(directory, params, SIZES, epsilon=1e-12)
    words_file.rename(directory / "vocab.txt")
    return directory, params


def started_here(*flags):
    flags = ["--config", TEST, "--parallel.data", "1", *map(str, flags)]
    config = parse("", flags, FinetuneConfig)
    with jax.numpy_dtype_promotion("standard"):
        return run_here(config)


PRETRAINED = [f"--model.{name}=null" for name in ("depth", "width", "heads", "mlp")]
PRETRAINED = ["--model.name", "pretrained", *PRETRAINED]


def test_the_test_preset_runs_on_a_table_of_which_a_part_is_held_out(tmp_path, words_file):
    workdir = tmp_path / "run"
    file = table(tmp_path / "train.tsv")
    done = run(
        *("--config", TEST, "--data.train_file", file, "--data.vocabulary", words_file),
        *("--workdir", workdir),
        experiment="finetune",
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((workdir / "classes.json").read_text()) == ["bad", "good"]
    assert [record["step"] for record in records(workdir, "train")] == [2, 4, 6]
    assert all(record["tokens_per_second"] > 0 for record in records(workdir, "train"))
    evaluations = records(workdir, "eval")
    assert [record["step"] for record in evaluations] == [3, 6]
    assert {record["count"] for record in evaluations} == {4}
    assert all({"loss", "accuracy"} <= record.keys() for record in evaluations)
    assert summary(workdir)["status"] == "done"


def test_two_tables_with_quotes_are_learnt(tmp_path, words_file):
    """Classes that share no word are told apart after a few passes."""
    train, other = table(tmp_path / "train.csv", count=64), table(tmp_path / "dev.csv", count=20, seed=1)
    workdir = tmp_path / "run"
    flags = ("--data.train_file", train, "--data.eval_file", other, "--data.vocabulary", words_file)
    longer = ("--train.steps", 60, "--train.eval_every", 60, "--optimizer.learning_rate", "3e-3")
    more = ("--data.batch_size", 16, "--model.dropout", 0, "--model.attention_dropout", 0)
    assert started_here(*flags, *longer, *more, "--workdir", workdir) == 0
    (last,) = records(workdir, "eval")
    assert last["count"] == 20
    assert last["accuracy"] == 1


@pytest.mark.parametrize("impossible", [False, True], ids=["1.1", "2.0"])
def test_questions_are_scored_by_exact_match_and_f1(tmp_path, words_file, impossible):
    file, workdir = squad(tmp_path / "squad.json", impossible=impossible), tmp_path / "run"
    lengths = ("--data.length", 24, "--data.stride", 4, "--data.question_length", 4)
    assert started_here(
        *("--data.name", "squad", "--data.train_file", file, "--data.eval_file", file, *lengths),
        *("--data.vocabulary", words_file, "--workdir", workdir),
    ) == 0  # fmt: skip
    for record in records(workdir, "eval"):
        assert {"loss", "exact_match", "f1"} <= record.keys()
        assert 0 <= record["exact_match"] <= record["f1"] <= 100


def test_a_run_starts_from_a_hugging_face_directory_to_the_bit(tmp_path, hugging_face):
    """Updates that are too small to change anything leave what the run started from in its checkpoint."""
    directory, given = hugging_face
    workdir = tmp_path / "run"
    flags = (*PRETRAINED, "--model.weights", directory, "--data.train_file", table(tmp_path / "train.tsv"))
    still = ("--optimizer.learning_rate", "1e-30", "--train.steps", 1)
    assert started_here(*flags, *still, "--workdir", workdir) == 0
    _, found = parameters(workdir)
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert found[f"params/{name}"] == leaf.tobytes(), name
    assert np.frombuffer(found["params/classifier/kernel"], np.float32).any()


@pytest.mark.slow
def test_a_run_starts_from_a_pre_training_of_ours_with_its_vocabulary(tmp_path):
    first, second = tmp_path / "bert", tmp_path / "finetune"
    flags = flags_of(text_directory(tmp_path / "text"), tmp_path / "cache")
    done = run(*flags, "--data.sequences", "sentence_pairs", "--workdir", first, experiment="bert")
    assert done.returncode == 0, done.stderr
    done = run(
        *("--config", TEST, *PRETRAINED, "--model.weights", first, "--workdir", second),
        *("--data.train_file", table(tmp_path / "train.tsv")),
        *("--optimizer.learning_rate", "1e-30", "--optimizer.weight_decay", "0", "--train.steps", 1),
        experiment="finetune",
    )
    assert done.returncode == 0, done.stderr
    _, before = parameters(first)
    _, after = parameters(second)
    shared = [name for name in after if name.startswith("params/") and name in before]
    assert {name.split("/")[1] for name in shared} == {"embeddings", "encoder", "pooler"}
    for name in shared:
        one, other = (np.frombuffer(each[name], np.float32) for each in (after, before))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-29)
    assert (first / "tokenizer.json").read_text() == (second / "tokenizer.json").read_text()
    assert (first / "network.json").read_text() == (second / "network.json").read_text()


CASES = [
    ([], 2, "set data.train_file"),
    (["--data.train_file", "NONE.tsv"], 4, "NONE.tsv cannot be read"),
    (["--data.train_file", "TRAIN", "--data.text_column", "texts"], 2, "did you mean 'text'?"),
    (["--data.train_file", "TRAIN", "--data.label_column", "answer"], 2, "'answer' is no column of"),
    (["--data.train_file", "TRAIN", "--data.text_pair_column", "b"], 2, "'b' is no column of"),
    (["--data.train_file", "TRAIN", "--data.eval_file", "NONE.csv"], 4, "NONE.csv cannot be read"),
    (["--data.train_file", "TRAIN", "--data.name", "squad"], 2, "set data.eval_file"),
    (["--data.train_file", "TRAIN", "--data.name", "squad", "--data.eval_file", "TRAIN"], 2, "data.stride"),
    (["--data.train_file", "TRAIN", "--model.weights", "NONE"], 5, "NONE"),
    (["--data.train_file", "TRAIN", *PRETRAINED], 2, "set model.weights"),
    (["--data.train_file", "TRAIN", "--data.length", "600"], 2, "model.positions 512"),
]


@pytest.mark.parametrize(("flags", "code", "words"), CASES)
def test_what_cannot_be_is_refused(tmp_path, words_file, flags, code, words):
    names = {"NONE": str(tmp_path / "none"), "TRAIN": str(table(tmp_path / "train.tsv"))}
    for name, value in names.items():
        flags = [flag.replace(name, value) for flag in flags]
        words = words.replace(name, value)
    with pytest.raises(JaxdlError) as caught:
        started_here(*flags, "--data.vocabulary", words_file, "--workdir", tmp_path / "run")
    assert caught.value.exit_code == code, caught.value
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_without_a_vocabulary_nothing_is_read(tmp_path):
    with pytest.raises(JaxdlError, match=r"data\.vocabulary is missing") as caught:
        started_here("--data.train_file", table(tmp_path / "train.tsv"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.length", "25"], "the network has 24 positions"),
        (["--data.vocabulary", "LARGER"], f"knows {len(TOKENIZER):,} words, and the vocabulary has"),
        (["--model.pre_norm", "true"], "normalises after branches"),
        (["--model.depth", "3"], "leaves model.depth to the weights"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(tmp_path, hugging_face, flags, words):
    directory, _ = hugging_face
    larger = tmp_path / "larger.txt"
    larger.write_text("\n".join([*TOKENIZER.tokens, "more"]) + "\n")
    flags = [flag.replace("LARGER", str(larger)) for flag in flags]
    train = table(tmp_path / "train.tsv")
    with pytest.raises(JaxdlError) as caught:
        started_here(
            *(*PRETRAINED, "--model.weights", directory, "--data.train_file", train),
            *("--workdir", tmp_path / "run", *flags),
        )
    assert caught.value.exit_code == 2, caught.value
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_directory_of_weights_without_a_vocabulary_asks_for_one(tmp_path, hugging_face):
    directory, _ = hugging_face
    (directory / "vocab.txt").unlink()
    train = table(tmp_path / "train.tsv")
    with pytest.raises(JaxdlError, match=r"neither tokenizer\.json nor vocab\.txt: set data\.vocabulary"):
        started_here(*PRETRAINED, "--model.weights", directory, "--data.train_file", train)


def test_another_number_of_classes_than_the_evaluations_is_refused(tmp_path, words_file):
    train, other = table(tmp_path / "train.tsv"), tmp_path / "dev.tsv"
    other.write_text("text\tlabel\naa\tgood\nab\tugly\n")
    with pytest.raises(JaxdlError, match="class 'ugly' is not one of") as caught:
        started_here("--data.train_file", train, "--data.eval_file", other, "--data.vocabulary", words_file)
    assert caught.value.exit_code == 4


def test_bad_input_ends_a_program_with_one_paragraph_and_the_contracts_code(tmp_path, words_file):
    flags = ("--data.train_file", table(tmp_path / "train.tsv"), "--data.text_column", "texts")
    result = run(
        *("--config", TEST, *flags, "--data.vocabulary", words_file, "--workdir", tmp_path / "run"),
        experiment="finetune",
    )
    assert result.returncode == 2, result.stderr
    assert "did you mean 'text'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1
    assert not (tmp_path / "run").exists()
