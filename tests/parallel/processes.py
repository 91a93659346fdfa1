"""Starts small scripts as the processes of one run."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdl.parallel.processes.meeting import free_port
from tests.conftest import ROOT

PREPARE = """
import sys, time
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxdl.commandline.programs import leave_after
from jaxdl.config import ParallelConfig
from jaxdl.errors import DataError
from jaxdl.parallel import processes

processes.MEETING_SECONDS = 60.0

def total():
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    ones = np.ones(jax.device_count(), np.float32)
    split = NamedSharding(mesh, PartitionSpec("all"))
    x = jax.make_array_from_callback(ones.shape, split, lambda index: ones[index])
    return float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x))

def run():
    config = ParallelConfig(timeout=5)
    processes.start(config)
    with processes.Watchdog(config) as watchdog:
        BODY

leave_after(run)
"""
ALONE = """
        for step in range(600):
            watchdog.beat(step)
            print(step, flush=True)
            time.sleep(0.1)
"""
TOGETHER = """
        for step in range(600):
            with processes.lost_processes():
                total()
            watchdog.beat(step)
            print(step, flush=True)
            time.sleep(0.1)
"""


def variables(process: int, port: int, count: int = 2, devices: int = 1) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "NPROC": "8",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(process),
    }


class Run:
    """Processes of one run; what they print goes to files, so that no pipe fills up."""

    def __init__(self, directory: Path, *bodies: str, devices: int = 1) -> None:
        port = free_port()
        self.outputs = [directory / f"{index}" for index in range(len(bodies))]
        self.all = []
        for index, (body, output) in enumerate(zip(bodies, self.outputs, strict=True)):
            with output.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, "-c", PREPARE.replace("BODY", body.strip())],
                    cwd=ROOT,
                    env=os.environ | variables(index, port, len(bodies), devices),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.all.append(process)

    def text(self, index: int) -> str:
        return self.outputs[index].read_text()

    def until_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not all(re.search(rf"^{step}$", self.text(index), re.M) for index in range(len(self.all))):
            assert time.monotonic() < deadline, self.text(0)[-500:] + self.text(1)[-500:]
            assert all(process.poll() is None for process in self.all), self.text(0)[-500:]
            time.sleep(0.05)

    def end(self, index: int, timeout: float = 60) -> tuple[int, str]:
        """The exit code, and the error that was printed, or else the last line.

        Another thread may print a line between an error and the end.
        """
        code = self.all[index].wait(timeout)
        lines = self.text(index).strip().splitlines() or [""]
        return code, next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])


@contextmanager
def started(directory: Path, *bodies: str, devices: int = 1) -> Iterator[Run]:
    run = Run(directory, *bodies, devices=devices)
    try:
        yield run
    finally:
        for process in run.all:
            process.kill()
            process.wait()
