"""What each link of a chain costs, by which stages are balanced."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.parallel.pipeline.chain import Link, Piece, at, run


def estimated(chain: Sequence[Link], params: Any, model_state: Any, batch: Any) -> list[float]:
    """Counts the operations of each link's forward pass.

    Args:
        chain: the links in order.
        params: abstract parameters of the whole chain.
        model_state: abstract statistics.
        batch: abstract micro-batch.
    """
    return [operations(forward, own, x) for forward, own, x in _links(chain, params, model_state, batch)]


def measured(chain: Sequence[Link], params: Any, model_state: Any, batch: Any) -> list[float]:
    """Times each link's forward and backward pass on the first device, in seconds; see `estimated`."""

    def seconds(forward: Callable[..., Any], own: Any, x: Any) -> float:
        def both(own: Any, x: Any) -> Any:
            def total(own: Any) -> jax.Array:
                leaves = jax.tree.leaves(forward(own, x))
                sums = [
                    leaf.astype(jnp.float32).sum()
                    for leaf in leaves
                    if jnp.issubdtype(leaf.dtype, jnp.inexact)
                ]
                return jnp.stack(sums).sum()

            return jax.grad(total)(own)

        step = jax.jit(both)
        arrays = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), (own, x))
        jax.block_until_ready(step(*arrays))
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(step(*arrays))
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    return [seconds(*each) for each in _links(chain, params, model_state, batch)]


def operations(function: Callable[..., Any], *arguments: Any) -> float:
    """Counts the floating-point operations of a function: two for each product of a sum, one an element else.

    Args:
        function: of arrays.
        arguments: abstract arrays.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _links(
    chain: Sequence[Link], params: Any, model_state: Any, batch: Any
) -> list[tuple[Callable[..., Any], Any, Any]]:
    """Each link as a function of its parameters and its input, with their shapes."""
    links: list[tuple[Callable[..., Any], Any, Any]] = []
    x: Any = None
    examples = jax.tree.leaves(batch)[0].shape[0]
    for link in chain:

        def forward(own: Any, x: Any, link: Link = link) -> Any:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (model_state, batch))
            keys = jax.random.split(jax.random.key(0), examples)
            return run([_at_root(link)], own, at(zeros[0], link.path) or {}, x, zeros[1], keys, train=True)[0]

        own = at(params, link.path)
        links.append((forward, {} if own is None else own, x))
        x = jax.eval_shape(forward, *links[-1][1:])
    return links


def _at_root(link: Link) -> Piece:
    """The link, given its own parameters only."""
    return Piece(Link((), link.apply, link.reads, link.depth))


def _count(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        size = float(sum(math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars))
        inner = [_count(getattr(each, "jaxpr", each)) for each in _jaxprs(parameters)]
        if name == "dot_general":
            (summed, _), _ = parameters["dimension_numbers"]
            total += 2 * size * math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            features = kernel[parameters["dimension_numbers"].rhs_spec[0]]
            total += 2 * size * math.prod(kernel) / features
        elif name == "scan":
            total += parameters["length"] * sum(inner)
        elif name == "cond":
            total += max(inner)
        else:
            # Of two forms of one function, as of one with a derivative of its own, the first is run.
            total += inner[0] if inner else size
    return total


def _jaxprs(parameters: dict[str, Any]) -> list[Any]:
    values = [
        each
        for value in parameters.values()
        for each in (value if isinstance(value, tuple | list) else (value,))
    ]
    return [each for each in values if hasattr(getattr(each, "jaxpr", each), "eqns")]
