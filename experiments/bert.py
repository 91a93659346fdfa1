"""Pre-trains a BERT on text: `python -m experiments.bert --help`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdl import commandline, environment
from jaxdl.config import BertConfig, BertModelConfig, Config
from jaxdl.errors import ConfigError

if TYPE_CHECKING:
    from jaxdl.data.text.pretraining import PretrainingSource
    from jaxdl.models.bert import Bert
    from jaxdl.train.pretraining import Pretraining

PRESETS = Path(__file__).resolve().parents[1] / "configs" / "bert"


def run(config: BertConfig) -> int:
    """Opens the corpus, builds the network, and trains it."""
    environment.prepare(config.memory.allocator)
    # JAX is imported only now: it reads the environment, and `--help` should not wait for it.
    from jaxdl.data.text.batches import TextFeed
    from jaxdl.data.text.sources import open_pretraining
    from jaxdl.parallel.processes import joined
    from jaxdl.train.loop import train
    from jaxdl.train.pretrained import NETWORK, TOKENIZER, description, initial_values

    environment.compilation_cache()
    with joined(config.parallel):
        learnt, held_out = open_pretraining(config.data, known_vocabulary(config.model))
        task = build_task(config, learnt, held_out)
        return train(
            config,
            task,
            TextFeed(config.data, learnt, held_out),
            experiment="bert",
            initial=initial_values(config.model, task),
            files={TOKENIZER: learnt.tokenizer.serialized, NETWORK: description(task.bert)},
        )


def known_vocabulary(model: BertModelConfig) -> Path | None:
    """Gives the file of the vocabulary of the weights to start from, if there are any.

    Raises:
        ConfigError: the weights have none beside them.
    """
    from jaxdl.train.pretrained import vocabulary_of

    path = vocabulary_of(model)
    if model.weights and path is None:
        raise ConfigError(f"model.weights: {model.weights} has neither tokenizer.json nor vocab.txt")
    return path


def build_task(
    config: BertConfig, learnt: "PretrainingSource", held_out: "PretrainingSource"
) -> "Pretraining":
    """Builds the network and its loss for the vocabulary and the sequences of a corpus.

    Raises:
        ConfigError: the network cannot be run as configured.
    """
    from jaxdl.data.text.sources import unigram_baseline
    from jaxdl.precision import parse_policy
    from jaxdl.train.pretraining import Pretraining

    return Pretraining(
        build_network(config, config.model, words=len(learnt.tokenizer)),
        length=config.data.length,
        predictions=learnt.masking.limit,
        pairs=config.data.sequences == "sentence_pairs",
        output_dtype=parse_policy(config.precision.policy).output,
        baseline=unigram_baseline(learnt, held_out),
    )


def build_network(config: Config, model: BertModelConfig, *, words: int) -> "Bert":
    """Builds embeddings and encoder.

    Args:
        config: the whole run; precision, remat and pipeline are used.
        model: which network.
        words: pieces in the vocabulary.

    Raises:
        ConfigError: the network cannot be run as configured.
    """
    import jax.numpy as jnp

    from jaxdl.models.attention import DOTS, OTHERS
    from jaxdl.models.bert import Bert
    from jaxdl.models.circular import Circular
    from jaxdl.models.remat import Remat
    from jaxdl.models.transformer import Encoder
    from jaxdl.parallel.mesh import devices_at_hand
    from jaxdl.precision import parse_policy
    from jaxdl.train.pretrained import sizes_of

    policy, parallel, memory = parse_policy(config.precision.policy), config.parallel, config.memory
    sizes, epsilon = sizes_of(model, words)
    types: dict[str, Any] = {"dtype": policy.compute, "param_dtype": policy.params}
    platform = devices_at_hand()[0].platform
    possible = platform == "gpu" and jnp.dtype(policy.compute).itemsize == 2
    if model.attention == "cudnn" and not possible:
        raise ConfigError("model.attention cudnn is for GPUs and 16-bit dtypes: take auto or xla")
    fused = possible and model.attention != "xla" and not model.attention_dropout
    layer = {
        "heads": sizes.heads,
        "mlp": sizes.mlp,
        "dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "pre_norm": model.pre_norm,
        "implementation": "cudnn" if fused else "xla",
        "epsilon": epsilon,
        **types,
    }
    pipeline = None
    if parallel.circular:
        pipeline = Circular(parallel.pipeline, parallel.parts, parallel.repeats)
        pipeline.require(sizes.depth)
    kept = Remat.parse(memory.remat, dots=DOTS, others=OTHERS, offload=memory.offloads_activations)
    encoder = Encoder(sizes.depth, layer, kept, model.scan, pipeline)
    return Bert(sizes, encoder, model.dropout, epsilon, **types)


if __name__ == "__main__":
    commandline.main(
        run,
        program="python -m experiments.bert",
        config=BertConfig,
        default_preset=PRESETS / "tiny.yaml",
        description="Pre-train a BERT on text.",
    )
