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
    put: Callable[[dict[str, np.ndarray]], Any],
    stop: Callable[[], bool] = lambda: False,
    hear: Callable[[dict[str, Any]], None] = lambda metrics: None,
) -> dict[str, float] | None:
    """Averages each metric over all examples.

    The metrics come back by example and are summed exactly. Each example's are
    computed in float32, by kernels that differ with the batch's shape, so the
    means are given with the six digits that do not depend on it.

    Args:
        eval_step: compiled `weights, batch -> {metric: float32 [batch]}`, with the batch's `mask` among them.
        weights: `(params, model_state)` on the devices.
        batches: padded batches with a `mask` [batch] that is false on padding.
        put: sends a batch to the devices.
        stop: asked before each batch; true abandons the evaluation.
        hear: given each batch's metrics before they are summed, and may take some out.

    Returns:
        The mean of each metric and `count`, the number of examples, or None if
        abandoned.
    """
    values: dict[str, list[float]] = {}
    pending: deque[dict[str, jax.Array]] = deque()

    def settle() -> None:
        metrics = jax.device_get(pending.popleft())
        hear(metrics)
        mask = np.asarray(metrics.pop("mask"), bool)
        for name, metric in metrics.items():
            values.setdefault(name, []).extend(np.asarray(metric, np.float64)[mask].tolist())

    for batch in batches:
        if stop():
            return None
        pending.append(eval_step(weights, put(batch)))
        if len(pending) > IN_FLIGHT:
            settle()
    while pending:
        settle()
    count = len(next(iter(values.values())))
    means = {name: float(f"{math.fsum(column) / count:.6g}") for name, column in values.items()}
    return means | {"count": count}
