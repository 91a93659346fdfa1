"""What a plan must move in a step, added up from the formulas of `jaxdl.planning.communication`."""

import math
from collections import Counter

import jax

from jaxdl.models.circular import Circular
from jaxdl.parallel.rules import axes_of
from jaxdl.planning.communication import (
    data_parallel,
    fully_sharded,
    payload,
    pipeline,
    tensor_parallel,
    zero,
)

ITEM = 4
"""Bytes of a number: all of tests' runs are float32."""
LOOKUPS = 1
"""Sums of activations over the devices that share the table of words: each adds the vectors it has."""
AGAIN = 1
"""Gathers a layer, beside those of the formula, of an input that is kept divided along the sequence."""


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def fetched(run):
    """Bytes of the parameters that a device computes with; how many of them `fsdp` divides."""
    layout = jax.tree.leaves(run.plan.state_layout(run.abstract).params)
    whole = divided = 0
    for leaf, sharding in zip(jax.tree.leaves(run.abstract.params), layout, strict=True):
        axes = [axis for part in sharding.spec for axis in axes_of(part)]
        kept = [sharding.mesh.shape[axis] for axis in axes if axis in ("tensor", "pipeline")]
        size = leaf.size * ITEM // math.prod(kept)
        whole, divided = whole + size, divided + size * ("fsdp" in axes)
    return whole, divided


def formula(run, config):
    """Bytes by kind of the step of an encoder, or of a network whose layers are whole on each device.

    Biases and scales below 4,096 numbers are summed whole under every plan.
    """
    sizes, parallel = run.plan.mesh.shape, config.parallel
    copies, moved = sizes["node"] * sizes["data"], Counter()
    whole, divided = fetched(run)
    circular = sizes["pipeline"] > 1 and Circular(sizes["pipeline"], parallel.parts, parallel.repeats)
    if sizes["fsdp"] > 1:
        moved += Counter(fully_sharded(divided, divided)) + Counter(data_parallel(whole - divided))
        # A pipeline fetches before its loop, once for all micro-batches, and keeps what it fetched.
        moved["all-gather"] -= divided if circular else 0
        moved["all-reduce"] += divided // sizes["fsdp"] if copies > 1 else 0
    elif copies > 1:
        moved += Counter(zero(whole, whole) if parallel.zero1 else data_parallel(whole))
    if sizes["tensor"] == sizes["pipeline"] == 1:
        return moved

    # A device's part of the batch, and of one micro-batch.
    examples = config.data.batch_size // copies // sizes["fsdp"]
    activations = examples * run.task.length * run.task.embed * ITEM
    depth, of_one = run.task.encoder.depth, activations
    if circular:
        of_one //= circular.microbatches
        turns = circular.microbatches * circular.repeats + circular.stages - 1
        depth = depth // circular.stages // circular.repeats * turns
        moved += Counter(pipeline(of_one, turns))
        # The last results go to all devices, which all compute the loss; likewise the gradient of the first.
        moved["all-reduce"] += 2 * activations
        if circular.repeats > 1:
            # Layers that are no neighbours in the stack change places, and so do their gradients.
            moved["all-to-all"] += 2 * bytes_of(run.abstract.params["encoder"]) // circular.stages
    if sizes["tensor"] > 1:
        moved += Counter(tensor_parallel(of_one, depth, parallel.sequence))
        moved["reduce-scatter" if parallel.sequence else "all-reduce"] += LOOKUPS * activations
        if parallel.sequence:
            moved["all-gather"] += AGAIN * depth * of_one + LOOKUPS * activations
    return moved


def sums(moved):
    """The same where nothing scatters: XLA:CPU sums and slices."""
    moved = Counter(moved)
    moved["all-reduce"] += moved.pop("reduce-scatter", 0)
    return moved


def ratios(found, expected):
    """What a step moves to what it must, by kind; of kinds that it need not move, to all that it must."""
    every = sum(expected.values())
    return {
        kind: moved / (expected.get(kind) or every)
        for kind, moved in payload(found).items()
        if moved > every / 1000 or kind in expected
    }


def too_much(found, expected):
    """Kinds of which a step moves over 1.1 times what it must, and over a fiftieth of all that it must.

    Compilers sum whole what is small, and some tables of words, and divide it afterwards.
    """
    slack = sum(expected.values()) / 50
    return {
        kind: moved for kind, moved in payload(found).items() if moved > 1.1 * expected.get(kind, 0) + slack
    }
