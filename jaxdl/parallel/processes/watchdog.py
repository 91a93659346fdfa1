"""Notices when another process of the run is lost, and ends this one, which would wait for ever."""

import contextlib
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

import jax
from jax._src.distributed import global_state  # private; Orbax relies on it too

from jaxdl.config import ParallelConfig
from jaxdl.errors import EXIT_LOST

END_SECONDS = 5.0
"""How long Python has to end in good order once another process is lost."""

RUNNING, DONE, FAILED, LEFT = "running", "done", "failed", "left"


@dataclass
class _Peer:
    silence: float = 0.0
    said: str = ""
    step: str = "none"
    state: str = RUNNING
    blames: str = ""


class Watchdog:
    """Tells the other processes that this one lives, and ends this one when another is silent too long.

    A context manager: enter it right after `start`, on all processes. A thread of its own writes a
    counter to the key-value store of jax's client, and reads those of the others; so a process that
    compiles for minutes lives, and one that is killed or stopped does not. Time is measured by this
    process's own clock, and only while it runs itself: a run that is suspended as a whole goes on when
    it is woken.

    A process that leaves without an error says goodbye, and waits a moment for the others. One that
    leaves with an error falls silent, since the others may be about to fail in the same way.

    With one process it does nothing.
    """

    active: ClassVar["Watchdog | None"] = None
    _runs: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, config: ParallelConfig) -> None:
        self._timeout = config.timeout
        self._interval = min(1.0, config.timeout / 10)
        self._step: int | None = None
        self._state, self._blames = RUNNING, ""
        self._lock = threading.Lock()
        self._store_silence = 0.0
        self._peers: dict[int, _Peer] = {}
        self._wake = threading.Event()
        self._over = threading.Event()

    def beat(self, step: int) -> None:
        """Notes the update that was made, for the messages."""
        self._step = step

    def __enter__(self) -> Self:
        """Begins to watch."""
        self._client: Any = global_state.client
        if self._client is None or global_state.num_processes == 1:
            return self
        self._index: int = global_state.process_id
        self._place = f"jaxdl/alive/{next(self._runs)}/"
        others = set(range(global_state.num_processes)) - {self._index}
        self._peers = {number: _Peer() for number in sorted(others)}
        Watchdog.active = self
        self._talker = threading.Thread(target=self._talk, daemon=True, name="watchdog")
        self._talker.start()
        threading.Thread(target=self._judge, daemon=True, name="watchdog's judge").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Says goodbye, or what went wrong."""
        if not self._peers:
            return
        if self._state == RUNNING:
            self._state = DONE if kind is None else FAILED
        self._wake.set()
        # Process 0 keeps the store of what all say: it must not go before the others have read it.
        self._over.wait(3 * self._interval if kind is None or self._index == 0 else self._interval)
        self._over.set()
        # Python ends badly while a thread is in a call of jax's client.
        self._talker.join(self._interval)
        Watchdog.active = None
        if self._state == LEFT:
            # Python's own end may wait for collectives that never end.
            last = threading.Timer(END_SECONDS, leave, (EXIT_LOST,))
            last.daemon = True
            last.start()

    def find(self) -> str:
        """Who is lost, after a collective failed: waits until it is known, but not for long."""
        deadline = time.monotonic() + 4 * self._interval + 1
        while not (lost := self._lost(2.5 * self._interval)) and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
        return self._blame(lost)

    def _talk(self) -> None:
        """Says that this process lives, and hears the others; blocks while process 0 does not answer."""
        for count in itertools.count():
            state = self._state
            words = f"{count} {'none' if self._step is None else self._step} {state} {self._blames}"
            try:
                self._client.key_value_set(f"{self._place}{self._index}", words, allow_overwrite=True)
                entries = self._client.key_value_dir_get(self._place)
            except jax.errors.JaxRuntimeError:
                entries = []
            self._hear(entries)
            if self._over.is_set():
                return
            if state != RUNNING and all(peer.state != RUNNING for peer in self._peers.values()):
                self._over.set()  # all have said goodbye
                return
            if state == RUNNING:
                self._wake.wait(self._interval)
            else:
                time.sleep(0.05)

    def _hear(self, entries: Iterable[tuple[str, str]]) -> None:
        with self._lock:
            for key, said in entries:
                self._store_silence = 0.0
                peer = self._peers.get(int(key.rpartition("/")[2]))
                if peer is not None and peer.said != said:
                    # The words of one that failed no longer count as life.
                    peer.silence = peer.silence if peer.state == FAILED else 0.0
                    peer.said = said
                    _, peer.step, peer.state, peer.blames = said.split(" ")

    def _judge(self) -> None:
        """Ends this process if another one is lost."""
        before = time.monotonic()
        while not self._over.wait(self._interval / 2):
            now = time.monotonic()
            # Where this process was stopped itself, it has not listened.
            passed, before = min(now - before, self._interval), now
            with self._lock:
                self._store_silence += passed
                for peer in self._peers.values():
                    peer.silence += passed
            lost = self._lost(self._timeout)
            if lost and self._state == RUNNING:
                message = self._blame(lost)
                self._wake.set()
                if self._index == 0:
                    time.sleep(2 * self._interval)  # until the others have read whom to blame
                os.write(2, f"error: {message}\n".encode())
                leave(EXIT_LOST)

    def _lost(self, bound: float) -> dict[int, str]:
        """The processes that are lost, and what is known of each."""
        with self._lock:
            host = self._peers.get(0)
            if host and host.state == DONE:
                return {}  # nobody keeps the store any more
            for peer in self._peers.values():
                if peer.state == LEFT and peer.blames:
                    return {int(number): "is lost" for number in peer.blames.split(",")}
            candidates = self._peers
            if host and self._store_silence > min(bound, 3 * self._interval):
                candidates = {0: host}  # nobody is heard any more, because process 0 is not
            heard = "is gone" if bound < self._timeout else f"has been silent for {bound:.0f} s"
            return {
                number: "ended with an error" if peer.state == FAILED else heard
                for number, peer in candidates.items()
                if peer.silence > bound and peer.state in (RUNNING, FAILED)
            }

    def _blame(self, lost: dict[int, str]) -> str:
        """Makes the message, and lets the others know."""
        self._blames = ",".join(map(str, (number for number in lost if number != self._index)))
        self._state = LEFT
        own = "none" if self._step is None else str(self._step)
        causes = [
            f"process {number} {how} (last update: {self._peers[number].step})"
            if number in self._peers
            else "this process was silent too long, so the others have ended"
            for number, how in lost.items()
        ]
        cause = " and ".join(causes) or "another process of the run is lost"
        place = f"this is process {self._index} (last update: {own})"
        return f"{cause}; {place}. --resume true goes on from the last checkpoint."


def leave(code: int) -> NoReturn:
    """Ends this process at once, whatever its threads wait for.

    An ordinary exit would wait for collectives that never end.
    """

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.flush()

    for child in multiprocessing.active_children():
        child.kill()
    # In a thread, since another one may hold the stream for ever.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(2)
    os._exit(code)
