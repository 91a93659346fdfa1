"""Rematerialisation: what of the forward pass is kept for the backward pass, and what is computed again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (https://arxiv.org/abs/1604.06174). The
mathematics is the same in every case; only memory and time change.

| level       | kept                                                    | computed again              |
|-------------|---------------------------------------------------------|-----------------------------|
| `none`      | all that differentiation wants                          | nothing                     |
| `dots`      | results of convolutions and of products with parameters | norms, activations, softmax |
| `blocks`    | the input of each residual block                        | the forward pass            |
| `full`      | the input of each encoder layer or stage of a ResNet    | the forward pass            |
| `names:a,b` | the input of each layer or block, and what is named     | all but what is named       |

The two residual blocks of an encoder's layer are attention and perceptron. A stage of a ResNet is too long to
be computed again in one go: its blocks are checkpointed as well, and their forward pass is made three times.

A model calls `tag` on what can be named and wraps its blocks or runs in `jax.checkpoint` with `Remat.policy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxdl.errors import ConfigError

HOST_MEMORY = "pinned_host"
"""JAX's name for memory of the host from which an accelerator copies directly."""

Level = Literal["none", "dots", "blocks", "full", "names"]


def tag(x: jax.Array, name: str | None) -> jax.Array:
    """Gives an activation the name by which it can be kept; the name of a layer is that of its result."""
    named: jax.Array = checkpoint_name(x, name) if name else x
    return named


@dataclass(frozen=True)
class Remat:
    """What a model keeps for its backward pass.

    Attributes:
        level: the row of the module's table.
        names: what is kept of each block, with `dots` and `names`.
        offload: keep it in the host's memory rather than the device's.
    """

    level: Level = "none"
    names: tuple[str, ...] = ()
    offload: bool = False

    @classmethod
    def parse(
        cls, text: str, *, dots: Sequence[str], others: Sequence[str] = (), offload: bool = False
    ) -> Self:
        """Reads `memory.remat` for a model.

        Args:
            text: a row of the module's table.
            dots: the model's names for results of convolutions and products with parameters.
            others: its names for other activations.
            offload: whether what is kept by name goes to the host.

        Raises:
            ConfigError: the model knows no such name.
        """
        level, _, listed = text.partition(":")
        names = tuple(dots) if level == "dots" else tuple(name.strip() for name in listed.split(",") if name)
        unknown = [name for name in names if name not in {*dots, *others}]
        if unknown:
            raise ConfigError(
                f"memory.remat: the model has no activation {', '.join(unknown)}; it names "
                f"{', '.join([*dots, *others])}"
            )
        return cls(level, names, offload)  # type: ignore[arg-type]  # the configuration has checked the level

    @property
    def policy(self) -> Any:
        """Which values of a block `jax.checkpoint` keeps, besides the block's input."""
        policies = jax.checkpoint_policies
        if self.offload:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(self.names),
                offload_src="device",
                offload_dst=HOST_MEMORY,
            )
        return policies.save_only_these_names(*self.names)
