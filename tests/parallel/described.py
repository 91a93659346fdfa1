"""Compiles steps for chips that are not there: python -m tests.parallel.described h100x8 encoder:fsdp ...

Prints a line of JSON for each. By itself, since described chips settle the platform of a process.
"""

import json
import sys
import time

from jaxdl.planning.topology import described_devices

PLANS = {
    "data": {},
    "fsdp": {"data": 1, "fsdp": -1},
    "zero1": {"zero1": True},
    "tensor 4": {"tensor": 4},
    "tensor 4, sequence": {"tensor": 4, "sequence": True},
    "fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2},
    "circular 2": {"pipeline": 2, "schedule": "circular", "microbatches": 2},
    "1f1b 2": {"pipeline": 2, "microbatches": 2},
    "local": {"backend": "shard_map", "batch_norm": "local"},
}
"""With the rest of the devices along `data`, but for `fsdp`."""
WIDTHS = {"encoder": 512, "resnet": 32}
BATCH = 128
MIB = 2**20


def programs(compiled):
    """What was compiled: one program, or those of stages."""
    if hasattr(compiled, "as_text"):
        return [compiled]
    parts = ("forward", "backward", "zeros", "finish", "propose")
    return [getattr(stage, part) for stage in compiled.stages for part in parts]


def report(devices, task, plan):
    from jaxdl.planning.batch_size import step_bytes
    from jaxdl.planning.communication import collectives, payload
    from tests.parallel import plans
    from tests.parallel.formulas import formula, ratios, too_much

    plans.BATCH = BATCH
    config = plans.configuration(**PLANS[plan])
    start = time.monotonic()
    run = plans.Run.of(task, config, devices=devices, width=WIDTHS[task])
    compiled = programs(run.compile())
    seconds = time.monotonic() - start
    found = [one for each in compiled for one in collectives(each.as_text())]
    formulated = len(compiled) == 1 and not (task == "resnet" and run.plan.mesh.shape["tensor"] > 1)
    return {
        "plan": f"{task}:{plan}",
        "devices": len(devices),
        "seconds": round(seconds, 1),
        "moved": {kind: round(size / MIB, 3) for kind, size in payload(found).items()},
        "ratios": ratios(found, formula(run, config)) if formulated else {},
        "too_much": too_much(found, formula(run, config)) if formulated else {},
        "peak": round(max(step_bytes(each.memory_analysis()) for each in compiled) / MIB, 1),
    }


if __name__ == "__main__":
    chips = described_devices(sys.argv[1])
    for argument in sys.argv[2:]:
        print(json.dumps(report(chips, *argument.split(":"))), flush=True)
