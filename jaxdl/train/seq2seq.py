"""The task of a model that reads one sequence and writes another, such as translation."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxdl.errors import ConfigError
from jaxdl.models.losses import cross_entropy, is_first
from jaxdl.models.seq2seq import PADDING, Seq2Seq
from jaxdl.parallel.pipeline.chain import Link
from jaxdl.train.task import Batch, Task


@dataclass(frozen=True, eq=False)
class Translation(Task):
    """Sequences to sequences, with the cross-entropy of each token given those before it.

    A batch has `source`, int32 [batch, source length], and `target`, int32 [batch, target length]:
    tokens, an end token, and padding.

    Attributes:
        model: what is trained.
        source_length: tokens of a source, padding included.
        target_length: tokens of a target, likewise.
        start: the token that the decoder reads before the target's first.
        label_smoothing: probability mass spread evenly over the vocabulary (Szegedy et al. 2015).
    """

    model: Seq2Seq
    source_length: int
    target_length: int
    start: int
    label_smoothing: float = 0.1

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Task.init`."""
        return nn.unbox(self._params(key)), {}

    def axes(self) -> tuple[Any, Any]:
        """See `Task.axes`."""
        return nn.get_partition_spec(jax.eval_shape(self._params, jax.random.key(0))), {}

    def _params(self, key: jax.Array) -> Any:
        word = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, word, word)["params"]

    def loss(
        self, params: Any, model_state: Any, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """See `Task.loss`; each token of a target weighs 1."""
        logits = self._logits(params, batch, keys)
        losses = cross_entropy(logits, batch["target"], smoothing=self.label_smoothing)
        counted = batch["target"] != PADDING
        return jnp.where(counted, losses, 0).sum(), counted.sum().astype(jnp.float32), model_state

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """See `Task.evaluate`; the decoder reads the right tokens, whatever it would have said.

        `loss` is the mean over the example's tokens, without label smoothing, so that runs can be
        compared; `accuracy` the share of tokens that are the likeliest; `exact` is 1 where all are. An
        example without tokens has 0 of each.
        """
        logits, target = self._logits(params, batch, None), batch["target"]
        counted = target != PADDING
        right = (counted & is_first(logits, target)).sum(-1)
        tokens = counted.sum(-1)
        divisor = jnp.maximum(tokens, 1).astype(jnp.float32)
        return {
            "loss": jnp.where(counted, cross_entropy(logits, target), 0).sum(-1) / divisor,
            "accuracy": right.astype(jnp.float32) / divisor,
            "exact": ((right == tokens) & (tokens > 0)).astype(jnp.float32),
        }

    def example(self, examples: int) -> Batch:
        """See `Task.example`."""
        lengths = {"source": self.source_length, "target": self.target_length}
        return {
            name: jax.ShapeDtypeStruct((examples, length), jnp.int32)  # type: ignore[misc]  # abstract
            for name, length in lengths.items()
        }

    def chain(self) -> list[Link]:
        """See `Task.chain`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "parallel.pipeline does not work with an encoder-decoder: two stacks of layers that share a "
            "table of words make no chain; take parallel.pipeline 1"
        )

    def _logits(self, params: Any, batch: Batch, keys: jax.Array | None) -> jax.Array:
        """Of each token of the target, float32 [batch, target length, words]."""
        target = batch["target"]
        # What the decoder reads ends before the last token. Padding is read by nothing that counts.
        read = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=self.start)
        logits: jax.Array = self.model.apply({"params": params}, batch["source"], read, keys)
        return logits
