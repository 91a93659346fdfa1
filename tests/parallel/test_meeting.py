"""How processes learn their place, and what becomes of wrong ones."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxdl.config import ParallelConfig
from jaxdl.errors import ConfigError
from jaxdl.parallel import processes
from jaxdl.parallel.processes.meeting import free_port, meet
from tests.conftest import ROOT
from tests.parallel.processes import PREPARE, variables


def refusal(**other: str) -> tuple[int, str]:
    script = PREPARE.replace("60.0", "2.0").replace("BODY", "pass")
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | variables(1, free_port()) | other,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_a_coordinator_that_is_not_there_is_refused():
    code, text = refusal()
    assert code == 2, text[-500:]
    assert re.fullmatch(r"error: process 1 could not reach process 0 at localhost:\d+ .*\n", text), text


@pytest.mark.slow
def test_missing_processes_are_named():
    code, text = refusal(JAX_PROCESS_ID="0", JAX_NUM_PROCESSES="3")
    assert code == 2, text[-500:]
    assert re.fullmatch(r"error: 3 processes .* process 1 and 2 had not come.*\n", text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"JAX_PROCESS_ID": "1"}, "more than one process was told to be process 1"),
        ({"JAX_NUM_PROCESSES": "4"}, "process 2 was told of 4 processes, but process 0 of 3"),
    ],
)
def test_processes_that_disagree_are_refused(tmp_path, other, message):
    port = free_port()
    places = [variables(index, port, 3) for index in range(3)]
    places[2] |= other
    command = [sys.executable, "-c", PREPARE.replace("60.0", "20.0").replace("BODY", "pass")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = [subprocess.Popen(command, cwd=ROOT, env=os.environ | place, **pipes) for place in places]
    for process in run:
        text = process.communicate(timeout=120)[1]
        assert process.returncode == 2, text[-500:]
        assert text.count("\n") == 1, text[-500:]
    assert text.startswith(f"error: {message}: give all"), text[-500:]


def test_slurm_counts_only_where_it_is_asked_for(monkeypatch):
    for name in processes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node1,node2", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert processes._place(ParallelConfig())[1] == 1
    found = "node1:61447", 2, 1, [0]
    assert processes._place(ParallelConfig(cluster="slurm")) == found
    assert processes._place(ParallelConfig(cluster="auto")) == found


@pytest.mark.parametrize("cluster", ["auto", "slurm", "ompi"])
def test_a_cluster_without_traces_is_refused(cluster):
    with pytest.raises(ConfigError, match=f"parallel.cluster {cluster}: nothing"):
        processes.start(ParallelConfig(cluster=cluster))


def test_places_by_hand_precede_the_environment(monkeypatch):
    for name, value in variables(1, 1234).items():
        monkeypatch.setenv(name, value)
    by_hand = ParallelConfig(coordinator="node1:99", processes=3, process=2)
    assert processes._place(by_hand) == ("node1:99", 3, 2, None)
    assert processes._place(ParallelConfig()) == ("localhost:1234", 2, 1, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("PROCESS_ID", ""), ("NUM_PROCESSES", "x"), ("PROCESS_ID", "2")],
)
def test_incomplete_variables_are_refused(monkeypatch, name, value):
    for given in variables(1, 1234).items():
        monkeypatch.setenv(*given)
    monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(ConfigError, match="set all three"):
        processes.start(ParallelConfig())


@pytest.mark.parametrize("address", ["node1", ":80", "node1:x", "node1:70000"])
def test_a_wrong_address_is_refused(address):
    with pytest.raises(ConfigError, match="is no address"):
        processes.start(ParallelConfig(coordinator=address, processes=2, process=1))


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="take another port"):
            meet(address, 2, 0, 1)


def test_a_process_that_is_started_once_more_is_no_second_one():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        host = pool.submit(meet, address, 3, 0, 20)
        gone = pool.submit(connect, address, b"jaxdl 1 3\n")
        gone.result().close()
        others = [pool.submit(meet, address, 3, process, 20) for process in (1, 2)]
        for each in (host, *others):
            assert each.result(timeout=60).startswith("127.0.0.1:")


def test_who_is_no_process_of_a_run_is_not_taken_for_one():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        host = pool.submit(meet, address, 2, 0, 20)
        with connect(address, b"GET / HTTP/1.1\n"):
            assert meet(address, 2, 1, 20).startswith("127.0.0.1:")
        assert host.result(timeout=60).startswith("127.0.0.1:")


def connect(address: str, greeting: bytes) -> socket.socket:
    host, _, port = address.partition(":")
    for _ in range(400):
        try:
            connection = socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            connection.sendall(greeting)
            return connection
    raise AssertionError("nobody listens")


def test_something_else_at_the_address_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        guest = pool.submit(meet, address, 2, 1, 20)
        connection, _ = server.accept()
        connection.sendall(b"220 mail\n")
        connection.close()
        with pytest.raises(ConfigError, match="is not process 0 of this run"):
            guest.result(timeout=60)
