"""What is trained: a model together with its loss, as pure functions of arrays."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from numpy.typing import NDArray

from jaxdl.data.images.normalize import normalize
from jaxdl.errors import ConfigError
from jaxdl.parallel.pipeline.chain import Link

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Work:
    """What it takes to train on one example.

    Attributes:
        tokens: how many it has; 0 where that is no measure.
        flops: floating-point operations of the model, forward and backward, without what is computed again;
            0 where nobody has counted them.
    """

    tokens: int = 0
    flops: float = 0.0


class Task(Protocol):
    """A model and its loss. Sums, not means, so that micro-batches of unequal weight add up exactly.

    Tasks inherit from it, for what has a body here.

    Attributes:
        ranked_by: the metric that says which of several evaluations is best; more is better.
    """

    ranked_by: ClassVar[str] = "accuracy"

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Gives the initial `(params, model_state)`."""

    def axes(self) -> tuple[Any, Any] | None:
        """Gives the names of the axes of what `init` gives, as trees of `jax.sharding.PartitionSpec`.

        None: they have no names, so tensor parallelism divides nothing.
        """

    def weigh(self, batch: Batch, total: Callable[[jax.Array], jax.Array]) -> Batch:
        """Adds to a batch, before it is divided into micro-batches, what its loss needs to know of the whole.

        Args:
            batch: all examples that one copy of the step has.
            total: sums over all copies.
        """
        del total
        return batch

    def loss(
        self, params: Any, model_state: Any, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Gives the summed loss and the summed weight (float32 scalars) and the next `model_state`.

        `keys` are the random keys of the examples, [batch]: whatever an example draws comes from its own.

        A plan may call it with a part of a batch. What couples examples, as batch normalisation does, has to
        couple them along `jaxdl.models.logical.AXIS` too, where that is mapped; all else treats each apart.
        """

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """Gives of each example, as arrays of shape [batch], what `scores` makes the metrics of."""

    def scores(self, columns: dict[str, NDArray[np.float64]]) -> dict[str, float]:
        """Gives the metrics of all examples; `loss` and mostly `accuracy` are among them.

        Args:
            columns: what `evaluate` gave of each example, in their order.

        Returns:
            Here: the mean of each.
        """
        return {name: math.fsum(column) / len(column) for name, column in columns.items()}

    def work(self) -> Work:
        """Counts what it takes to train on one example."""
        return Work()

    def example(self, examples: int) -> Batch:
        """Gives the shapes of a batch of some examples, as `jax.ShapeDtypeStruct`s."""

    def chain(self) -> list[Link]:
        """Lists the parts that follow each other, for stages of a pipeline: together they are the task."""


@dataclass(frozen=True)
class Classification(Task):
    """Image classification with softmax cross-entropy.

    Attributes:
        model: module called as `model(images, train=...)`, giving float32 logits [batch, classes].
        image_size: height and width of the images, in pixels.
        mean: mean of each colour channel, in units of the full range.
        std: standard deviation of each channel, likewise.
        label_smoothing: probability mass spread evenly over the classes (Szegedy et al. 2015).
        mixed: whether training batches hold `other` and `share`, as those of mixup and CutMix do.
        output_dtype: dtype to which the logits are rounded; losses are computed in float32.
    """

    model: nn.Module
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_smoothing: float = 0.0
    mixed: bool = False
    output_dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Task.init`."""
        variables = nn.unbox(self._variables(key))
        return variables["params"], variables.get("batch_stats", {})

    def axes(self) -> tuple[Any, Any]:
        """See `Task.axes`."""
        names = nn.get_partition_spec(jax.eval_shape(self._variables, jax.random.key(0)))
        return names["params"], names.get("batch_stats", {})

    def _variables(self, key: jax.Array) -> Any:
        image = jnp.zeros((1, self.image_size, self.image_size, len(self.mean)), jnp.float32)
        return self.model.init(key, image, train=False)

    def loss(
        self, params: Any, model_state: Any, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """See `Task.loss`; each example weighs 1. The networks draw nothing at random."""
        logits, updated = self.model.apply(
            {"params": params, "batch_stats": model_state},
            self._normalized(batch),
            train=True,
            mutable=["batch_stats"],
        )
        return *self._summed(logits, batch), updated.get("batch_stats", {})

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """See `Task.evaluate`; `accuracy` and `top5` are 1 where the label is the first or among five."""
        variables = {"params": params, "batch_stats": model_state}
        return self._scored(self.model.apply(variables, self._normalized(batch), train=False), batch)

    def example(self, examples: int) -> Batch:
        """See `Task.example`."""
        shapes = {
            "image": ((self.image_size, self.image_size, len(self.mean)), jnp.uint8),
            "label": ((), jnp.int32),
        }
        if self.mixed:
            shapes |= {"other": ((), jnp.int32), "share": ((), jnp.float32)}
        return {
            name: jax.ShapeDtypeStruct((examples, *shape), dtype)  # type: ignore[misc]  # an abstract batch
            for name, (shape, dtype) in shapes.items()
        }

    def chain(self) -> list[Link]:
        """See `Task.chain`: the blocks of the network, the first with the images, the last with the loss.

        Raises:
            ConfigError: the network does not list its blocks.
        """
        if not hasattr(self.model, "layers"):
            raise ConfigError("parallel.pipeline: this model does not list its blocks, so it cannot be cut")
        modules = self.model.layers()

        def link(place: int) -> Link:
            module, first, last = modules[place], place == 0, place == len(modules) - 1

            def apply(
                params: Any, model_state: Any, x: Any, batch: Batch, keys: jax.Array, train: bool, _: Any
            ) -> tuple[Any, Any]:
                variables = {"params": params, "batch_stats": model_state}
                if last:
                    logits = module.apply(variables, x)
                    return self._summed(logits, batch) if train else self._scored(logits, batch), {}
                x = self._normalized(batch).astype(module.dtype) if first else x
                if not train:
                    return module.apply(variables, x, False), model_state
                y, updated = module.apply(variables, x, True, mutable=["batch_stats"])
                return y, updated["batch_stats"]

            reads = ("image",) * first + (("label", "other", "share") if self.mixed else ("label",)) * last
            return Link((module.name or "",), apply, reads)

        return [link(place) for place in range(len(modules))]

    def _normalized(self, batch: Batch) -> jax.Array:
        return normalize(batch["image"], self.mean, self.std)

    def _summed(self, logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The summed loss and the number of examples."""
        logits = logits.astype(self.output_dtype).astype(jnp.float32)
        targets = jax.nn.one_hot(batch["label"], logits.shape[-1])
        if self.mixed:
            share = batch["share"][:, None]
            targets = share * targets + (1 - share) * jax.nn.one_hot(batch["other"], logits.shape[-1])
        targets = optax.smooth_labels(targets, self.label_smoothing)
        losses = optax.softmax_cross_entropy(logits, targets)
        return losses.sum(), jnp.float32(losses.size)

    def _scored(self, logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """The metrics by example.

        The loss is the plain cross-entropy, whatever the label smoothing, so
        that runs can be compared. Another class is behind only where its logit
        is smaller: a network that gives every class the same value, or NaN, is
        not right.
        """
        logits = logits.astype(self.output_dtype).astype(jnp.float32)
        label = batch["label"][:, None]
        own = jnp.take_along_axis(logits, label, axis=-1)
        others = jnp.arange(logits.shape[-1])[None, :] != label
        rank = jnp.sum(~(logits < own) & others, axis=-1)
        return {
            "loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
            "accuracy": (rank < 1).astype(jnp.float32),
            "top5": (rank < 5).astype(jnp.float32),
        }
