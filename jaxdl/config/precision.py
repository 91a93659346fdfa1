"""The section `precision`."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from jaxdl.config.fields import STRICT, Count, Scale, refuse

POLICY_NAMES = ("fp32", "tf32", "bf16", "fp16", "bf16_full", "O0", "O1", "O2", "O3")
DTYPES = ("float32", "bfloat16", "float16")


def _positive_number(text: str) -> bool:
    try:
        return 1e-37 < float(text) < 1e38  # what float32 holds with a margin
    except ValueError:
        return False


@dataclass(frozen=True, config=STRICT)
class PrecisionConfig:
    """Number formats."""

    policy: str = "fp32"
    """`fp32` (or `O0`): everything in float32. `tf32`: the same, with products in TensorFloat-32 on GPUs that
    have it. `bf16`: float32 master weights, bfloat16 compute. `fp16` (or `O1`, `O2`): float32 master weights,
    float16 compute. `bf16_full` and `O3`: parameters too in bfloat16 or float16, which loses small updates.
    Or one of your own, as `params=float32,compute=bfloat16,output=float32`. Batch statistics, normalisation,
    softmax, loss and sums are float32 under every policy."""

    loss_scale: Annotated[str, Field(examples=["auto", "none", "dynamic", "1024"])] = "auto"
    """`none`, `dynamic`, or a number to keep; `auto` is dynamic for compute in float16 and none otherwise."""

    scale_start: Scale = 65536.0
    """First dynamic scale."""

    scale_growth: Annotated[float, Field(gt=1)] = 2.0
    """Factor by which the dynamic scale grows after `scale_window` finite updates in a row."""

    scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which the dynamic scale falls where an update is not finite."""

    scale_window: Count = 2000
    """Finite updates in a row after which the dynamic scale grows."""

    scale_minimum: Scale = 1.0
    """Floor of the dynamic scale."""

    scale_maximum: Scale = 4294967296.0
    """Ceiling of the dynamic scale."""

    scale_hysteresis: Count = 1
    """The dynamic scale falls at this skipped update and at all later ones, until it has grown again."""

    max_skipped_updates: Count = 50
    """Updates in a row that may be skipped because they are not finite, before the run ends with exit code 3.
    Without a loss scale the first such update ends it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        parts = dict(part.partition("=")[::2] for part in self.policy.split(","))
        custom = parts.keys() <= {"params", "compute", "output"} and set(parts.values()) <= set(DTYPES)
        custom = custom and len(parts) == self.policy.count(",") + 1
        if self.policy not in POLICY_NAMES and not custom:
            problems.append(
                f"precision.policy {self.policy!r} is not one of {', '.join(POLICY_NAMES)}, nor a list of "
                f"params=, compute= and output= with {', '.join(DTYPES)}"
            )
        if self.loss_scale not in ("auto", "none", "dynamic") and not _positive_number(self.loss_scale):
            problems.append(
                f"precision.loss_scale {self.loss_scale!r} is not auto, none, dynamic or a number above 0 "
                "that float32 holds"
            )
        if not self.scale_minimum <= self.scale_start <= self.scale_maximum:
            problems.append(
                f"precision.scale_start {self.scale_start:g} does not lie between precision.scale_minimum "
                f"{self.scale_minimum:g} and precision.scale_maximum {self.scale_maximum:g}"
            )
        refuse(problems)
        return self
