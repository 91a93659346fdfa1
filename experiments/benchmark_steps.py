"""What the contenders of a benchmark share: a step as a function without arguments, and facts about it."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxdl import environment
from jaxdl.config import Config

if TYPE_CHECKING:
    import numpy as np

    from jaxdl.train.task import Task

Step = Callable[[], float]


def compiled(config: Config, task: "Task", examples: "dict[str, np.ndarray]") -> tuple[Step, dict[str, Any]]:
    """Compiles the step that a run of a task would make, with one batch again and again.

    Returns:
        The step, which gives the loss, and as facts `parameters`, `compile_seconds` and whether the
        program was `cached`.
    """
    import jax

    from jaxdl.train.program import prepare

    environment.compilation_cache()
    program = prepare(config, task, config.data.batch_size)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    began = time.perf_counter()
    train_step = program.plan.compile_train(program.train_step, program.state, examples)
    compile_seconds = time.perf_counter() - began
    cached = "/jax/compilation_cache/cache_hits" in events
    batch = program.plan.put(examples)
    state = program.plan.compile_init(program.init)()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))

    def step() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(train_step(state, batch))
        return float(metrics["loss"])

    return step, {"parameters": parameters, "compile_seconds": compile_seconds, "cached": cached}


def torch_step(model: Any, optimizer: Any, objective: Callable[[], Any]) -> tuple[Step, dict[str, Any]]:
    """Makes a step of a PyTorch module, with the facts of `compiled`.

    Args:
        model: the module.
        optimizer: of its parameters.
        objective: gives the loss.
    """

    def step() -> float:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return step, {"parameters": parameters, "compile_seconds": None, "cached": None}
