"""Evaluation in which every example counts exactly once."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

IN_FLIGHT = 2
"""Steps dispatched ahead of the one whose results are being read."""


def evaluate(
    eval_step: Callable[..., dict[str, jax.Array]],
    weights: Any,
    batches: Iterable[dict[str, np.ndarray]],
    put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]],
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Averages each metric over all examples.

    The metrics come back by example and are summed exactly. Each example's are
    computed in float32, by kernels that differ with the batch's shape, so the
    means are given with the six digits that do not depend on it.

    Args:
        eval_step: compiled `weights, batch -> {metric: float32 [batch]}`.
        weights: `(params, model_state)` on the devices.
        batches: padded batches with a `mask` [batch] that is false on padding.
        put: sends a batch to the devices.
        stop: asked before each batch; true abandons the evaluation.

    Returns:
        The mean of each metric and `count`, the number of examples, or None if
        abandoned.
    """
    values: dict[str, list[float]] = {}
    pending: deque[tuple[np.ndarray, dict[str, jax.Array]]] = deque()

    def settle() -> None:
        mask, metrics = pending.popleft()
        for name, metric in jax.device_get(metrics).items():
            values.setdefault(name, []).extend(np.asarray(metric, np.float64)[mask].tolist())

    for batch in batches:
        if stop():
            return None
        pending.append((batch["mask"].astype(bool), eval_step(weights, put(batch))))
        if len(pending) > IN_FLIGHT:
            settle()
    while pending:
        settle()
    count = len(next(iter(values.values())))
    means = {name: float(f"{math.fsum(column) / count:.6g}") for name, column in values.items()}
    return means | {"count": count}
