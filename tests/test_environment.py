import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxdl import environment
from jaxdl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, os, sys
from jaxdl import environment
print("start", file=sys.stderr)
environment.prepare("{allocator}")
assert "jax" not in sys.modules
keys = ("GLIBC_TUNABLES", "NPROC", "XLA_FLAGS")
print(json.dumps({{"argv": sys.argv[1:], "stdin": sys.stdin.read(), "pid": os.getpid(),
    "flags": sys.flags.optimize, "name": __name__, **{{k: os.environ.get(k) for k in keys}}}}))
"""


def start(tmp_path, *how, allocator="tuned", **variables):
    """Starts the program and gives (what it printed, how often it started)."""
    (tmp_path / "program.py").write_text(PROGRAM.format(allocator=allocator))
    hidden = (
        "GLIBC_TUNABLES",
        "NPROC",
        "XLA_FLAGS",
        "JAX_NUM_CPU_DEVICES",
        "JAX_PLATFORMS",
        "JAXDL_RESTARTED",
    )
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    env |= {"PYTHONPATH": f"{ROOT}:{tmp_path}", "JAX_PLATFORMS": "cpu", **variables}
    with subprocess.Popen(
        [sys.executable, *how],
        env={k: v for k, v in env.items() if v is not None},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate("typed in", timeout=60)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert answer["pid"] == process.pid
    return answer, err.count("start")


needs_glibc = pytest.mark.skipif(not environment._has_glibc(), reason="needs Linux with glibc")


@needs_glibc
@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"], ["-O", "./program.py"]])
def test_tuned_restarts_once_and_keeps_the_command_line(tmp_path, how):
    arguments = ["--a", "b c", ""]
    answer, starts = start(tmp_path, *how, *arguments)
    assert starts == 2
    assert answer["argv"] == arguments
    assert answer["stdin"] == "typed in"
    assert answer["flags"] == ("-O" in how)
    assert answer["name"] == "__main__"
    assert "glibc.malloc.mmap_max=0" in answer["GLIBC_TUNABLES"].split(":")


@needs_glibc
def test_tunables_of_the_user_are_kept(tmp_path):
    given = "glibc.malloc.arena_max=4:glibc.malloc.perturb=0"
    answer, starts = start(tmp_path, "program.py", GLIBC_TUNABLES=given)
    assert starts == 2
    tunables = answer["GLIBC_TUNABLES"].split(":")
    assert {*given.split(":"), "glibc.malloc.hugetlb=1"} <= set(tunables)
    assert len(tunables) == len(environment.TUNABLES) + 1


def test_nothing_to_do_where_the_tunables_are_set_already(tmp_path):
    given = ":".join(f"{k}={v}" for k, v in environment.TUNABLES.items())
    assert start(tmp_path, "program.py", GLIBC_TUNABLES=given)[1] == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"allocator": "default"},
        {"JAX_PLATFORMS": "cuda"},
        {"JAX_PLATFORMS": "tpu,cpu"},
        {"JAXDL_RESTARTED": "1"},
    ],
)
def test_default_and_accelerators_leave_the_process_as_it_is(tmp_path, variables):
    answer, starts = start(tmp_path, "program.py", **variables)
    assert starts == 1
    assert answer["GLIBC_TUNABLES"] is None
    assert answer["NPROC"] is None


def test_compiler_flags_are_added_for_the_cpu_only_and_once(monkeypatch):
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda _: "0.10.2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    environment.prepare("default")
    environment.prepare("default")
    assert os.environ["XLA_FLAGS"] == "--a=1 --xla_cpu_experimental_ynn_fusion_type=-individual_convolution"

    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=reduce")
    environment.prepare("default")
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_experimental_ynn_fusion_type=reduce"

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    environment.prepare("default")
    assert os.environ["XLA_FLAGS"] == ""

    monkeypatch.setattr(environment.importlib.metadata, "version", lambda _: "0.11.0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    environment.prepare("default")
    assert os.environ["XLA_FLAGS"] == ""


def test_the_installed_xla_knows_the_flags():
    code = (
        "from jaxdl import environment; environment.prepare('default')\n"
        "import jax; print(jax.numpy.ones(3).sum())"
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "3.0\n", ran.stderr


@pytest.mark.parametrize(("lacking", "platform"), [(True, "cpu"), (False, None)])
def test_a_plugin_counts_only_where_there_is_a_device_for_it(monkeypatch, lacking, platform):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(environment, "_has_plugin", lambda: True)
    monkeypatch.setattr(environment, "_lacks_devices", lambda: lacking)
    environment.prepare("default")
    assert os.environ.get("JAX_PLATFORMS") == platform
    assert environment._computes_on_cpu() == lacking


def test_without_a_plugin_the_platform_is_left_to_jax(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(environment, "_has_plugin", lambda: False)
    environment.prepare("default")
    assert "JAX_PLATFORMS" not in os.environ
    assert environment._computes_on_cpu()


def test_program_from_standard_input_is_not_restarted(tmp_path):
    code = "from jaxdl import environment; environment.prepare('tuned'); print('ran')"
    ran = subprocess.run(
        [sys.executable, "-"],
        input=code,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "ran\n"


def test_no_restart_once_jax_is_imported(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    environment.prepare("tuned")  # would restart pytest


@needs_glibc
def test_signals_act_after_the_restart(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nfrom jaxdl import environment\nenvironment.prepare('tuned')\n"
        "print('ready', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(75)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen([sys.executable, str(program)], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 75


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"JAX_NUM_CPU_DEVICES": "8"}, "16"),
        ({"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=6"}, "12"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=6", "JAX_NUM_CPU_DEVICES": "20"}, "40"),
        ({"JAX_NUM_CPU_DEVICES": "8", "NPROC": "3"}, "16"),
        ({"JAX_NUM_CPU_DEVICES": "8", "NPROC": "99"}, "99"),
        ({"JAX_NUM_CPU_DEVICES": "1"}, None),
        ({}, None),
    ],
)
def test_simulated_devices_get_threads(monkeypatch, variables, threads):
    for name in ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # so that no compiler flags are added to this process
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment.prepare("default")
    assert os.environ.get("NPROC") == threads


@pytest.mark.parametrize("text", ["many", "", "0", "-2", "1.5"])
def test_a_number_of_devices_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", text)
    with pytest.raises(ConfigError, match=f"JAX_NUM_CPU_DEVICES: '{text}' is not"):
        environment.prepare("default")


@pytest.fixture
def cache_setting():
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("cache_setting")
def test_cache_directory(tmp_path, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.compilation_cache() == tmp_path / "jaxdl" / "xla"
    assert (tmp_path / "jaxdl" / "xla").is_dir()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxdl" / "xla")

    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "set"))  # as JAX_COMPILATION_CACHE_DIR does
    assert environment.compilation_cache() == tmp_path / "set"
    assert environment.compilation_cache(tmp_path / "given") == tmp_path / "given"


@pytest.mark.usefixtures("cache_setting")
def test_unwritable_cache_warns_and_goes_on(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert environment.compilation_cache(tmp_path / "file" / "cache") is None
    assert "no compilation cache" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None
