"""The contenders of `experiments.benchmark bert`: AdamW steps of BERT-Base on hidden words, ours and
PyTorch's.

Both tell 15% of the words, with dropout of 0.1 everywhere, and clip nothing. The PyTorch one is the
network of the `transformers` library. It computes the logits of every word and then looks at the hidden
ones, as that library does; ours computes those of the hidden ones only.
"""

from typing import TYPE_CHECKING, Any

from experiments.benchmark_steps import Step, compiled, torch_step

if TYPE_CHECKING:
    import numpy as np

    from experiments.benchmark import Job

WORDS = 30_522
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01


def jaxdl_step(job: "Job") -> tuple[Step, dict[str, Any]]:
    """Compiles the step that `experiments.bert` would train with."""
    from experiments.bert import build_network
    from jaxdl.config import (
        BertConfig,
        BertModelConfig,
        OptimizerConfig,
        ParallelConfig,
        TextDataConfig,
        TrainConfig,
    )
    from jaxdl.train.pretraining import Pretraining

    config = BertConfig(
        model=BertModelConfig(name="bert_base", positions=max(job.size, 512)),
        data=TextDataConfig(batch_size=job.batch_size, length=job.size),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=LEARNING_RATE,
            scale_with_batch=False,
            weight_decay=WEIGHT_DECAY,
            schedule="constant",
            warmup_epochs=0,
        ),
        parallel=ParallelConfig(data=1),
        train=TrainConfig(steps=1),
    )
    batch = examples(job)
    predictions = batch["masked_word"].shape[1]
    task = Pretraining(build_network(config, config.model, words=WORDS), job.size, predictions)
    return compiled(config, task, batch)


def pytorch_step(job: "Job") -> tuple[Step, dict[str, Any]]:
    """Builds the same with the `transformers` library."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=max(job.size, 512))).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    batch = {name: torch.tensor(array, dtype=torch.int64) for name, array in examples(job).items()}
    labels = torch.full_like(batch["word"], -100)  # what the library's loss passes over
    labels.scatter_(1, batch["masked_position"], batch["masked_word"])
    inputs = {"input_ids": batch["word"], "attention_mask": batch["segment"], "labels": labels}
    return torch_step(model, optimizer, lambda: model(**inputs).loss)


def examples(job: "Job") -> "dict[str, np.ndarray]":
    """Draws sequences of words without padding, and which of them are hidden."""
    import numpy as np

    rng, shape = np.random.default_rng(0), (job.batch_size, job.size)
    hidden = max(round(0.15 * job.size), 1)
    places = np.sort(np.argsort(rng.random(shape), 1)[:, :hidden], 1).astype(np.int32)
    word = rng.integers(WORDS, size=shape, dtype=np.int32)
    return {
        "word": word,
        "segment": np.ones(shape, np.int32),
        "type": np.zeros(shape, np.int32),
        "position": np.tile(np.arange(job.size, dtype=np.int32), (job.batch_size, 1)),
        "masked_position": places,
        "masked_word": np.take_along_axis(word, places, 1),
        "masked_weight": np.ones(places.shape, np.float32),
    }
