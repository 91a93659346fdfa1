"""A task for studies of encoders: to tell each word's class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxdl.models.projection import Projection, look_up
from jaxdl.models.transformer import Encoder
from jaxdl.parallel.pipeline.chain import Link
from jaxdl.train.task import Batch, Task

KINDS = 64
"""Classes of words that an encoder is to tell apart."""


@dataclass(frozen=True, eq=False)
class Tagging(Task):
    """Embedding, encoder and a classifier that tells each word's class, its number modulo `KINDS`.

    Attributes:
        words: size of the vocabulary.
        embed: width of the encoder.
        length: words in a sequence.
        encoder: the layers.
        types: `dtype` and `param_dtype` of all parts.
    """

    words: int
    embed: int
    length: int
    encoder: Encoder
    types: Mapping[str, Any]

    @property
    def _embedding(self) -> nn.Embed:
        init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
        return nn.Embed(self.words, self.embed, embedding_init=init, **self.types)

    @property
    def _head(self) -> Projection:
        return Projection((KINDS,), ("embed",), ("classes",), **self.types)

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Task.init`."""
        return nn.unbox(self._variables(key)), {}

    def axes(self) -> tuple[Any, Any]:
        """See `Task.axes`."""
        return nn.get_partition_spec(jax.eval_shape(self._variables, jax.random.key(0))), {}

    def _variables(self, key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        word = jnp.zeros((1, 1), jnp.int32)
        hidden = jnp.zeros((1, 1, self.embed), self.types["dtype"])
        return {
            "embedding": self._embedding.init(keys[0], word)["params"],
            "encoder": self.encoder.init(keys[1], hidden, word == 0)["params"],
            "head": self._head.init(keys[2], hidden)["params"],
        }

    def loss(
        self, params: Any, model_state: Any, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """See `Task.loss`; each sequence weighs 1."""
        losses = self._losses(params, batch, keys)
        return losses.sum(), jnp.float32(losses.size), model_state

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """See `Task.evaluate`."""
        return {"loss": self._losses(params, batch, None)}

    def example(self, examples: int) -> Batch:
        """See `Task.example`."""
        return {"word": jax.ShapeDtypeStruct((examples, self.length), jnp.int32)}  # type: ignore[dict-item]

    def chain(self) -> list[Link]:
        """See `Task.chain`."""

        def embedding(params: Any, state: Any, _: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
            return self._embedded(params, batch), state

        def layers(
            params: Any, state: Any, x: Any, _: Any, keys: Any, train: bool, first: int
        ) -> tuple[Any, Any]:
            mask = jnp.ones(x.shape[:2], bool)
            return self.encoder.run(params, x, mask, keys if train else None, first=first), state

        def head(
            params: Any, state: Any, x: Any, batch: Any, keys: Any, train: bool, _: int
        ) -> tuple[Any, Any]:
            losses = self._classified(params, x, batch)
            return ((losses.sum(), jnp.float32(losses.size)) if train else {"loss": losses}), state

        return [
            Link(("embedding",), embedding, ("word",)),
            Link(("encoder", "layers"), layers, depth=self.encoder.depth),
            Link(("head",), head, ("word",)),
        ]

    def _losses(self, params: Any, batch: Batch, keys: jax.Array | None) -> jax.Array:
        hidden = self._embedded(params["embedding"], batch)
        mask = jnp.ones(batch["word"].shape, bool)
        hidden = self.encoder.apply({"params": params["encoder"]}, hidden, mask, keys)
        return self._classified(params["head"], hidden, batch)

    def _embedded(self, params: Any, batch: Batch) -> jax.Array:
        """The vectors of the words, [batch, length, embed]."""
        return look_up(params["embedding"].astype(self.types["dtype"]), batch["word"])

    def _classified(self, params: Any, hidden: jax.Array, batch: Batch) -> jax.Array:
        """The mean loss of each sequence, float32 [batch]."""
        logits = self._head.apply({"params": params}, hidden).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["word"] % KINDS)
        mean: jax.Array = losses.mean(-1)
        return mean
