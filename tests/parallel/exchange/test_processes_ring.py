"""A ring of real processes: each is a small program that does what the test tells it, line by line.

Update `k` adds one to entry `k`, so weights say what is in them and how often.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdl.errors import LostProcessError
from jaxdl.parallel.exchange.ring_process import Label, RingPeer
from jaxdl.parallel.exchange.wire import WireError
from tests.conftest import ROOT

SIZE, PATIENCE, TIMEOUT = 10_000, 1.0, 2.0
MOST = 40
WAIT = 30.0
"""Seconds after which a test gives up; the machine may be busy."""

MEMBER = f"""
import json, sys, time
import numpy as np
from jaxdl.parallel.exchange.ring_process import RingPeer

trace = []

class Traced(RingPeer):
    def _visited(self, label, weights):
        trace.append(label.hops)
        super()._visited(label, weights)

def state():
    entries = np.asarray(peer.weights["w"])
    counters = vars(peer.counters)
    return dict(counters, contents=np.flatnonzero(entries).tolist(), most=float(entries.max()),
                finite=bool(np.isfinite(entries).all()), version=peer.label.version,
                order=peer.label.order, generation=peer.label.generation, number=peer.number,
                holds=peer._held is not None, trace=trace)

def learn(entry):
    delta = np.zeros({SIZE}, np.float32)
    delta[entry] = 1
    peer.learn({{"w": delta}})

def rest(seconds):
    peer._rest, peer._ready = seconds, 0.0

peer = Traced({{"w": np.zeros({SIZE}, np.float32)}}, patience={PATIENCE}, timeout={TIMEOUT}, rest=0.005)
print(json.dumps(peer.address), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    function = globals().get(name) or getattr(peer, name)
    print(json.dumps(function(*arguments)), flush=True)
"""


class Program:
    """A process that is told what to call, one call after another."""

    def __init__(self, text, *arguments):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": "2"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, name, *arguments):
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        assert self.selector.select(WAIT), "no answer"
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()[-2000:]
        return json.loads(line)

    def call(self, name, *arguments):
        self.ask(name, *arguments)
        return self.answer()

    def until(self, condition):
        deadline = time.monotonic() + WAIT
        while not condition(state := self.call("state")):
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
        return state

    def end(self):
        """The exit code, and what was said of errors."""
        _, errors = self.process.communicate(timeout=WAIT)
        return self.process.returncode, errors


@contextmanager
def programs(text, count, *arguments):
    """Programs, all started at once, and their addresses; ended whatever happens, with no port left bound."""
    begun = [Program(text, *arguments) for _ in range(count)]
    addresses = []
    try:
        addresses.extend(program.answer() for program in begun)
        yield begun, addresses
    finally:
        for program in begun:
            program.process.kill()
            program.process.communicate()
            program.selector.close()
    for address in filter(None, addresses):
        assert free(address)


def free(address):
    host, port = address.split(":")
    with closing(socket.socket()) as probe:
        return probe.connect_ex((host, int(port))) != 0


def start(members, addresses):
    for number in reversed(range(len(members))):
        members[number].ask("start", number, addresses)
    for member in members:
        member.answer()


def leave(members):
    """All leave, one after another; the last has the weights of all."""
    for member in members:
        member.ask("leave")
    for member in members:
        member.answer()
    states = [member.call("state") for member in members]
    for member in members:
        assert member.end() == (0, ""), "left"
    return max(states, key=lambda state: state["version"])


@pytest.mark.slow
def test_every_update_is_applied_once_and_the_token_goes_round_in_order():
    with programs(MEMBER, 4) as (members, addresses):
        start(members, addresses)
        for entry in range(40):
            members[entry % 4].call("learn", entry)
        for member in members:
            state = member.until(lambda state: state["version"] == 40)
            assert state["contents"] == list(range(40))
            assert state["most"] == 1
            assert state["order"] == [0, 1, 2, 3]
        # The token rests with member 0: all is still, and can be counted.
        members[0].call("rest", 1000)
        members[0].until(lambda state: state["holds"])
        states = [member.call("state") for member in members]
        visits = sorted((hop, number) for number, state in enumerate(states) for hop in state["trace"])
        assert visits == [(hop, hop % 4) for hop in range(len(visits))]
        sent, received = ([state[f"bytes_{way}"] for state in states] for way in ("sent", "received"))
        assert sum(sent) == sum(received)
        for state in states:
            # A hop is a token and a word of thanks; at the beginning there were a question and an answer.
            per_hop = state["bytes_sent"] / state["visits"]
            assert 4 * SIZE < per_hop < 4 * SIZE + 1000
            assert state["waited"] < 1
            assert not state["lost"]
        members[0].call("rest", 0)
        members[3].call("learn", 50)
        assert leave(members)["contents"] == [*range(40), 50]


@pytest.mark.slow
@pytest.mark.parametrize("holds", [False, True], ids=["without the token", "with the token"])
def test_the_others_go_on_where_one_is_killed_and_another_joins(holds):
    with programs(MEMBER, 5) as (everybody, addresses):
        *members, late = everybody
        start(members, addresses[:4])
        for entry in range(20):
            members[entry % 4].call("learn", entry)
        for member in members:
            member.until(lambda state: state["version"] == 20)
        resting = 2 if holds else 0
        members[resting].call("rest", 1000)
        members[resting].until(lambda state: state["holds"])
        for entry in range(20, 40):
            members[entry % 4].call("learn", entry)
        living = [members[number] for number in (0, 1, 3)]
        generation = members[0].call("state")["generation"]
        killed = time.monotonic()
        members[2].process.send_signal(signal.SIGKILL)
        members[2].end()
        if not holds:
            members[0].call("rest", 0.005)
        theirs = set(range(40)) - set(range(22, 40, 4))
        for member in living:
            state = member.until(lambda state: theirs <= set(state["contents"]) and state["version"] >= 35)
            assert state["order"] == [0, 1, 3]
            assert state["finite"]
            assert state["most"] == 1
            assert state["generation"] > generation
        assert time.monotonic() - killed < TIMEOUT + 2 * PATIENCE + 3, "that took too long"
        assert [lost for member in living for lost in member.call("state")["lost"]] == ["2"]
        # What the dead one had gathered since the token was there is lost; no more.
        assert set(state["contents"]) == theirs
        late.call("join", [addresses[2], addresses[1]])
        state = late.call("state")
        assert state["contents"] == sorted(theirs)
        assert (state["number"], state["order"]) == (4, [0, 1, 4, 3])
        late.call("learn", 60)
        for member in (*living, late):
            member.until(lambda state: 60 in state["contents"] and state["version"] == 36)
        final = leave_with_warnings([*living, late])
        assert set(final["contents"]) == {*theirs, 60}
        assert final["most"] == 1


def leave_with_warnings(members):
    """As `leave`, where it was said that one was lost."""
    for member in members:
        member.ask("leave")
    for member in members:
        member.answer()
    states = [member.call("state") for member in members]
    errors = ""
    for member in members:
        code, said = member.end()
        assert code == 0
        errors += said
    assert "member 2" in errors
    assert "Traceback" not in errors
    return max(states, key=lambda state: state["version"])


@pytest.mark.slow
def test_one_that_was_only_stopped_comes_back_with_nothing_lost_and_nothing_twice():
    """The others take it for lost; it wakes with an old token, perhaps, and adds what it has to that one."""
    with programs(MEMBER, 3) as (members, addresses):
        start(members, addresses)
        for entry in range(30):
            if entry == 15:
                # Before its first token it would be patient: all may be starting still.
                members[2].until(lambda state: state["visits"])
                members[2].process.send_signal(signal.SIGSTOP)
                members[0].until(lambda state: state["order"] == [0, 1])
            if entry < 15 or entry % 3 != 2:
                members[entry % 3].call("learn", entry)
        members[2].process.send_signal(signal.SIGCONT)
        members[2].call("learn", 40)
        expected = {*range(15), *(entry for entry in range(15, 30) if entry % 3 != 2), 40}
        for member in members:
            state = member.until(lambda state: state["version"] == len(expected))
            assert set(state["contents"]) == expected
            assert state["most"] == 1
            assert sorted(state["order"]) == [0, 1, 2]
        assert set(leave_with_warnings(members)["contents"]) == expected


@contextmanager
def ring_of(count, weights, **options):
    """Members within this process: as good as several where nobody dies."""
    options = {"patience": 0.3, "timeout": 0.6, "rest": 0.002} | options
    peers = [RingPeer(weights, **options) for _ in range(count)]
    try:
        for number in reversed(range(count)):
            peers[number].start(number, [peer.address for peer in peers])
        yield peers
    finally:
        for peer in peers:
            peer.close()
        assert all(free(peer.address) for peer in peers)


def until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_ring_of_one_is_plain_training_bit_for_bit():
    rng = np.random.default_rng(0)
    plain = jnp.asarray(rng.normal(size=50), jnp.float32)
    with ring_of(1, {"w": plain}) as (peer,):
        for _ in range(50):
            delta = jnp.asarray(rng.normal(size=50) * 1e-3, jnp.float32)
            peer.learn({"w": delta})
            plain = plain + delta
            np.testing.assert_array_equal(peer.weights["w"], plain)
        until(lambda: peer.label.version == 50)
        peer.leave()
        np.testing.assert_array_equal(peer.weights["w"], plain)
        assert peer.counters.messages_sent == 0


def test_weights_of_several_dtypes_go_round():
    weights = {"a": jnp.zeros(3, jnp.bfloat16), "b": [jnp.zeros((), jnp.float32)]}
    with ring_of(2, weights) as peers:
        for peer in peers:
            peer.learn({"a": jnp.ones(3, jnp.float32), "b": [jnp.ones(())]})
        until(lambda: all(peer.label.version == 2 for peer in peers))
        for peer in peers:
            assert peer.weights["a"].dtype == jnp.bfloat16
            assert peer.weights["a"].tolist() == [2, 2, 2]
            assert float(peer.weights["b"][0]) == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_what_a_superseded_token_took_up_gets_into_the_next_once(visits):
    """Without sockets: a member learns, and the token that it sends on then comes back, or one made anew."""
    peer = RingPeer({"w": np.zeros(MOST)})
    with closing(peer):
        sent = []
        peer._send = lambda to, label, weights: sent.append((label, np.asarray(weights["w"])))
        peer.number, peer._settled = 1, 0
        before = Label((0, 0), 0, (0, 1), {0: "a", 1: "b"}, {0: 0, 1: 0}), np.zeros(MOST, np.float32)
        learnt = 0
        for updates, lost in visits:
            for _ in range(updates):
                peer.learn({"w": np.eye(MOST, dtype=np.float32)[learnt]})
                learnt += 1
            peer._visited(before[0], {"w": before[1]})
            label, weights = sent[-1]
            assert np.flatnonzero(weights).tolist() == list(range(learnt))
            assert weights.max(initial=0) <= 1
            assert label.version == label.contained[1] == learnt
            np.testing.assert_array_equal(peer.weights["w"], weights)
            # Where it is lost, another one is made of what the next one before had seen.
            kept, content = before if lost else (label, weights)
            made = (label.generation[0] + lost, 0)
            before = replace(kept, generation=made, hops=label.hops + 1), content


def test_a_member_that_was_taken_for_lost_asks_to_be_let_in_again():
    with ring_of(3, {"w": np.zeros(4, np.float32)}) as (first, second, third):
        until(lambda: third.label.hops > 6)
        third.learn({"w": np.asarray([0, 0, 1, 0], np.float32)})
        with third._lock:  # the token gets stuck here, and the others make another
            until(lambda: first.label.order == second.label.order == (0, 1))
            first.learn({"w": np.asarray([1, 0, 0, 0], np.float32)})
        until(lambda: all(len(peer.label.order) == 3 for peer in (first, second)))
        until(lambda: all(peer.label.version == 2 for peer in (first, second, third)))
        for peer in (first, second, third):
            assert peer.weights["w"].tolist() == [1, 0, 1, 0]


def test_another_model_ends_the_member_with_an_error():
    good = RingPeer({"w": np.zeros(4, np.float32)}, patience=0.3)
    bad = RingPeer({"w": np.zeros(5, np.float32)}, patience=0.3)
    addresses = [good.address, bad.address]
    with closing(good), closing(bad):
        bad.start(1, addresses)
        good.start(0, addresses)
        with pytest.raises(WireError, match="the same model"):
            until(lambda: bad.weights is None)
        until(lambda: good.label.order == (0,))


def test_who_does_not_come_is_named():
    with socket.create_server(("127.0.0.1", 0)) as deaf, closing(RingPeer({"w": np.zeros(1)})) as peer:
        nobody = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(LostProcessError, match=r"member 1 did not come within 0\.3 s"):
            peer.start(0, [peer.address, nobody], seconds=0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf, closing(RingPeer({"w": np.zeros(1)})) as peer:
        nobody = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(LostProcessError, match=r"took this process in within 0\.3 s"):
            peer.join([nobody], seconds=0.3)


def test_an_update_of_another_shape_is_refused():
    with ring_of(1, {"w": np.zeros(3)}) as (peer,), pytest.raises(ValueError, match="shapes"):
        peer.learn({"w": np.zeros(1)})
