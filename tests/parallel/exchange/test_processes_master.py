"""A master and workers as real processes, each of which does what the test tells it, line by line."""

import signal
import time
from contextlib import closing
from threading import Thread

import numpy as np
import pytest

from jaxdl.errors import EXIT_LOST, ConfigError, LostProcessError
from jaxdl.parallel.exchange import wire
from jaxdl.parallel.exchange.master_process import MasterPeer, WorkerPeer
from jaxdl.parallel.exchange.peers import Post
from tests.parallel.exchange.test_processes_ring import free, programs

SIZE, PATIENCE, TIMEOUT = 1000, 3.0, 6.0

MASTER = f"""
import json, sys
import numpy as np
from jaxdl.parallel.exchange.master_process import MasterPeer

def state():
    entries = np.asarray(peer.weights["w"])
    return dict(vars(peer.counters), first=entries[:8].tolist(), finite=bool(np.isfinite(entries).all()),
                version=peer.version, workers=peer.workers)

def play():
    peer.round()

def serve(updates):
    peer.serve(updates)

peer = MasterPeer({{"w": np.zeros({SIZE}, np.float32)}}, patience={PATIENCE}, bound=1)
print(json.dumps(peer.address), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps((globals().get(name) or getattr(peer, name))(*arguments)), flush=True)
"""

WORKER = f"""
import json, sys
import numpy as np
from jaxdl.errors import JaxdlError
from jaxdl.parallel.exchange.master_process import WorkerPeer

def said(reply):
    return dict(first=np.asarray(reply.weights["w"])[:8].tolist(), version=reply.version, taken=reply.taken,
                ended=reply.ended)

def connect(address, name):
    global peer
    peer = WorkerPeer({{"w": np.zeros({SIZE}, np.float32)}}, address, name=name, timeout={TIMEOUT})

def join():
    return said(peer.join())

def exchange(entry, value, examples):
    delta = np.zeros({SIZE}, np.float32)
    delta[entry] = value
    return said(peer.exchange({{"w": delta}}, examples))

def state():
    return vars(peer.counters)

print(json.dumps(""), flush=True)
try:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps((globals().get(name) or getattr(peer, name))(*arguments)), flush=True)
except JaxdlError as error:
    print(f"error: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def gather(master, workers, address):
    for number, worker in enumerate(workers):
        worker.call("connect", address, f"number {number}")
        worker.ask("join")
    master.call("gather", len(workers))
    for worker in workers:
        assert worker.answer()["version"] == 0


@pytest.mark.slow
def test_a_worker_is_killed_in_the_second_round_and_the_master_later():
    with programs(MASTER, 1) as ((master,), (address,)), programs(WORKER, 4) as (everybody, _):
        *workers, late = everybody
        gather(master, workers, address)
        # The order in which workers come is that of their names only by chance, so all differ in an entry.
        master.ask("play")
        for number, worker in enumerate(workers):
            worker.ask("exchange", number, 6, number + 1)
        for worker in workers:
            said = worker.answer()
            assert (said["version"], said["taken"], said["ended"]) == (1, True, False)
            np.testing.assert_allclose(said["first"][:4], [6 * 1 / 6, 6 * 2 / 6, 6 * 3 / 6, 0], rtol=1e-6)
        master.answer()

        begun = time.monotonic()
        master.ask("play")
        workers[1].process.send_signal(signal.SIGKILL)
        workers[1].end()
        for number in (0, 2):
            workers[number].ask("exchange", 4 + number, 8, number + 1)
        late.call("connect", address, "the late one")
        late.ask("join")
        for number in (0, 2):
            said = workers[number].answer()
            # Divided by the four examples of those that answered.
            np.testing.assert_allclose(said["first"][4:7], [8 * 1 / 4, 0, 8 * 3 / 4], rtol=1e-6)
        master.answer()
        assert time.monotonic() - begun < PATIENCE + 3
        state = master.call("state")
        assert state["lost"] == ["number 1"]
        assert state["finite"]
        assert sorted(state["workers"]) == ["number 0", "number 2", "the late one"]

        assert late.answer()["version"] == 2
        living = [workers[0], workers[2], late]
        master.ask("play")
        for worker in living:
            worker.ask("exchange", 3, 3, 1)
        for worker in living:
            said = worker.answer()
            assert (said["version"], said["first"][3]) == (3, 3)
        master.answer()
        state = master.call("state")
        assert state["visits"] == 3
        counters = [worker.call("state") for worker in living]
        # Two rounds or three of an update and the weights, after the weights at the beginning.
        assert [counter["visits"] for counter in counters] == [3, 3, 1]
        for counter in counters:
            assert 0 < counter["bytes_sent"] - counter["visits"] * 4 * SIZE < 1500
            assert 0 < counter["bytes_received"] - (counter["visits"] + 1) * 4 * SIZE < 1500
        assert state["bytes_sent"] - state["messages_sent"] * 4 * SIZE < 300 * state["messages_sent"]

        for worker in living:
            worker.ask("exchange", 0, 1, 1)
        killed = time.monotonic()
        master.process.send_signal(signal.SIGKILL)
        master.end()
        for worker in living:
            code, errors = worker.end()
            assert code == EXIT_LOST
            assert f"error: the master at {address} has not answered within {TIMEOUT:g} s" in errors
            assert "Traceback" not in errors
        assert time.monotonic() - killed < TIMEOUT + 3


@pytest.mark.slow
def test_each_update_is_added_as_it_comes_and_a_stale_one_is_refused():
    with programs(MASTER, 1) as ((master,), (address,)), programs(WORKER, 3) as (workers, _):
        gather(master, workers, address)
        master.ask("serve", 4)
        for entry in (0, 1):
            assert workers[0].call("exchange", entry, 1, 1)["taken"]
        # Its weights lack two updates, and the bound is one: it is told, and has the newest now.
        said = workers[1].call("exchange", 2, 1, 1)
        assert (said["taken"], said["version"], said["first"][:4]) == (False, 2, [1, 1, 0, 0])
        said = workers[1].call("exchange", 3, 1, 1)
        assert (said["taken"], said["version"], said["first"][:4]) == (True, 3, [1, 1, 0, 1])
        # One behind is within the bound.
        assert workers[0].call("exchange", 4, 1, 1)["taken"]
        master.answer()
        state = master.call("state")
        assert state["first"] == [1, 1, 0, 1, 1, 0, 0, 0]
        assert (state["version"], state["visits"], state["refused"]) == (4, 4, 1)
        assert workers[1].call("state")["refused"] == 1
        master.call("finish")
        for worker in workers:
            said = worker.call("exchange", 5, 1, 1)
            assert (said["ended"], said["taken"], said["version"]) == (True, False, 4)
            assert said["first"] == state["first"]
            worker.call("close")
            assert worker.end() == (0, "")
        assert master.end() == (0, "")


WEIGHTS = {"w": np.zeros(3, np.float32)}


def test_the_update_of_one_that_was_too_slow_is_refused_and_it_is_in_the_next_round():
    with closing(MasterPeer(WEIGHTS, patience=0.3)) as master:
        quick = WorkerPeer(WEIGHTS, master.address, name="quick", timeout=5)
        slow = WorkerPeer(WEIGHTS, master.address, name="slow", timeout=5)
        with closing(quick), closing(slow):
            replies = {}

            def work():
                quick.join()
                for value in (1, 2):
                    replies[value] = quick.exchange({"w": np.full(3, value, np.float32)})

            def dawdle():
                slow.join()
                while 1 not in replies:
                    time.sleep(0.005)
                replies["late"] = slow.exchange({"w": np.full(3, 50, np.float32)})

            threads = [Thread(target=work), Thread(target=dawdle)]
            for thread in threads:
                thread.start()
            master.gather(2)
            assert master.round()["w"].tolist() == [1, 1, 1]
            assert master.counters.lost == ["slow"]
            # Its late update is refused in this round, or if it comes later still, while we gather.
            assert master.round()["w"].tolist() == [3, 3, 3]
            if "slow" not in master.workers:
                master.gather(2)
            for thread in threads:
                thread.join(10)
            assert not replies["late"].taken
            assert sorted(master.workers) == ["quick", "slow"]
            assert slow.counters.refused == 1
    assert free(master.address)


def test_nobody_waits_for_ever():
    with closing(MasterPeer(WEIGHTS, patience=0.2)) as master:
        with pytest.raises(LostProcessError, match=r"0 of 2 workers have come .* within 0\.2 s"):
            master.gather(2, seconds=0.2)
        with pytest.raises(LostProcessError, match="no worker answered within"):
            master.round()
        with pytest.raises(LostProcessError, match="no worker was heard within"):
            master.serve(1)
    with closing(WorkerPeer(WEIGHTS, master.address, name="7", timeout=0.2)) as worker:
        with pytest.raises(LostProcessError, match=r"has not answered within 0\.2 s; this is worker 7"):
            worker.join()
        assert 0.2 <= worker.counters.waited < 5


def alone(like, timeout, **options):
    """A worker's first words with a master."""
    with closing(MasterPeer(WEIGHTS, **options)) as master:
        thread = Thread(target=lambda: master.gather(1))
        thread.start()
        with closing(WorkerPeer(like, master.address, name="0", timeout=timeout)) as worker:
            try:
                worker.join()
            finally:
                thread.join(10)


def test_a_worker_that_waits_too_short_or_has_another_model_is_told_so():
    with pytest.raises(ConfigError, match="make the worker's timeout longer"):
        alone(WEIGHTS, timeout=5, patience=5)
    with pytest.raises(wire.WireError, match="the same model"):
        alone({"w": np.zeros(4, np.float32)}, timeout=5, patience=1)


def test_what_strangers_say_is_dropped_and_an_update_that_does_not_fit_is_refused():
    with (
        closing(MasterPeer(WEIGHTS, patience=5)) as master,
        closing(Post()) as stranger,
        closing(WorkerPeer(WEIGHTS, master.address, name="0", timeout=10)) as worker,
    ):
        replies = []

        def work():
            worker.join()
            replies.append(worker.exchange({"w": np.ones(2, np.float32)}))
            replies.append(worker.exchange({"w": np.ones(3, np.float32)}))

        stranger.send(master.address, [b"GET / HTTP/1.1"])
        stranger.send(master.address, [b""])
        thread = Thread(target=work)
        thread.start()
        master.gather(1)
        assert master.round()["w"].tolist() == [1, 1, 1]
        thread.join(10)
        assert [reply.taken for reply in replies] == [False, True]
        assert master.counters.refused == worker.counters.refused == 1


def test_an_address_that_is_taken_or_none_is_said():
    taken = pytest.raises(ConfigError, match="cannot listen at")
    with closing(MasterPeer(WEIGHTS)) as master, taken:
        MasterPeer(WEIGHTS, master.address)
    with pytest.raises(ConfigError, match="no address to listen at"):
        MasterPeer(WEIGHTS, "localhost")
