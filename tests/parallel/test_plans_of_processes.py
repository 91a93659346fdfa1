"""Two processes of four devices give the numbers of one device, under every kind of plan."""

import json

import jax
import numpy as np
import pytest

from tests.parallel.plans import configuration, sequential, trained
from tests.parallel.processes import started
from tests.parallel.test_plans import assert_near

ENCODER = {
    "data": {},
    "node x fsdp": {"node": 2, "fsdp": 4},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"tensor": 4},
    "tensor over both": {"data": 1, "fsdp": 2, "tensor": 4},
    "circular over both": {"data": 4, "pipeline": 2, "schedule": "circular", "microbatches": 2},
    "circular x tensor": {"pipeline": 2, "data": 2, "tensor": 2, "schedule": "circular", "microbatches": 2},
    "shard_map": {"backend": "shard_map"},
}
RESNET = {
    "data": {},
    "zero1": {"zero1": True},
    "shard_map, local": {"backend": "shard_map", "batch_norm": "local"},
}
BODY = """
        import json, os
        from tests.parallel.plans import configuration, trained
        for number, (task, settings) in enumerate(json.loads(CASES)):
            first, losses, last = trained(task, configuration(**settings))
            if processes.speaks():
                leaves = {f"first{i}": x for i, x in enumerate(jax.tree.leaves(first))}
                leaves |= {f"last{i}": x for i, x in enumerate(jax.tree.leaves(last))}
                np.savez(os.path.join(TO, str(number)), losses=losses, **leaves)
"""


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one_device(tmp_path):
    cases = [
        *(("encoder", plan) for plan in ENCODER.values()),
        *(("resnet", plan) for plan in RESNET.values()),
    ]
    body = BODY.replace("CASES", repr(json.dumps(cases))).replace("TO", repr(str(tmp_path)))
    with started(tmp_path, body, body, devices=4) as run:
        for index in range(2):
            code, _ = run.end(index, timeout=900)
            assert code == 0, run.text(index)[-3000:]
    for number, (task, settings) in enumerate(cases):
        first, losses, last = trained(task, sequential(configuration(**settings)))
        found = np.load(tmp_path / f"{number}.npz")
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5, atol=1e-5, err_msg=str(settings))
        for i, leaf in enumerate(jax.tree.leaves(first)):
            np.testing.assert_array_equal(found[f"first{i}"], leaf)
        leaves = jax.tree.leaves(last)
        assert_near([found[f"last{i}"] for i in range(len(leaves))], leaves)
