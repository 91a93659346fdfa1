"""Measures a training step against PyTorch's on this machine's CPU.

    python -m experiments.benchmark resnet50|bert [--batch_sizes 8 32] [--repeats 5] [--json FILE]
    python -m experiments.benchmark input --help

The last one is about reading images, see experiments/benchmark_input.py.

A step is forward, backward and an update, all in float32: of ResNet-50 with SGD, momentum and weight decay on
softmax cross-entropy over 1,000 classes; or of BERT-Base with AdamW on hidden words, with dropout,
against the network of the `transformers` library. Each contender is a process of its own. All stay alive
and take turns, step by step, while the others sleep, so that what else happens on the machine meets them
alike.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from experiments import benchmark_input
from experiments.benchmark_steps import Step
from jaxdl import environment
from jaxdl.commandline.programs import Parser, leave_after, refuse_no_file, table, whole_number
from jaxdl.errors import ConfigError, JaxdlError

# Neither jax nor torch is imported here: the workers do that, and this process takes no core from them.

BENCHMARKS = {
    "resnet50": ("experiments.benchmark_resnet50", ("torch",)),
    "bert": ("experiments.benchmark_bert", ("torch", "transformers")),
}
"""The module with each one's contenders, and what has to be installed besides."""
SIZES = {"resnet50": 224, "bert": 128}
"""Height and width of images, in pixels, and length of sequences, in words."""
BATCH_SIZES = {"resnet50": [8, 32], "bert": [8]}

PYTORCH, PYTORCH_TUNED, JAXDL, JAXDL_LAX = "pytorch", "pytorch, same allocator", "jaxdl", "jaxdl, lax"


@dataclass(frozen=True)
class Job:
    """What a worker measures.

    Attributes:
        benchmark: one of `BENCHMARKS`.
        contender: name of a contender.
        batch_size: examples a step.
        size: of an example, as in `SIZES`.
        threads: threads that PyTorch computes with; XLA takes all cores.
        warmup: steps before those that count.
    """

    benchmark: str
    contender: str
    batch_size: int
    size: int
    threads: int
    warmup: int = 2


def main() -> None:
    """Runs a benchmark, or one of its workers."""
    if sys.argv[1:2] == ["input"]:
        benchmark_input.main(sys.argv[2:])
        return
    parser = Parser("python -m experiments.benchmark", __doc__)
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="what to measure")
    parser.add_argument("--batch_sizes", type=whole_number(1), nargs="+", metavar="N",
                        help="examples a step, one table each (default: 8 32, of bert 8)")  # fmt: skip
    parser.add_argument("--image_size", type=whole_number(1), metavar="N",
                        help="resnet50: height and width of the images (default: 224)")  # fmt: skip
    parser.add_argument("--length", type=whole_number(1), metavar="N",
                        help="bert: words in a sequence (default: 128)")  # fmt: skip
    parser.add_argument("--repeats", type=whole_number(1), default=5, metavar="N",
                        help="steps of each contender that count (default: %(default)s)")  # fmt: skip
    parser.add_argument("--lax", action="store_true", help="measure jaxdl with XLA's own convolution too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single figure there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Job(**json.loads(arguments.worker)))
    benchmark(arguments)


def benchmark(arguments: argparse.Namespace) -> None:
    """Measures each batch size in turn, with fresh processes, and prints a table for each.

    Args:
        arguments: those of the command line.

    Raises:
        ConfigError: something is missing for the whole of it.
        JaxdlError: a worker died.
    """
    missing = [name for name in BENCHMARKS[arguments.benchmark][1] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed, so there is nothing to measure against: "
                          "install the extra `bench`, as by pip install -e '.[bench]'.")  # fmt: skip
    images = arguments.benchmark == "resnet50"
    if (arguments.length if images else arguments.image_size) is not None:
        option = "length" if images else "image_size"
        raise ConfigError(f"--{option} has no meaning for {arguments.benchmark}: leave it out.")
    size = (arguments.image_size if images else arguments.length) or SIZES[arguments.benchmark]
    if images and size < 32:
        raise ConfigError(f"--image_size {size} is too small for this network: take 32 or more.")
    if arguments.lax and not images:
        raise ConfigError("--lax is about convolutions, which bert has not: leave it out.")
    path: Path | None = arguments.json
    if path is not None:
        refuse_no_file(path)
    contenders = [PYTORCH, PYTORCH_TUNED, JAXDL] + [JAXDL_LAX] * arguments.lax
    threads = cores()
    report = {
        "benchmark": arguments.benchmark,
        "size": size,
        "repeats": arguments.repeats,
        "cpu": cpu_model(),
        "threads": threads,
        "platform": platform.platform(),
        "versions": versions(),
        "results": [],
    }
    found = ", ".join(f"{name} {text}" for name, text in versions().items())
    shown = f"{size}x{size}" if images else f"{size} words"
    print(f"{arguments.benchmark}, {shown}, float32, {threads} threads of {cpu_model()}; {found}")
    for batch_size in arguments.batch_sizes or BATCH_SIZES[arguments.benchmark]:
        jobs = [Job(arguments.benchmark, name, batch_size, size, threads) for name in contenders]
        measured = measure(jobs, arguments.repeats)
        report["results"].append({"batch_size": batch_size, "contenders": measured})
        print(f"\nbatch {batch_size}\n" + figures(measured), flush=True)
        if path is not None:
            path.write_text(json.dumps(report, indent=2) + "\n")


def measure(jobs: list[Job], repeats: int) -> dict[str, dict[str, Any]]:
    """Lets the contenders take turns.

    Args:
        jobs: one a contender.
        repeats: rounds.

    Returns:
        For each contender `seconds` of every step, `examples_per_second` (of the median step) and what its
        worker tells: see `work`.
    """
    with contextlib.ExitStack() as stack:
        workers = []
        for job in jobs:
            say(f"batch {job.batch_size}: {job.contender}: building, compiling, warming up ...")
            began = time.monotonic()
            worker = stack.enter_context(Worker(job))
            worker.ask("start")
            if worker.ask("report")["cached"] is False:
                # It computes up to 15% slower in a heap in which the compiler has worked, and its peak memory
                # may be the compiler's. Every run but the first finds the program in the cache: measure that.
                worker.end()
                worker = stack.enter_context(Worker(job))
                worker.ask("start")
            workers.append(worker)
            say(f"batch {job.batch_size}: {job.contender}: ready after {time.monotonic() - began:.0f} s")
        seconds: dict[str, list[float]] = {job.contender: [] for job in jobs}
        for turn in range(repeats):
            for worker in workers:
                seconds[worker.job.contender].append(worker.ask("step")["seconds"])
            rates = (f"{name} {jobs[0].batch_size / each[-1]:.2f}" for name, each in seconds.items())
            say(f"batch {jobs[0].batch_size}: round {turn + 1}/{repeats}, examples/s: {'; '.join(rates)}")
        return {
            worker.job.contender: {
                "examples_per_second": worker.job.batch_size
                / statistics.median(seconds[worker.job.contender]),
                "seconds": seconds[worker.job.contender],
                **worker.ask("report"),
            }
            for worker in workers
        }


class Worker:
    """A contender in a process of its own; leaving the `with` block ends it.

    It answers each line on its standard input with a line of JSON, and ends by itself with its input, should
    this process be killed.

    Attributes:
        job: what it measures.
    """

    job: Job

    def __init__(self, job: Job) -> None:
        self.job = job
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "experiments.benchmark",
                job.benchmark,
                "--worker",
                json.dumps(asdict(job)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C comes to this process only, which ends the others
        )

    def ask(self, request: str) -> dict[str, Any]:
        """Sends a line and returns the answer.

        Raises:
            JaxdlError: the worker died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise JaxdlError(self._obituary())
        values: dict[str, Any] = json.loads(answer)
        return values

    def _obituary(self) -> str:
        code = self._process.wait()
        text = f"{self.job.contender} at batch {self.job.batch_size} ended before its time "
        if code == -signal.SIGKILL:
            text += "by SIGKILL, most likely because the memory is used up: try smaller --batch_sizes"
        else:
            text += f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._errors.seek(0)
        tail = self._errors.read().strip().splitlines()[-15:]
        return "\n".join(
            [text + (". The last that it said:" if tail else "."), *(f"  {line}" for line in tail)]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the worker; once more does nothing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


def worker_environment() -> dict[str, str]:
    """One CPU device, all cores and only those allocator settings that a worker chooses itself."""
    foreign = ("GLIBC_TUNABLES", "JAXDL_RESTARTED", "NPROC", "OMP_NUM_THREADS", "XLA_FLAGS")
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    return inherited | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def work(job: Job) -> NoReturn:
    """Is a worker: builds its network and answers requests until its input ends.

    `start` builds and warms up; `step` answers with the `seconds` of one step; `report` with
    `peak_memory_mib` of the process, `parameters`, the last step's `loss`, `compile_seconds` and whether the
    program was `cached` (both None for PyTorch), and the `tunables` of the allocator.
    """
    if job.contender != PYTORCH:
        environment.prepare("tuned")
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    step: Step | None = None
    facts: dict[str, Any] = {}
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line == "start\n":
            contenders = importlib.import_module(BENCHMARKS[job.benchmark][0])
            if job.contender in (PYTORCH, PYTORCH_TUNED):
                import torch

                torch.manual_seed(0)
                torch.set_num_threads(job.threads)
                step, facts = contenders.pytorch_step(job)
            else:
                step, facts = contenders.jaxdl_step(job)
            for _ in range(job.warmup):
                facts["loss"] = step()
        elif line == "step\n":
            assert step is not None
            began = time.perf_counter()
            facts["loss"] = step()
            answer = {"seconds": time.perf_counter() - began}
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            mebibyte = (
                2**20 if sys.platform == "darwin" else 2**10
            )  # counted in bytes there, in KiB elsewhere
            answer = {
                **facts,
                "peak_memory_mib": peak / mebibyte,
                "tunables": os.environ.get("GLIBC_TUNABLES", ""),
            }
        print(json.dumps(answer), file=answers, flush=True)
    sys.exit()


def figures(measured: dict[str, dict[str, Any]]) -> str:
    """Lays one batch size's figures out as text."""
    head = ["", "examples/s", "x pytorch", "x same alloc.", "min-max", "peak MiB", "compile s"]
    rows = []
    for name, values in measured.items():
        rate, compiled = values["examples_per_second"], values["compile_seconds"]
        # Every step is of the same number of examples, and the fastest step is the highest rate.
        examples = rate * statistics.median(values["seconds"])
        rows.append(
            [
                name,
                f"{rate:.2f}",
                f"{rate / measured[PYTORCH]['examples_per_second']:.2f}",
                f"{rate / measured[PYTORCH_TUNED]['examples_per_second']:.2f}",
                f"{examples / max(values['seconds']):.2f}-{examples / min(values['seconds']):.2f}",
                f"{values['peak_memory_mib']:,.0f}",
                "-" if compiled is None else f"{compiled:.1f}{' (cached)' if values['cached'] else ''}",
            ]
        )
    text = table(head, rows)
    if any(values["cached"] is False for values in measured.values()):
        text += "\nThe peak memory of what was compiled anew may be the compiler's: run again."
    return text


def versions() -> dict[str, str]:
    """Versions of what is compared."""
    packages = ("torch", "transformers", "jax", "jaxlib", "flax", "optax", "numpy", "jaxdl")
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"python": platform.python_version()}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def say(text: str) -> None:
    """Tells how far it is; the results go to the standard output."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave_after(main)
