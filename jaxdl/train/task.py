"""What is trained: a model together with its loss, as pure functions of arrays."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxdl.data.transforms import normalize

Batch = dict[str, jax.Array]


class Task(Protocol):
    """A model and its loss. Sums, not means, so that micro-batches of unequal weight add up exactly."""

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Gives the initial `(params, model_state)`."""

    def loss(
        self, params: Any, model_state: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Gives the summed loss and the summed weight (float32 scalars) and the next `model_state`."""

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """Gives each example's metrics as float32 arrays of shape [batch]; `loss` is one of them."""


@dataclass(frozen=True)
class Classification:
    """Image classification with softmax cross-entropy.

    Attributes:
        model: module called as `model(images, train=...)`, giving float32 logits [batch, classes].
        image_size: height and width of the images, in pixels.
        mean: mean of each colour channel, in units of the full range.
        std: standard deviation of each channel, likewise.
        label_smoothing: probability mass spread evenly over the classes (Szegedy et al. 2015).
        output_dtype: dtype to which the logits are rounded; losses are computed in float32.
    """

    model: nn.Module
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_smoothing: float = 0.0
    output_dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Task.init`."""
        image = jnp.zeros((1, self.image_size, self.image_size, len(self.mean)), jnp.float32)
        variables = nn.unbox(self.model.init(key, image, train=False))
        return variables["params"], variables.get("batch_stats", {})

    def loss(
        self, params: Any, model_state: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """See `Task.loss`; each example weighs 1."""
        logits, updated = self.model.apply(
            {"params": params, "batch_stats": model_state},
            normalize(batch["image"], self.mean, self.std),
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        logits = logits.astype(self.output_dtype).astype(jnp.float32)
        targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], logits.shape[-1]), self.label_smoothing)
        losses = optax.softmax_cross_entropy(logits, targets)
        return losses.sum(), jnp.float32(losses.size), updated.get("batch_stats", {})

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        """See `Task.evaluate`; `accuracy` and `top5` are 1 where the label is the first or among five.

        The loss is the plain cross-entropy, whatever the label smoothing, so
        that runs can be compared. Another class is behind only where its logit
        is smaller: a network that gives every class the same value, or NaN, is
        not right.
        """
        logits = self.model.apply(
            {"params": params, "batch_stats": model_state},
            normalize(batch["image"], self.mean, self.std),
            train=False,
        )
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
