"""Evaluation in which every example counts exactly once."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxdl.errors import DataError

IN_FLIGHT = 2
"""Steps dispatched ahead of the one whose results are being read."""


def evaluate(
    eval_step: Callable[..., dict[str, jax.Array]],
    scores: Callable[[dict[str, NDArray[np.float64]]], dict[str, float]],
    weights: Any,
    batches: Iterable[dict[str, np.ndarray]],
    put: Callable[[dict[str, np.ndarray]], Any],
    stop: Callable[[], bool] = lambda: False,
    hear: Callable[[dict[str, Any]], None] = lambda metrics: None,
) -> dict[str, float] | None:
    """Computes the metrics of all examples, each of which counts once.

    What they are made of comes back by example and is summed exactly. Each example's
    part is computed in float32, by kernels that differ with the batch's shape, so
    metrics are given with the six digits that do not depend on it.

    Args:
        eval_step: compiled `weights, batch -> {name: [batch]}`, with the batch's `mask` among them.
        scores: what makes metrics of the columns of all examples, as `Task.scores`.
        weights: `(params, model_state)` on the devices.
        batches: padded batches with a `mask` [batch] that is false on padding.
        put: sends a batch to the devices.
        stop: asked before each batch; true abandons the evaluation.
        hear: given each batch's metrics before they are summed, and may take some out.

    Returns:
        The metrics and `count`, the number of examples, or None if
        abandoned.

    Raises:
        DataError: no example counts.
    """
    values: dict[str, list[NDArray[np.float64]]] = {}
    pending: deque[dict[str, jax.Array]] = deque()

    def settle() -> None:
        metrics = jax.device_get(pending.popleft())
        hear(metrics)
        mask = np.asarray(metrics.pop("mask"), bool)
        for name, metric in metrics.items():
            values.setdefault(name, []).append(np.asarray(metric, np.float64)[mask])

    for batch in batches:
        if stop():
            return None
        pending.append(eval_step(weights, put(batch)))
        if len(pending) > IN_FLIGHT:
            settle()
    while pending:
        settle()
    columns = {name: np.concatenate(parts) for name, parts in values.items()}
    if not len(next(iter(columns.values()))):
        raise DataError(
            "none of the examples to evaluate on could be read: mend the files that the log names"
        )
    rounded = {name: float(f"{value:.6g}") for name, value in scores(columns).items()}
    return rounded | {"count": len(next(iter(columns.values())))}
