"""What the sections of the configuration are made of."""

from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Scale = Annotated[float, Field(ge=1e-37, le=1e38)]
"""Any number that float32 holds with a margin."""
Fraction = Annotated[float, Field(ge=0, lt=1)]


def refuse(problems: list[str]) -> None:
    """Raises all the problems at once, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))
