"""A token ring between processes, whose members may die and join: `jaxdl.parallel.exchange.ring`.

The thread that trains learns and reads; a thread of the member's own receives the token, lets it visit,
and sends it on. A token's label says what it is:

- `hops`, its visits so far, and `generation`, which is higher for each token that was made in another's
  place. A member takes only a token that is newer than any it has seen, so an old one that comes late
  ends there.
- `contained`, how many updates of each member are in its weights. A member keeps what it added at its
  last visit until the token comes back. Where a token that was made anew lacks that, the member adds it
  again; so its updates get in once, whichever of several tokens goes on.

Who sends the token and gets no answer takes the next member out, and makes a token of a new generation
of the same weights. Where no token has come for long, a member asks all others, and makes a new one if
it was the last to have the token, of those that answer: whoever had it since is gone.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.errors import LostProcessError
from jaxdl.parallel.exchange import ring, tree, wire
from jaxdl.parallel.exchange.peers import Message, Post

logger = logging.getLogger(__name__)

_update, _visit, _add = jax.jit(ring.update), jax.jit(ring.visit), jax.jit(tree.add)

TICK_SECONDS = 0.05
"""How often a member looks at what the thread that trains wants of it."""


@dataclass(frozen=True)
class Label:
    """What is known of a token.

    Attributes:
        generation: a number, and the member that made it; no two tokens have the same, and the higher
        counts.
        hops: visits so far.
        order: the members, as it goes round.
        addresses: of all members there ever were, by number.
        contained: the updates of each that are in the weights, by number.
    """

    generation: tuple[int, int]
    hops: int
    order: tuple[int, ...]
    addresses: dict[int, str]
    contained: dict[int, int]

    @property
    def version(self) -> int:
        """Updates that are in the weights."""
        return sum(self.contained.values())

    @property
    def age(self) -> tuple[tuple[int, int], int]:
        """What tells the newer of two tokens."""
        return self.generation, self.hops

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "Label":
        """Reads a label from a message; JSON knows neither tuples nor numbers for keys."""
        count, maker = fields["generation"]
        return cls(
            (int(count), int(maker)),
            int(fields["hops"]),
            tuple(map(int, fields["order"])),
            {int(number): str(address) for number, address in fields["addresses"].items()},
            {int(number): int(count) for number, count in fields["contained"].items()},
        )


@dataclass
class _Sent:
    label: Label
    weights: Any
    to: int
    deadline: float


class RingPeer:
    """A member of a ring; to be closed, as by `contextlib.closing`.

    Args:
        weights: those that all start with, in the shapes and dtypes of what is sent; of a member that
            joins only these count.
        listen: `host:port` at which the others reach this process; port 0 for any, see `address`.
        patience: seconds within which the next member must say that it has the token, time to send the
            weights included.
        timeout: seconds without a token after which a member asks the others; more than a round takes.
        rest: seconds that a token stays, so that an idle ring does not turn as fast as it can.

    Attributes:
        address: where the others reach this process.
        number: the number of this member, once it is in a ring.
        label: that of the token when it was here last.
        counters: what was sent, received, and lost.
    """

    def __init__(
        self,
        weights: Any,
        listen: str = "127.0.0.1:0",
        *,
        patience: float = 5.0,
        timeout: float = 20.0,
        rest: float = 0.01,
    ) -> None:
        self._member = ring.start(jax.tree.map(jnp.asarray, weights))[1]
        self._shapes = jax.tree.map(jnp.shape, weights)
        self._post = Post(listen)
        self._patience, self._timeout, self._rest = patience, timeout, rest
        self._lock = threading.Lock()  # of the member and its deposit, and held for sums alone
        self._deposit, self._deposited = tree.zeros(weights), 0
        self._settled: int | None = None  # own updates that a token came back with
        self.address, self.counters = self._post.address, self._post.counters
        self.number = -1
        self.label = Label((0, 0), 0, (), {}, {})
        self._held: tuple[Label, Any] | None = None
        self._sent: _Sent | None = None
        self._answers: dict[int, dict[str, Any]] | None = None
        self._deadline = self._ready = math.inf
        self._missing: set[int] = set()
        self._joiners: list[tuple[int | None, str]] = []
        self._contacts: list[str] = []
        self._leaving = self._stop = False
        self._error: Exception | None = None
        self._begun, self._gone = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="member of a ring")
        # Compiled now, so that nobody waits for it with the lock.
        token = ring.Token(self._member.weights, self._member.version)
        _update(self._member, self._deposit), _visit(self._member, token)

    @property
    def weights(self) -> Any:
        """This member's copy: what the token had when it was here, and what it has learnt since.

        The arrays are the member's own: not to be donated.
        """
        self._check()
        with self._lock:
            return self._member.weights

    def start(self, number: int, addresses: Sequence[str], seconds: float = 120.0) -> None:
        """Begins, with all the members that the ring has at first. Member 0 waits for the others.

        Args:
            number: which of them this is.
            addresses: those of all.
            seconds: how long to wait; the others, for their first token, so long and then the timeout.

        Raises:
            LostProcessError: not all came.
        """
        known = dict(enumerate(addresses))
        zero = dict.fromkeys(known, 0)
        self.number, self._settled = number, 0
        self.label = Label((0, 0), 0, tuple(known), known, zero)
        self._heard = time.monotonic() + seconds
        if number == 0:
            self._held, self._missing = (self.label, self._member.weights), set(known) - {0}
            self._ready = math.inf if self._missing else 0.0
        self._thread.start()
        if number == 0:
            self._wait(self._begun, seconds, lambda: f"{_members(self._missing)} did not come")

    def join(self, contacts: Sequence[str], seconds: float = 120.0) -> None:
        """Enters a ring that runs already, with the newest weights.

        Args:
            contacts: addresses of members, of which one at least lives.
            seconds: how long to try.

        Raises:
            LostProcessError: no member took this process in.
        """
        self._contacts, self._heard = list(contacts), -math.inf
        self._thread.start()
        asked = ", ".join(contacts)
        self._wait(self._begun, seconds, lambda: f"no member at {asked} took this process in")

    def learn(self, delta: Any) -> None:
        """Adds an update to this member's copy, and gathers it for the token.

        It never waits for the network.

        Raises:
            ValueError: the shapes are not those of the weights.
            JaxdlError: what ended this member.
        """
        self._check()
        if jax.tree.map(jnp.shape, delta) != self._shapes:
            raise ValueError("the update's shapes are not those of the weights")
        before = time.monotonic()
        with self._lock:
            self.counters.waited += time.monotonic() - before
            self._member = _update(self._member, delta)

    def leave(self, seconds: float | None = None) -> None:
        """Hands over what was gathered when the token comes next, and ends this member.

        Its `weights` are then those of the token as it left.

        Args:
            seconds: how long to wait; None for as long as the ring may take to get over one loss.

        Raises:
            LostProcessError: the token did not come, or nobody took it.
        """
        self._leaving = True
        seconds = 2 * (self._timeout + self._patience) if seconds is None else seconds
        self._wait(self._gone, seconds, lambda: "the token did not come")
        self.close()

    def close(self) -> None:
        """Ends this member at once; the others notice."""
        self._stop = True
        if self._thread.ident is None:
            self._post.close()
        else:
            self._thread.join(self._patience)

    def _wait(self, event: threading.Event, seconds: float, cause: Any) -> None:
        deadline = time.monotonic() + seconds
        while not event.wait(TICK_SECONDS):
            self._check()
            if time.monotonic() > deadline:
                why = f"{cause()} within {seconds:g} s; this is member {self.number} at {self.address}."
                self.close()
                raise LostProcessError(why)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # From here on, what the member's own thread does.

    def _run(self) -> None:
        try:
            for other in self._missing:
                self._tell(self.label.addresses[other], "ask")
            before = time.monotonic()
            while not (self._stop or self._gone.is_set()):
                message = self._post.receive(self._until())
                now = time.monotonic()
                self._forgive(now - before - 2 * TICK_SECONDS)
                before = now
                if message is not None:
                    self._take(message)
                else:  # all that came was read, so nobody is blamed for what lies here
                    self._act(now)
        except Exception as error:  # noqa: BLE001 - the thread that trains raises it
            self._error = error
        finally:
            self._post.close()

    def _forgive(self, seconds: float) -> None:
        """While this process was stopped, or busy, it did not listen: the others were not silent."""
        if seconds > 0:
            self._heard += seconds
            self._deadline += seconds
            if self._sent:
                self._sent.deadline += seconds

    def _until(self) -> float:
        """Seconds until there is something to do."""
        next_one = self._ready if self._held else self._sent.deadline if self._sent else math.inf
        return min(max(next_one - time.monotonic(), 0.0), TICK_SECONDS)

    def _take(self, message: Message) -> None:
        kind, said = message.fields["kind"], message.fields
        if kind == "token":
            self._receive(message)
        elif kind in ("taken", "old") and self._sent and said["age"] == _plain(self._sent.label.age):
            if kind == "taken" and self.number not in self._sent.label.order:
                self._gone.set()  # this one has left
            # Where a newer one is under way, this one ends here; the newer comes, or this member asks
            # for it.
            self._sent, self._heard = None, time.monotonic()
            self.counters.refused += kind == "old"
        elif kind == "ask":
            busy = self._held is not None or self._sent is not None
            state = {"age": self._newest().age, "order": self._newest().order, "busy": busy}
            self._tell(said["address"], "answer", number=self.number, **state)
        elif kind == "answer":
            self._missing.discard(said["number"])
            if self._answers is not None:
                self._answers[said["number"]] = said
            elif self._held and not self._missing and self._ready == math.inf:
                self._ready = 0.0
        elif kind == "join":
            self._joiners.append((said["number"], said["address"]))

    def _receive(self, message: Message) -> None:
        label = Label.parse(message.fields["label"])
        if label.age <= self._newest().age:
            self.counters.refused += 1
            self._tell(message.fields["address"], "old", age=label.age)
            return
        weights = wire.unpack(message.frames, self._member.weights)
        self._tell(message.fields["address"], "taken", age=label.age)
        number = next(number for number in label.order if label.addresses[number] == self.address)
        if number != self.number:  # this one has just joined
            self.number, self._settled, self._deposited = number, label.contained[number], 0
        self._hold(label, weights)

    def _hold(self, label: Label, weights: Any) -> None:
        now = time.monotonic()
        self._held, self._sent, self._answers = (label, weights), None, None
        self._heard, self._ready = now, now + self._rest

    def _act(self, now: float) -> None:
        if self._held:
            if now >= self._ready:
                self._visited(*self._held)
        elif self._sent:
            if now >= self._sent.deadline:
                self._lose(self._sent)
        elif self._answers is not None:
            others = set(self.label.order) - {self.number}
            if others <= set(self._answers) or now >= self._deadline:
                self._judge(self._answers)
        elif self._settled is None:
            if now > self._heard + self._patience:
                self._contacts.append(self._contacts.pop(0))
                self._ask_in(self._contacts[-1])
        elif now > self._heard + self._timeout:
            self._answers, self._deadline = {}, now + self._patience
            for other in set(self.label.order) - {self.number}:
                self._tell(self.label.addresses[other], "ask")

    def _visited(self, label: Label, weights: Any) -> None:
        """The token takes up what this member has gathered, and goes on."""
        inside = label.contained.get(self.number, 0)
        # Where the weights are no continuation of this member's copy, the copy must not be taken for
        # them.
        follows = label.generation == self.label.generation
        with self._lock:
            member = self._member
            if inside == self._settled and self._deposited:
                member = replace(
                    member,
                    gathered=_add(member.gathered, self._deposit),
                    count=member.count + self._deposited,
                )
            elif inside != (self._settled or 0) + self._deposited:
                logger.error("member %d: the token has %d of its updates", self.number, inside)
            if not follows:
                member = replace(member, version=jnp.full((), -1, jnp.int32))
            token = ring.Token(weights, jnp.asarray(label.version, jnp.int32))
            self._deposit = member.gathered
            count = member.count
            self._member, token = _visit(member, token)
        self._settled, self._deposited = inside, int(count)
        self.counters.visits += 1
        order, addresses, contained = label.order, dict(label.addresses), dict(label.contained)
        contained[self.number] = inside + self._deposited
        for number, address in self._joiners:
            if address in (addresses[member] for member in order):
                continue  # it has asked twice
            if number is None or addresses.get(number, address) != address:
                number = max(addresses) + 1
            place = order.index(self.number) + 1
            order, addresses[number] = (*order[:place], number, *order[place:]), address
            contained.setdefault(number, 0)
        self._joiners.clear()
        self.label = sent = Label(label.generation, label.hops + 1, order, addresses, contained)
        self._begun.set()
        if self._leaving and len(order) > 1:
            sent = replace(sent, order=ring.without(order, self.number))
        self._send(_after(order, self.number), sent, token.weights)

    def _send(self, to: int, label: Label, weights: Any) -> None:
        """Sends the token to a member, or keeps it, where nobody else is left."""
        self._held, self._heard = None, time.monotonic()
        if to != self.number:
            fields = {"kind": "token", "address": self.address, "label": asdict(label)}
            self._post.send(label.addresses[to], wire.pack(fields, weights))
            self._sent = _Sent(label, weights, to, time.monotonic() + self._patience)
        elif self._leaving:
            self._gone.set()
        else:
            self._hold(label, weights)

    def _lose(self, sent: _Sent) -> None:
        """The next member does not answer: the token goes to the one after it, as another one."""
        self._out([sent.to], "does not answer")
        self._sent = None
        generation = (sent.label.generation[0] + 1, self.number)
        left = ring.without(self.label.order, sent.to)
        self.label = replace(self.label, generation=generation, order=left)
        if sent.label.order == (sent.to,):  # this one leaves, and nobody else is left
            self._gone.set()
            return
        order = ring.without(sent.label.order, sent.to)
        following = _after(sent.label.order, sent.to)
        self._send(following, replace(sent.label, generation=generation, order=order), sent.weights)

    def _judge(self, answers: dict[int, dict[str, Any]]) -> None:
        """Nobody has seen the token for long: this member makes a new one, if it had it last."""
        self._answers, self._heard = None, time.monotonic()
        mine, order = _plain(self.label.age), self.label.order
        ages = {number: said["age"] for number, said in answers.items()} | {self.number: mine}
        last = max(ages, key=lambda number: (ages[number], -number))
        if last != self.number and self.number not in answers[last]["order"]:
            self._ask_in(self.label.addresses[last])  # the others took this one for lost
            return
        if last != self.number or any(said["busy"] and said["age"] >= mine for said in answers.values()):
            return  # it is there, or for another to make
        self._out([number for number in order if number not in ages], "had the token, or is lost too")
        with self._lock:
            _, token = ring.recovered({self.number: self._member})
        generation = (self.label.generation[0] + 1, self.number)
        left = tuple(number for number in order if number in ages)
        self.label = replace(self.label, generation=generation, order=left)
        self._hold(self.label, token.weights)

    def _newest(self) -> Label:
        """The label of the newest token seen."""
        return self._held[0] if self._held else self.label

    def _out(self, numbers: Sequence[int], why: str) -> None:
        for number in numbers:
            logger.warning("member %d: member %d %s; we go on without it", self.number, number, why)
            self.counters.lost.append(str(number))
            self._post.forget(self.label.addresses[number])

    def _ask_in(self, address: str) -> None:
        number = None if self._settled is None else self.number
        self._heard = time.monotonic()
        self._tell(address, "join", number=number)

    def _tell(self, address: str, kind: str, **fields: Any) -> None:
        self._post.send(address, wire.pack({"kind": kind, "address": self.address, **fields}))


def _after(order: tuple[int, ...], number: int) -> int:
    return order[(order.index(number) + 1) % len(order)]


def _plain(age: tuple[tuple[int, int], int]) -> list[Any]:
    """An age as JSON gives it back."""
    return [list(age[0]), age[1]]


def _members(numbers: set[int]) -> str:
    return "member " + " and ".join(map(str, sorted(numbers)))
