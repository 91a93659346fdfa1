"""The section `optimizer`."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from jaxdl.config.fields import STRICT, Fraction, refuse

EPSILON = {"adamw": 1e-8, "lamb": 1e-6}
"""What `optimizer.epsilon` null stands for, by update rule: as published for Adam (Kingma and Ba 2014), and
as MLPerf and NVIDIA set it for LAMB."""


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """The update rule and its schedule."""

    name: Literal["sgd", "adamw", "lamb", "lars"] = "sgd"
    """Update rule; `lamb` (You et al. 2019) and `lars` (You et al. 2017) are for large batches, and are those
    of the MLPerf references."""

    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate, stated for a batch of 256 unless `scale_with_batch` is false."""

    scale_with_batch: bool = True
    """Multiply the learning rate by batch_size / 256 (Goyal et al. 2017). The rates published for LAMB and
    LARS are for their batch as it is, so they want false."""

    momentum: Fraction = 0.9
    """Momentum of SGD and LARS; beta1 of AdamW and LAMB."""

    nesterov: bool = False
    """Nesterov momentum (SGD only)."""

    beta2: Fraction = 0.999
    """Decay of the squared gradients (AdamW and LAMB only)."""

    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Offset of the denominator (AdamW and LAMB only; null: 1e-8 for AdamW, 1e-6 for LAMB)."""

    trust_coefficient: Annotated[float, Field(gt=0)] = 0.001
    """Eta (LARS only): each layer's step, before momentum, is at most this share of the layer's norm, times
    the learning rate."""

    schedule: Literal["cosine", "step", "polynomial", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """Epochs of linear warm-up from 0."""

    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Updates of warm-up, in place of `warmup_epochs` (null: as that says)."""

    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Floor of the cosine and polynomial schedules, as a share of the peak."""

    polynomial_power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of the polynomial schedule."""

    step_epochs: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """Epochs at which the step schedule multiplies the learning rate by `step_factor`."""

    step_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor of the step schedule."""

    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Decay of kernels and embeddings; never of biases or normalisation parameters. For SGD and LARS it is
    added to the gradient (L2), for AdamW it is decoupled, for LAMB it is added to the step that the trust
    ratio scales."""

    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the gradient to this global norm (null: never). LAMB is defined with 1.0."""

    label_smoothing: Fraction = 0.0
    """Probability mass spread evenly over all classes."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of parameters and batch statistics, and evaluate with it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.nesterov and self.name != "sgd":
            problems.append(f"optimizer.nesterov works with optimizer.name sgd only, not with {self.name}")
        if any(later <= earlier for earlier, later in pairwise(self.step_epochs)):
            epochs = ", ".join(f"{epoch:g}" for epoch in self.step_epochs)
            problems.append(f"optimizer.step_epochs must increase from each value to the next, not {epochs}")
        refuse(problems)
        return self
