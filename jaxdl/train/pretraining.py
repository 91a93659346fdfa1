"""Pre-training of BERT: to tell hidden words, and whether two texts follow each other.

Devlin et al. 2018 (https://arxiv.org/abs/1810.04805).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from numpy.typing import NDArray

from jaxdl.errors import ConfigError
from jaxdl.models.bert import Bert, MaskedWords, Pooler, flops
from jaxdl.models.losses import cross_entropy, is_first
from jaxdl.models.projection import Projection
from jaxdl.parallel.pipeline.chain import Link
from jaxdl.train.task import Batch, Task, Work


@dataclass(frozen=True, eq=False)
class Pretraining(Task):
    """Masked words and, with `pairs`, next sentences; the loss is the sum of both means.

    The mean over masked words is over those of the whole batch, wherever they are, so sequences with many
    of them weigh more.

    Attributes:
        bert: the network.
        length: tokens in a sequence.
        predictions: places for hidden words in a sequence.
        pairs: predict next sentences too.
        output_dtype: dtype to which the logits are rounded; losses are computed in float32.
        baseline: metrics to compare with, which are passed on with each evaluation.
    """

    bert: Bert
    length: int
    predictions: int
    pairs: bool = False
    output_dtype: Any = jnp.float32
    baseline: Mapping[str, float] = field(default_factory=dict)

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Task.init`."""
        return nn.unbox(self._variables(key)), {}

    def axes(self) -> tuple[Any, Any]:
        """See `Task.axes`."""
        return nn.get_partition_spec(jax.eval_shape(self._variables, jax.random.key(0))), {}

    def _variables(self, key: jax.Array) -> Any:
        bert, keys = self.bert, jax.random.split(key, 4)
        hidden = jnp.zeros((1, 1, bert.sizes.width), bert.dtype)
        table = jnp.zeros((bert.sizes.words, bert.sizes.width), bert.dtype)
        place = jnp.zeros((1, 1), jnp.int32)
        variables = bert.init(keys[0])
        variables["masked_words"] = self._masked_words.init(keys[1], hidden, place, table)["params"]
        if self.pairs:
            variables["pooler"] = self._pooler.init(keys[2], hidden)["params"]
            variables["next_sentence"] = self._next_sentence.init(keys[3], hidden[:, 0])["params"]
        return variables

    @property
    def _masked_words(self) -> MaskedWords:
        sizes = self.bert.sizes
        return MaskedWords(sizes.words, sizes.unused, self.bert.epsilon, **self.bert.types)

    @property
    def _pooler(self) -> Pooler:
        return Pooler(**self.bert.types)

    @property
    def _next_sentence(self) -> Projection:
        return Projection((2,), ("pooled",), ("classes",), **self.bert.types)

    def weigh(self, batch: Batch, total: Callable[[jax.Array], jax.Array]) -> Batch:
        """See `Task.weigh`: `scale` [batch] is the number of examples for each hidden word."""
        weight = batch["masked_weight"]
        words, examples = total(weight.sum()), total(jnp.float32(len(weight)))
        return batch | {"scale": jnp.broadcast_to(examples / jnp.maximum(words, 1), (len(weight),))}

    def loss(
        self, params: Any, model_state: Any, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """See `Task.loss`; each example weighs 1, since `scale` makes up for unequal numbers of words."""
        masked, pair, _, _ = self._losses(params, batch, keys)
        losses = masked * batch["scale"] + pair
        return losses.sum(), jnp.float32(len(losses)), model_state

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """See `Task.evaluate`: sums over the hidden words of each example, and their number."""
        masked, pair, right, right_pair = self._losses(params, batch, None)
        sums = {"loss": masked, "accuracy": right, "words": batch["masked_weight"].sum(-1)}
        return sums | ({"next_loss": pair, "next_accuracy": right_pair} if self.pairs else {})

    def scores(self, columns: dict[str, NDArray[np.float64]]) -> dict[str, float]:
        """See `Task.scores`.

        Returns:
            `loss`, that of training; `accuracy` and `perplexity`, of hidden words; with pairs
            `next_accuracy`; and the baseline.
        """
        sums = {name: math.fsum(column) for name, column in columns.items()}
        words, examples = max(sums["words"], 1.0), len(columns["words"])
        masked = sums["loss"] / words
        scores: dict[str, float] = {
            "loss": masked + sums.get("next_loss", 0.0) / examples,
            "accuracy": sums["accuracy"] / words,
            "perplexity": math.inf if masked > 700 else math.exp(masked),
        }
        if self.pairs:
            scores["next_accuracy"] = sums["next_accuracy"] / examples
        return scores | dict(self.baseline)

    def work(self) -> Work:
        """See `Task.work`."""
        counted = flops(self.bert.sizes, length=self.length, predictions=self.predictions, pooled=self.pairs)
        return Work(self.length, counted)

    def example(self, examples: int) -> Batch:
        """See `Task.example`."""
        sequence = dict.fromkeys(("word", "segment", "type", "position"), ((self.length,), jnp.int32))
        places = dict.fromkeys(("masked_position", "masked_word"), ((self.predictions,), jnp.int32))
        weights = {"masked_weight": ((self.predictions,), jnp.float32)}
        pair = {"next": ((), jnp.int32)} if self.pairs else {}
        return {
            name: jax.ShapeDtypeStruct((examples, *shape), dtype)  # type: ignore[misc]  # an abstract batch
            for name, (shape, dtype) in (sequence | places | weights | pair).items()
        }

    def chain(self) -> list[Link]:
        """Refuses: the table of words is part of the first stage and of the last.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "parallel.schedule: the first and the last layer of this network share the table of words, so "
            "stages cannot be programs of their own; take circular"
        )

    def _losses(
        self, params: Any, batch: Batch, keys: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Sums over the hidden words of each example and its next sentence: two losses, two numbers right."""
        hidden = self.bert.encode(params, batch, keys)
        table = params["embeddings"]["word"]["embedding"]
        logits = self._masked_words.apply(
            {"params": params["masked_words"]}, hidden, batch["masked_position"], table
        )
        weight = batch["masked_weight"]
        losses, right = self._told(logits, batch["masked_word"])
        masked, hits = (losses * weight).sum(-1), (right * weight).sum(-1)
        if not self.pairs:
            return masked, jnp.zeros_like(masked), hits, jnp.zeros_like(masked)
        pooled = self._pooler.apply({"params": params["pooler"]}, hidden)
        logits = self._next_sentence.apply({"params": params["next_sentence"]}, pooled)
        pair, right_pair = self._told(logits, batch["next"])
        return masked, pair, hits, right_pair

    def _told(self, logits: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss and whether the label is first, float32 like the label."""
        logits = logits.astype(self.output_dtype).astype(jnp.float32)
        return cross_entropy(logits, label), is_first(logits, label).astype(jnp.float32)
