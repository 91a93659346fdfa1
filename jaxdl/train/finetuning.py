"""Fine-tuning of BERT: classes of texts, and answers as passages of a text.

Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), sections 4.1 and 4.2.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from numpy.typing import NDArray

from jaxdl.models.attention import drop, fold_in
from jaxdl.models.bert import Bert, Pooler, flops
from jaxdl.models.logical import constrain
from jaxdl.models.losses import cross_entropy, is_first
from jaxdl.models.projection import Projection
from jaxdl.parallel.pipeline.chain import Link
from jaxdl.train.task import Batch, Task, Work

_HEAD = 2**20 + 1
"""Place for the dropout before a head; layers have their numbers, the embeddings 2^20."""
_LONGEST_ANSWER = 30  # tokens
_LOWEST = -1e9  # below every logit, and far enough from the end of float32 to be added to itself


@dataclass(frozen=True, eq=False)
class _Finetuning(Task):
    """A BERT with heads that follow each other, the last of which gives the loss.

    Attributes:
        bert: the network.
        length: tokens in a sequence.
        output_dtype: dtype to which the logits are rounded; losses are computed in float32.
    """

    bert: Bert
    length: int
    output_dtype: Any = jnp.float32

    pooled: ClassVar[bool]
    labels: ClassVar[tuple[str, ...]]
    """What the loss reads of a batch: numbers, one for each example."""
    marks: ClassVar[tuple[str, ...]] = ()
    """What it reads besides: float32, one for each token."""

    @abstractmethod
    def heads(self) -> dict[str, nn.Module]:
        """Gives the modules of the heads by the names of their parameters, in order."""

    @abstractmethod
    def apply(self, name: str, params: Any, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Applies a head to what the one before it gave, the first to the hidden states."""

    @abstractmethod
    def losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        """Gives the loss of each example, float32 [batch]."""

    @abstractmethod
    def columns(self, logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Gives what an evaluation needs of each example."""

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Task.init`."""
        return nn.unbox(self._variables(key)), {}

    def axes(self) -> tuple[Any, Any]:
        """See `Task.axes`."""
        return nn.get_partition_spec(jax.eval_shape(self._variables, jax.random.key(0))), {}

    def _variables(self, key: jax.Array) -> Any:
        own, *keys = jax.random.split(key, 1 + len(self.heads()))
        variables = self.bert.init(own)
        x = jnp.zeros((1, self.length, self.bert.sizes.width), self.bert.dtype)
        for (name, head), key in zip(self.heads().items(), keys, strict=True):
            variables[name] = head.init(key, x)["params"]
            x = self.apply(name, nn.unbox(variables[name]), x, None)
        return variables

    def work(self) -> Work:
        """See `Task.work`."""
        return Work(
            self.length, flops(self.bert.sizes, length=self.length, predictions=0, pooled=self.pooled)
        )

    def example(self, examples: int) -> Batch:
        """See `Task.example`."""
        by_token = dict.fromkeys(("word", "segment", "type", "position"), jnp.int32)
        by_token |= dict.fromkeys(self.marks, jnp.float32)
        shapes = {name: ((examples, self.length), dtype) for name, dtype in by_token.items()}
        shapes |= dict.fromkeys(self.labels, ((examples,), jnp.int32))  # type: ignore[arg-type]
        return {
            name: jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[misc]  # an abstract batch
            for name, (shape, dtype) in shapes.items()
        }

    def loss(
        self, params: Any, model_state: Any, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """See `Task.loss`; each example weighs 1."""
        losses = self.losses(self._logits(params, batch, keys), batch)
        return losses.sum(), jnp.float32(len(losses)), model_state

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """See `Task.evaluate`."""
        return self.columns(self._logits(params, batch, None), batch)

    def chain(self) -> list[Link]:
        """See `Task.chain`."""

        def embeddings(
            params: Any, state: Any, _: Any, batch: Any, keys: Any, train: bool, first: int
        ) -> Any:
            return self.bert.embed(params, batch, keys if train else None), state

        def layers(params: Any, state: Any, x: Any, batch: Any, keys: Any, train: bool, first: int) -> Any:
            keys = keys if train else None
            return self.bert.encoder.run(params, x, batch["segment"], keys, first=first), state

        def finish(params: Any, state: Any, x: Any, *rest: Any) -> Any:
            return self.bert.finish(params, x), state

        def head(name: str) -> Link:
            last = name == list(self.heads())[-1]

            def apply(params: Any, state: Any, x: Any, batch: Any, keys: Any, train: bool, *rest: Any) -> Any:
                y = self.apply(name, params, x, keys if train else None)
                if not last:
                    return y, state
                if not train:
                    return self.columns(y, batch), state
                losses = self.losses(y, batch)
                return (losses.sum(), jnp.float32(len(losses))), state

            return Link((name,), apply, (*self.labels, *self.marks) if last else ())

        return [
            Link(("embeddings",), embeddings, ("word", "type", "position")),
            Link(("encoder", "layers"), layers, ("segment",), depth=self.bert.encoder.depth),
            *([Link(("final_norm",), finish)] if self.bert.pre_norm else []),
            *map(head, self.heads()),
        ]

    def _logits(self, params: Any, batch: Batch, keys: jax.Array | None) -> jax.Array:
        x = self.bert.encode(params, batch, keys)
        for name in self.heads():
            x = self.apply(name, params[name], x, keys)
        return x


@dataclass(frozen=True, eq=False)
class SequenceClassification(_Finetuning):
    """Classes of texts or pairs of texts, told from the first token.

    Attributes:
        classes: number of classes.
        dropout: share of the pooled vector that is dropped in training.
        label_smoothing: probability mass spread evenly over the classes.
    """

    classes: int = 2
    dropout: float = 0.1
    label_smoothing: float = 0.0

    pooled: ClassVar[bool] = True
    labels: ClassVar[tuple[str, ...]] = ("label",)

    def heads(self) -> dict[str, nn.Module]:
        """The pooler and a layer of logits."""
        types = self.bert.types
        classifier = Projection((self.classes,), ("pooled",), ("classes",), **types)
        return {"pooler": Pooler(**types), "classifier": classifier}

    def apply(self, name: str, params: Any, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Maps [batch, length, width] to [batch, width] to logits [batch, classes]."""
        if name == "classifier":
            x = drop(x, self.dropout, fold_in(keys, _HEAD))
        y: jax.Array = self.heads()[name].apply({"params": params}, x)
        return y

    def losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        """Softmax cross-entropy with smoothed labels."""
        logits = logits.astype(self.output_dtype).astype(jnp.float32)
        return cross_entropy(logits, batch["label"], smoothing=self.label_smoothing)

    def columns(self, logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """`loss` without smoothing, and `accuracy`, 1 where the label is first."""
        logits = logits.astype(self.output_dtype).astype(jnp.float32)
        return {
            "loss": cross_entropy(logits, batch["label"]),
            "accuracy": is_first(logits, batch["label"]).astype(jnp.float32),
        }


@dataclass(frozen=True, eq=False)
class QuestionAnswering(_Finetuning):
    """Where in a passage the answer to a question starts and ends.

    Attributes:
        score: makes the metrics of the best spans: columns `start`, `end`, `span_score` and `null_score`.
    """

    score: Callable[[dict[str, NDArray[Any]]], dict[str, float]] = lambda columns: {}

    ranked_by: ClassVar[str] = "f1"
    pooled: ClassVar[bool] = False
    labels: ClassVar[tuple[str, ...]] = ("start", "end")
    marks: ClassVar[tuple[str, ...]] = ("answerable",)

    def heads(self) -> dict[str, nn.Module]:
        """A layer with two logits a token."""
        return {"answer": Projection((2,), ("embed",), ("classes",), **self.bert.types)}

    def apply(self, name: str, params: Any, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Maps [batch, length, width] to logits [batch, length, 2] of start and end."""
        x = constrain(x, "batch", None, None)
        y: jax.Array = self.heads()[name].apply({"params": params}, x)
        return y

    def losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
        """The mean of the cross-entropies of start and end, over the passage and [CLS] (no answer)."""
        possible = (batch["answerable"] > 0).at[:, 0].set(True)
        start, end = (jnp.where(possible, each, _LOWEST) for each in self._parted(logits))
        return (cross_entropy(start, batch["start"]) + cross_entropy(end, batch["end"])) / 2

    def columns(self, logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """The best span of at most 30 tokens of the passage, its score, that of no answer, and the loss."""
        start, end = self._parted(logits)
        place = jnp.arange(self.length)
        far = place[None, :] - place[:, None]  # from start to end
        allowed = ((far >= 0) & (far < _LONGEST_ANSWER))[None]
        inside = batch["answerable"] > 0
        allowed = allowed & inside[:, :, None] & inside[:, None, :]
        scores = jnp.where(allowed, start[:, :, None] + end[:, None, :], 2 * _LOWEST)
        flat = scores.reshape(len(scores), -1)
        best = flat.argmax(-1)
        return {
            "loss": self.losses(logits, batch),
            "start": best // self.length,
            "end": best % self.length,
            "span_score": flat.max(-1),
            "null_score": start[:, 0] + end[:, 0],
        }

    def scores(self, columns: dict[str, NDArray[np.float64]]) -> dict[str, float]:
        """See `Task.scores`: the mean `loss`, and whatever `score` makes of the spans."""
        spans = {name: columns[name] for name in ("span_score", "null_score")}
        spans |= {name: columns[name].astype(np.int64) for name in ("start", "end")}
        return {"loss": math.fsum(columns["loss"]) / len(columns["loss"])} | self.score(spans)

    def _parted(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits.astype(self.output_dtype).astype(jnp.float32)
        return logits[..., 0], logits[..., 1]
