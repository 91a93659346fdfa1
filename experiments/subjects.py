"""What the studies of memory and scaling train: networks of well-known size, with made-up batches."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import bert, resnet50
from jaxdl.config import BertModelConfig, ImageConfig

if TYPE_CHECKING:
    from jaxdl.train.task import Task

ENCODERS: Mapping[str, Mapping[str, int]] = {
    "encoder-tiny": {"depth": 4, "embed": 64, "heads": 4, "mlp": 256, "words": 512},
    "encoder-base": {"depth": 12, "embed": 768, "heads": 12, "mlp": 3072, "words": 30_592},
    "encoder-large": {"depth": 24, "embed": 1024, "heads": 16, "mlp": 4096, "words": 30_592},
}
SUBJECTS = {
    "resnet50": "ResNet-50 on ImageNet's images, SGD with momentum",
    "encoder-tiny": "4 encoder layers, 64 wide, AdamW: to try things out",
    "encoder-base": "12 encoder layers as of BERT-Base behind an embedding of 30,522 words, AdamW",
    "encoder-large": "24 encoder layers as of BERT-Large behind an embedding of 30,522 words, AdamW",
    "bert-base": "BERT-Base with both heads of pre-training, LAMB",
    "bert-large": "BERT-Large with both heads of pre-training, LAMB",
}
"""Names and meanings. The words are padded to a multiple of 128, as Megatron-LM does, so that devices can
share them."""

OPTIMIZERS = {"resnet50": "sgd", "bert-base": "lamb", "bert-large": "lamb"}
"""Of each subject; `adamw` of the others."""


def build(name: str, config: ImageConfig, *, length: int, scan: bool = True) -> "Task":
    """Builds what is to be trained.

    Args:
        name: one of `SUBJECTS`.
        config: the whole run.
        length: words in a sequence.
        scan: see `jaxdl.models.transformer.Encoder`.

    Raises:
        ConfigError: the model cannot be run as configured.
    """
    # JAX is imported only now: a program's arguments are checked before.
    from experiments.tagging import Tagging
    from jaxdl.data.images.sources import open_source
    from jaxdl.models.attention import DOTS, OTHERS
    from jaxdl.models.circular import Circular
    from jaxdl.models.remat import Remat
    from jaxdl.models.transformer import Encoder
    from jaxdl.precision import parse_policy

    if name.startswith("bert-"):
        return pretraining(name, config, length=length, scan=scan)
    if name == "resnet50":
        return resnet50.build_task(config, open_source(config.data, "train"))
    settings = ENCODERS[name]
    policy, parallel = parse_policy(config.precision.policy), config.parallel
    types = {"dtype": policy.compute, "param_dtype": policy.params}
    kept = Remat.parse(
        config.memory.remat, dots=DOTS, others=OTHERS, offload=config.memory.offloads_activations
    )
    pipeline = None
    if parallel.circular:
        pipeline = Circular(parallel.pipeline, parallel.parts, parallel.repeats)
        pipeline.require(settings["depth"])
    layer = {"heads": settings["heads"], "mlp": settings["mlp"], **types}
    return Tagging(
        words=settings["words"],
        embed=settings["embed"],
        length=length,
        encoder=Encoder(settings["depth"], layer, kept, scan, pipeline),
        types=types,
    )


def pretraining(name: str, config: ImageConfig, *, length: int, scan: bool) -> "Task":
    """Builds a BERT with masked words and next sentences, the published shares of which are hidden."""
    from jaxdl.train.pretraining import Pretraining

    size: Any = name.replace("-", "_")
    model = BertModelConfig(name=size, words_multiple=64, scan=scan)
    network = bert.build_network(config, model, words=30_522)
    # 20 of 128 and 80 of 512 words.
    return Pretraining(network, length, predictions=4 * -(-length * 15 // 400), pairs=True)


def batch(task: "Task", examples: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Makes a batch of numbers drawn at random, each in the range that its name has in the tasks here."""
    rng = np.random.default_rng(seed)
    bert = getattr(task, "bert", None)
    words = getattr(task, "words", 1) if bert is None else bert.sizes.words
    ranges = {"image": 256, "label": 10, "word": words, "masked_word": words}
    return {
        # What has no range here is a yes or a no, or a place that both are.
        name: rng.integers(0, ranges.get(name, 2), shape.shape).astype(shape.dtype)
        for name, shape in task.example(examples).items()
    }
