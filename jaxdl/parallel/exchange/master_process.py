"""A master with workers between processes: `jaxdl.parallel.exchange.master`, on sockets.

Only the master listens; a worker connects, gets the weights, and from then on sends updates and gets
newer weights for each. Neither has threads of its own: the master does its part while one calls `round`
(all compute with the same weights, and the mean of the updates is added) or `serve` (each update is
added as it comes), so one of them must be called again within the workers' timeout.

An update that was computed with other weights than the rounds', or with weights too old, is refused and
counted, and its worker is told so with the newest weights. What a worker that is lost had not sent is
lost.
"""

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.errors import ConfigError, LostProcessError
from jaxdl.parallel.exchange import master, wire
from jaxdl.parallel.exchange.peers import Message, Post

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 1.0
"""How long the last words may take to go out."""


@dataclass(frozen=True)
class Reply:
    """What the master said.

    Attributes:
        weights: the newest, a tree of arrays.
        version: updates that are in them; of rounds, how many there were.
        taken: whether it took the update.
        ended: whether it has ended, and these weights are the last.
    """

    weights: Any
    version: int
    taken: bool
    ended: bool


@dataclass
class _Round:
    """What has come in a round, by the workers' numbers; and who is to be answered at its end."""

    deltas: dict[int, Any] = field(default_factory=dict)
    examples: dict[int, float] = field(default_factory=dict)
    newcomers: list[bytes] = field(default_factory=list)


class MasterPeer:
    """The master; to be closed, as by `contextlib.closing`.

    Args:
        weights: those that all start with, in the shapes and dtypes of what is sent.
        listen: `host:port` at which the workers reach this process; port 0 for any, see `address`.
        patience: seconds within which a worker must answer; more than it computes for an update, its
            compilation included.
        bound: the most updates of others that the weights of an update may lack; for `serve` alone.

    Attributes:
        address: where the workers reach this process.
        counters: what was sent, received, refused and lost.
    """

    def __init__(
        self, weights: Any, listen: str = "127.0.0.1:0", *, patience: float = 30.0, bound: int = 0
    ) -> None:
        self._state = master.start(jax.tree.map(jnp.asarray, weights))
        self._patience, self._bound = patience, bound
        self._post = Post(listen)
        self.address, self.counters = self._post.address, self._post.counters
        self._workers: dict[bytes, int] = {}
        self._names: dict[bytes, str] = {}
        self._early: list[Message] = []
        self._heard: dict[bytes, float] = {}

    @property
    def weights(self) -> Any:
        """The newest weights."""
        return self._state.weights

    @property
    def version(self) -> int:
        """Updates that are in them; of rounds, how many there were."""
        return int(self._state.version)

    @property
    def workers(self) -> list[str]:
        """The names of those that are there."""
        return [self._names[worker] for worker in self._workers]

    def gather(self, workers: int, seconds: float = 120.0) -> None:
        """Waits until so many workers are there.

        Raises:
            LostProcessError: fewer came.
        """
        deadline, early = time.monotonic() + seconds, []
        while len(self._workers) < workers:
            message = self._receive(deadline)
            if message is None:
                raise LostProcessError(
                    f"{len(self._workers)} of {workers} workers have come to {self.address} "
                    f"within {seconds:g} s."
                )
            if message.fields["kind"] == "update" and message.sender in self._workers:
                early.append(message)  # for the round, or `serve`, that follows
                continue
            self.counters.refused += message.fields["kind"] == "update"
            self._welcome(message.sender, taken=False)
        self._early.extend(early)

    def round(self) -> Any:
        """Makes one round: the mean of the updates of those that answer in time is added.

        A worker that does not is taken out; if its update comes later, that is refused and the worker is
        in the next round. So is a worker that joins meanwhile.

        Returns:
            The new weights.

        Raises:
            LostProcessError: no worker answered.
        """
        deadline = time.monotonic() + self._patience
        this = _Round()
        # Also the update of a worker that has said goodbye since counts.
        while not (self._workers or this.deltas) or set(self._workers.values()) - set(this.deltas):
            message = self._receive(deadline)
            if message is None:
                break
            self._collect(this, message)
        for worker, number in list(self._workers.items()):
            if number not in this.deltas:
                self._lose(worker, f"did not answer in round {self.version + 1}")
        if not this.deltas:
            raise LostProcessError(f"no worker answered within {self._patience:g} s; {self._place()}")
        self._state = master.apply(self._state, master.mean(this.deltas, this.examples))
        self.counters.visits += 1
        frames = self._frames(taken=True)
        for worker in self._workers:
            self._post.answer(worker, frames)
        for worker in dict.fromkeys(this.newcomers):
            self._welcome(worker, taken=False)
        return self.weights

    def serve(self, updates: int) -> Any:
        """Adds updates as they come, and answers each at once, until so many have been taken.

        A worker that is silent for longer than the patience is taken out, until it is heard again.

        Returns:
            The new weights.

        Raises:
            LostProcessError: no worker is left.
        """
        left, alone = updates, time.monotonic()
        self._heard = dict.fromkeys(self._workers, alone)
        while left > 0:
            message = self._receive(min(self._heard.values(), default=alone) + self._patience)
            now = time.monotonic()
            if message is not None:
                taken = message.fields["kind"] == "update" and self._accept(message)
                left -= taken
                self._welcome(message.sender, taken)
                alone = now
                continue
            for worker in [each for each, heard in self._heard.items() if heard + self._patience <= now]:
                self._lose(worker, f"was silent for {self._patience:g} s")
            if not self._workers and alone + self._patience <= now:
                cause = f"no worker was heard within {self._patience:g} s"
                raise LostProcessError(f"{cause}; {self._place()}")
        return self.weights

    def finish(self) -> None:
        """Tells the workers that this is the end, with the last weights, and closes."""
        frames = self._frames(taken=False, ended=True)
        for worker in self._workers:
            self._post.answer(worker, frames)
        self._post.close(GOODBYE_SECONDS)

    def close(self) -> None:
        """Closes without a word: the workers end with an error, unless `finish` was called."""
        self._post.close()

    def _receive(self, deadline: float) -> Message | None:
        """The next message but for goodbyes, or None at the deadline."""
        if self._early:
            return self._early.pop(0)
        begun = time.monotonic()
        while True:
            message = self._post.receive(max(deadline - time.monotonic(), 0.0))
            if message is not None and message.fields["kind"] == "bye":
                self._forget(message.sender)
                continue
            self.counters.waited += time.monotonic() - begun
            if message is not None:
                self._names[message.sender] = str(message.fields["name"])
            return message

    def _collect(self, this: _Round, message: Message) -> None:
        worker, kind = message.sender, message.fields["kind"]
        if kind == "update" and worker in self._workers and message.fields["version"] == self.version:
            delta = self._delta(message)
            if delta is not None:
                this.deltas[self._workers[worker]] = delta
                this.examples[self._workers[worker]] = float(message.fields["examples"])
                return
        else:
            self.counters.refused += kind == "update"
        self._forget(worker)
        # The others are not to wait for one that has yet to compute.
        this.newcomers.append(worker)
        if not (self._workers or this.deltas):
            while this.newcomers:
                self._welcome(this.newcomers.pop(), taken=False)

    def _accept(self, message: Message) -> bool:
        """Adds an update, unless it is too old."""
        delta = self._delta(message)
        if delta is None:
            return False
        version = jnp.asarray(message.fields["version"], jnp.int32)
        self._state, accepted = master.receive(self._state, delta, version, self._bound)
        self.counters.visits += int(accepted)
        self.counters.refused += 1 - int(accepted)
        return bool(accepted)

    def _delta(self, message: Message) -> Any:
        """The update in a message, or None if it does not fit the weights: the others are to go on."""
        try:
            return wire.unpack(message.frames, self.weights)
        except wire.WireError as error:
            logger.warning("refused an update of worker %s: %s", self._names[message.sender], error)
            self.counters.refused += 1
            return None

    def _welcome(self, worker: bytes, taken: bool) -> None:
        """Sends the weights to a worker, and counts on it from now on."""
        if self._post.answer(worker, self._frames(taken)):
            self._workers.setdefault(worker, max(self._workers.values(), default=-1) + 1)
            self._heard[worker] = time.monotonic()
        else:
            self._lose(worker, "has gone")

    def _lose(self, worker: bytes, why: str) -> None:
        logger.warning("worker %s %s; the others go on without it", self._names[worker], why)
        self.counters.lost.append(self._names[worker])
        self._forget(worker)

    def _forget(self, worker: bytes) -> None:
        self._workers.pop(worker, None)
        self._heard.pop(worker, None)

    def _place(self) -> str:
        return f"this is the master at {self.address}, after update {self.version}."

    def _frames(self, taken: bool, ended: bool = False) -> list[bytes]:
        fields = {"version": self.version, "taken": taken, "ended": ended, "patience": self._patience}
        return wire.pack({"kind": "weights", **fields}, self.weights)


class WorkerPeer:
    """A worker; to be closed, as by `contextlib.closing`.

    Args:
        like: a tree of the shapes and dtypes that are expected.
        address: the master's.
        name: for messages.
        timeout: seconds within which the master must answer; more than its patience.

    Attributes:
        counters: what was sent, received and refused.
    """

    def __init__(self, like: Any, address: str, *, name: str, timeout: float = 60.0) -> None:
        self._like = like
        self._address, self._name, self._timeout = address, name, timeout
        # Another identity at each start: the master may not yet have noticed that the last one is gone.
        self._post = Post(identity=f"{name[:64]}/{uuid.uuid4().hex[:8]}".encode())
        self.counters = self._post.counters
        self._version = -1

    def join(self) -> Reply:
        """Asks for the weights, at the beginning or later; a master in a round gives them at its end.

        Raises:
            LostProcessError: the master does not answer.
            ConfigError: the master may be silent for longer than this worker waits.
        """
        return self._ask({"kind": "hello"})

    def exchange(self, delta: Any, examples: float = 1.0) -> Reply:
        """Sends an update, and waits for newer weights.

        Args:
            delta: a tree of the shapes and dtypes of the weights, computed with those that came last.
            examples: how many it was computed from; its weight in the mean of a round.

        Raises:
            LostProcessError: the master does not answer.
        """
        reply = self._ask({"kind": "update", "version": self._version, "examples": examples}, delta)
        self.counters.visits += reply.taken
        self.counters.refused += not (reply.taken or reply.ended)
        return reply

    def close(self) -> None:
        """Says goodbye, and closes."""
        self._post.send(self._address, wire.pack({"kind": "bye", "name": self._name}))
        self._post.close(GOODBYE_SECONDS)

    def _ask(self, fields: dict[str, Any], tree: Any = None) -> Reply:
        begun = time.monotonic()
        self._post.send(self._address, wire.pack({**fields, "name": self._name}, tree))
        message = self._post.receive(self._timeout)
        self.counters.waited += time.monotonic() - begun
        if message is None:
            raise LostProcessError(
                f"the master at {self._address} has not answered within {self._timeout:g} s; "
                f"this is worker {self._name}, with the weights of version {self._version}."
            )
        said = message.fields
        if said["patience"] >= self._timeout:
            raise ConfigError(
                f"the master waits {said['patience']:g} s for others, but worker {self._name} only "
                f"{self._timeout:g} s for the master: make the worker's timeout longer."
            )
        self._version = int(said["version"])
        weights = jax.tree.map(jnp.asarray, wire.unpack(message.frames, self._like))
        return Reply(weights, self._version, bool(said["taken"]), bool(said["ended"]))
