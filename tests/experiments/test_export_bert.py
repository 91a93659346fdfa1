"""The export of a BERT as its users meet it."""

import os

import numpy as np
import pytest

from tests.experiments.processes import run
from tests.experiments.test_lamb_batch import corpus

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.mark.slow
def test_a_run_becomes_a_network_and_a_tokenizer_of_transformers(tmp_path):
    import torch
    from transformers import AutoTokenizer, BertForMaskedLM

    from jaxdl.models.huggingface import load_bert
    from jaxdl.train.pretrained import newest_parameters

    workdir, exported = tmp_path / "run", tmp_path / "exported"
    done = run(*corpus(tmp_path), "--model.words_multiple", 100, "--workdir", workdir, experiment="bert")
    assert done.returncode == 0, done.stderr
    done = run(workdir, exported, experiment="export_bert")
    assert done.returncode == 0, done.stderr
    assert str(exported) in done.stdout
    model = BertForMaskedLM.from_pretrained(exported)
    words = len((exported / "vocab.txt").read_text().splitlines())
    params = newest_parameters(workdir / "checkpoints")
    table = params["embeddings"]["word"]["embedding"]
    assert model.config.vocab_size == words < len(table)  # without the rows that stand for no word
    back = load_bert(exported, params)
    np.testing.assert_array_equal(back["embeddings"]["word"]["embedding"][:words], table[:words])
    np.testing.assert_array_equal(
        back["encoder"]["layers"]["query"]["kernel"], params["encoder"]["layers"]["query"]["kernel"]
    )
    tokenizer = AutoTokenizer.from_pretrained(exported)
    numbers = tokenizer("The Quick brown fox")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(numbers) == ["[CLS]", "the", "quick", "brown", "fox", "[SEP]"]
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([numbers])).logits).all()


def test_what_is_no_run_is_refused(tmp_path):
    done = run(tmp_path, tmp_path / "exported", experiment="export_bert")
    assert done.returncode == 2
    assert "is not the directory of a run" in done.stderr
    assert not (tmp_path / "exported").exists()
