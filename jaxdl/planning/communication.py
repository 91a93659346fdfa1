"""What a compiled step sends between devices: read from its optimized HLO text, and what theory expects.

The text is parsed and followed from its entry, for a search in it would miscount: a collective in a loop
stands there once, an asynchronous one twice or more. JAX's own view of a module (`hlo_modules()`) gives names
and operands, but no shapes, groups or called computations. Measured on jax 0.10, for CPUs, GPUs and TPUs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from jaxdl.planning.capacity import show_bytes

ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""How often a payload goes round a ring, less one device's share. The other kind is `collective-permute`."""


def ring_bytes(kind: str, payload: int, group: int) -> int:
    """Returns the bytes that each device sends: M for a permute, 2(N-1)/N M for a sum, else (N-1)/N M."""
    if kind == "collective-permute":
        return payload if group > 1 else 0
    return ROUNDS[kind] * (group - 1) * payload // group


@dataclass(frozen=True)
class Collective:
    """One collective of a step; equal ones are one, with their number.

    Attributes:
        kind: a key of `ROUNDS`, or `collective-permute`.
        count: how often a step executes it.
        bytes: payload of one execution on each device, as padded: the full array for a gather (its result)
            and for a scatter (its operand).
        group: devices that take part together; for a permute those that its pairs link.
        shapes: what the payload consists of.
        exact: False in a loop whose trips the text does not tell (they count as one), and in a conditional
            whose branches differ (the one that sends most counts).
    """

    kind: str
    count: int
    bytes: int
    group: int
    shapes: tuple[str, ...]
    exact: bool = True

    @property
    def sent(self) -> int:
        """Bytes that each device sends in a step."""
        return self.count * ring_bytes(self.kind, self.bytes, self.group)


def collectives(hlo_text: str) -> list[Collective]:
    """Finds the collectives that a step executes, those that send most first.

    Args:
        hlo_text: the optimized module, `compiled.as_text()`.

    Raises:
        ValueError: it is no such text, or its collectives are written in a way that is not known here.
    """
    computations, entry = _parse(hlo_text)
    if PART in hlo_text and START not in hlo_text:
        raise ValueError("asynchronous collectives without a start that is known here")
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", hlo_text.split("\n", 1)[0])
    everyone = math.prod(map(int, sizes))

    @cache
    def executed(name: str, fused: bool = False) -> list[Collective]:
        computation, found = computations[name], list[Collective]()
        # TPUs cut an asynchronous collective into a start, steps within other fusions, and an end: each of
        # them repeats it. No channel tells it from others: in a `shard_map` all are of channel 1.
        starts = [one for one in computation.values() if START in one.rest]
        started = {operand for start in starts for operand in start.operands}
        for one in computation.values():
            called = one.called
            if kind := KIND.fullmatch(one.opcode):
                if PART in one.rest and one.name not in started:
                    continue
                collective = _collective(kind[1], one, computation, everyone)
                # TPUs scatter by a fusion of a sum and its slice, which they run as one reduce-scatter.
                if fused and kind[1] == "all-reduce" and _sliced(computation) == one.name:
                    collective = replace(collective, kind="reduce-scatter")
                found.append(collective)
            elif one.opcode == "while":
                (condition,), (body,) = called["condition"], called["body"]
                trips = _trips(one, computation, computations[condition], computations[body])
                times = 1 if trips is None else trips
                for part, number in ((body, times), (condition, times + 1)):
                    for inner in executed(part):
                        exact = inner.exact and trips is not None
                        found.append(replace(inner, count=inner.count * number, exact=exact))
            elif one.opcode == "conditional":
                branches = [_merged(executed(branch)) for names in called.values() for branch in names]
                most = max(branches, key=lambda branch: sum(inner.sent for inner in branch))
                same = all(branch == most for branch in branches)
                found += [replace(inner, exact=inner.exact and same) for inner in most]
            elif one.opcode not in ("async-update", "async-done"):
                for part in (part for parts in called.values() for part in parts):
                    found += executed(part, one.opcode == "fusion")
        return found

    return _merged(one for one in executed(entry) if one.count)


def payload(found: Iterable[Collective]) -> dict[str, int]:
    """Sums the payloads of a step by kind, to be compared with what a plan must move."""
    sums: Counter[str] = Counter()
    for one in found:
        sums[one.kind] += one.count * one.bytes
    return dict(sums)


def table(found: Iterable[Collective]) -> list[tuple[str, ...]]:
    """Gives rows to print, the first with the columns' names; `~` marks a number that is not exact."""
    rows: list[tuple[str, ...]] = [("collective", "times", "devices", "payload", "sent", "arrays")]
    for one in found:
        arrays = [f"{number} x {shape}" for shape, number in Counter(one.shapes).most_common()]
        listed = ", ".join(arrays[:3]) + (f" and {len(arrays) - 3} more" if len(arrays) > 3 else "")
        times = f"{one.count}" if one.exact else f"~{one.count}"
        sizes = show_bytes(one.bytes), show_bytes(one.sent)
        rows.append((one.kind, times, f"{one.group}", *sizes, listed))
    return rows


# What a plan must move: bytes of the payloads of a step on each device by kind, before the ring's factor.


def data_parallel(gradients: int) -> dict[str, int]:
    """All parameters on each device: the gradients are summed (Rajbhandari et al. 2019, section 7.1)."""
    return {"all-reduce": gradients}


def zero(gradients: int, parameters: int) -> dict[str, int]:
    """ZeRO-1 and 2: gradients are scattered, the parts that each device updates gathered.

    It sends as much as data parallelism (Rajbhandari et al. 2019, section 7.2.1).
    """
    return {"reduce-scatter": gradients, "all-gather": parameters}


def fully_sharded(gradients: int, parameters: int) -> dict[str, int]:
    """ZeRO-3: parameters are gathered forward and again backward, gradients scattered.

    It sends 1.5 times as much as data parallelism (Rajbhandari et al. 2019, section 7.2.2).
    """
    return {"reduce-scatter": gradients, "all-gather": 2 * parameters}


def tensor_parallel(activations: int, layers: int, sequence: bool = False) -> dict[str, int]:
    """Divided Transformer layers: each sums activations twice forward, twice backward (Shoeybi et al. 2019).

    Args:
        activations: batch * length * embed * itemsize, of the device's part of the batch and all positions.
        layers: how many of attention and MLP together.
        sequence: a gather and a scatter take the place of each sum (Korthikanti et al. 2022). Inputs that are
            not kept as gathered are gathered again, 2 times more a layer.
    """
    moved = 4 * layers * activations
    return {"all-gather": moved, "reduce-scatter": moved} if sequence else {"all-reduce": moved}


def pipeline(activations: int, microbatches: int, repeats: int = 1) -> dict[str, int]:
    """A stage between others: activations go forward, their gradients back (Huang et al. 2018).

    Args:
        activations: bytes of one micro-batch between two stages.
        microbatches: parts of a batch.
        repeats: runs of layers on each device (Narayanan et al. 2021).
    """
    return {"collective-permute": 2 * microbatches * repeats * activations}


# The text: a line is the head of a computation, an instruction, or the end.

HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
ARRAY = re.compile(r"[a-z]\w*\[[\d,<=]*\]")
KIND = re.compile(f"({'|'.join(ROUNDS)}|collective-permute)(?:-start)?")
START = 'custom_call_target="AsyncCollectiveStart"'
PART = '"async_collective_fusion_config"'
COPIES = ("copy", "copy-start", "copy-done", "bitcast")


class _Instruction(NamedTuple):
    """`ROOT %name = shape opcode(arguments)rest`."""

    root: str | None
    name: str
    shape: str
    opcode: str
    arguments: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return NAME.findall(self.arguments)

    @property
    def called(self) -> dict[str, list[str]]:
        return {role: NAME.findall(names) for role, names in CALLED.findall(self.rest)}


_Computation = dict[str, _Instruction]


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = head[2]
            computations[current] = {}
            entry = current if head[1] else entry
        elif current and (found := LINE.match(line)):
            computations[current][found[2]] = _Instruction(*found.groups())
    if not entry:
        raise ValueError("this is no text of an HLO module: it has no ENTRY")
    return computations, entry


def _merged(found: Iterable[Collective]) -> list[Collective]:
    counts: Counter[Collective] = Counter()
    for one in found:
        counts[replace(one, count=1)] += one.count
    merged = [replace(one, count=count) for one, count in counts.items()]
    return sorted(merged, key=lambda one: (-one.sent, one.kind, one.shapes))


def _collective(kind: str, one: _Instruction, computation: _Computation, everyone: int) -> Collective:
    shapes = [shape for name in one.operands for shape in ARRAY.findall(computation[name].shape)]
    if kind == "all-gather":
        # The shape of a start lists the operands before the results.
        first = len(shapes) if one.opcode.endswith("-start") else 0
        shapes = ARRAY.findall(one.shape)[first : first + len(shapes)]
    return Collective(kind, 1, sum(map(_bytes, shapes)), _group(one.rest, everyone), tuple(shapes))


def _bytes(array: str) -> int:
    dtype, sizes = array.rstrip("]").split("[")
    width = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" else int(width[0]) if width else 0
    return math.ceil(bits * math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size) / 8)


def _group(rest: str, everyone: int) -> int:
    """Reads how many devices take part together: pairs are written in one way, groups in three."""
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", rest):
        groups: list[set[str]] = []
        for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1]):
            touched = [group for group in groups if group & set(pair)]
            groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
        return max(map(len, groups), default=1)
    if listed := re.search(r"replica_groups=\{([\d,{}]*)\}", rest):
        groups_listed = re.findall(r"\{([\d,]+)\}", listed[1])
        return max((group.count(",") + 1 for group in groups_listed), default=everyone)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'?([^',=]+)'?=(\d+)", mesh[1]))
        # An axis may be taken in part: 'a':(2)4 is 4 devices along it.
        axes = re.findall(r"'?([^',:()]+)'?(?::\(\d+\)(\d+))?(?:,|$)", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(f"a collective without groups that are known here: {rest[:200]}")


def _root(computation: _Computation) -> _Instruction:
    return next(one for one in computation.values() if one.root)


def _sliced(computation: _Computation) -> str | None:
    """Returns what a computation's results are slices of, if they are slices of one instruction's."""
    root = _root(computation)
    results = [computation[name] for name in root.operands] if root.opcode == "tuple" else [root]
    sources = set()
    for one in results:
        while one.opcode in ("bitcast", "copy"):
            one = computation[one.operands[0]]
        if one.opcode != "dynamic-slice":
            return None
        source = computation[one.operands[0]]
        sources.add(source.operands[0] if source.opcode == "get-tuple-element" else source.name)
    return sources.pop() if len(sources) == 1 else None


def _trips(
    loop: _Instruction, around: _Computation, condition: _Computation, body: _Computation
) -> int | None:
    """Returns how often a loop runs: as the compiler notes, or by a counter that grows to a constant."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(noted[1])

    def source(name: str, place: _Computation) -> _Instruction:
        one = place[name]
        return source(one.operands[0], place) if one.opcode in COPIES else one

    def value(one: _Instruction) -> int | None:
        whole = one.opcode == "constant" and re.fullmatch(r"-?\d+", one.arguments)
        return int(one.arguments) if whole else None

    def index(one: _Instruction) -> int | None:
        found = re.search(r"\bindex=(\d+)", one.rest) if one.opcode == "get-tuple-element" else None
        return int(found[1]) if found else None

    before, after, test = source(loop.operands[0], around), _root(body), _root(condition)
    if (before.opcode, after.opcode, test.opcode) != ("tuple", "tuple", "compare"):
        return None
    if "direction=LT" not in test.rest:
        return None
    left, right = (source(name, condition) for name in test.operands)
    counter, bound = index(left), value(right)
    if counter is None or bound is None:
        return None
    start, add = value(source(before.operands[counter], around)), source(after.operands[counter], body)
    terms = [source(name, body) for name in add.operands]
    step = sum(value(term) or 0 for term in terms)
    if start is None or add.opcode != "add" or counter not in map(index, terms) or step < 1:
        return None
    return max(0, math.ceil((bound - start) / step))
