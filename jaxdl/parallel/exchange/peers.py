"""Messages between processes on TCP, by ZeroMQ; nothing here waits for ever.

ZeroMQ connects, reconnects, and keeps messages whole: one arrives with all its frames or not at all,
never twice, and in order on one connection. It does not promise that a message arrives; who needs to
know waits for an answer, and not too long. There is no encryption and no check of who sends: for a
network that is trusted.
"""

import logging
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from jaxdl.errors import ConfigError
from jaxdl.parallel.exchange import wire

logger = logging.getLogger(__name__)

BEAT_SECONDS, SILENT_SECONDS = 2.0, 10.0
"""How often ZeroMQ's own threads ask whether the other end of a connection is there, and when they close
it."""


@dataclass
class Counters:
    """What a process has done so far.

    Attributes:
        bytes_sent: of all frames; the network adds a few for each frame and packet.
        bytes_received: likewise.
        messages_sent: messages.
        messages_received: messages.
        visits: of the token, or rounds of the master or a worker.
        refused: updates that came too late, or tokens that were superseded.
        lost: who was taken out because it did not answer.
        waited: seconds for which the thread that trains had to wait.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    visits: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    waited: float = 0.0


@dataclass(frozen=True)
class Message:
    """What came.

    Attributes:
        sender: whom to answer on the same connection; empty where it is itself an answer.
        fields: those of the header.
        frames: the whole message, for `wire.unpack`.
    """

    sender: bytes
    fields: dict[str, Any]
    frames: list[bytes]


class Post:
    """The sockets of one process; of one thread, which alone may call it.

    A ROUTER receives from everybody, and can reply to each by its identity. A DEALER for each address
    sends there, and receives the replies.

    Args:
        listen: `host:port` to receive at, port 0 for any that is free; None to receive only replies. The
            host must be this machine's name or number as the others see it.
        identity: by which the others' ROUTER knows this process; empty for any.
    """

    def __init__(self, listen: str | None = None, identity: bytes = b"") -> None:
        place = None if listen is None else _numeric(listen)
        self.counters = Counters()
        self.address = ""
        self._identity = identity
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._router: zmq.Socket[bytes] | None = None
        if listen is not None and place is not None:
            self._router = self._socket(zmq.ROUTER)
            # A reply to somebody who has gone is an error, rather than silence.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            try:
                self._router.bind(f"tcp://{place}")
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(f"this process cannot listen at {listen} ({error}).") from None
            endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
            port = bytes(endpoint).decode().strip("\0").rpartition(":")[2]
            self.address = f"{listen.rpartition(':')[0]}:{port}"

    def send(self, address: str, frames: Sequence[bytes]) -> None:
        """Sends a message to an address, whether or not anybody is there."""
        if address not in self._dealers:
            dealer = self._socket(zmq.DEALER)
            if self._identity:
                dealer.setsockopt(zmq.IDENTITY, self._identity)
            dealer.connect(f"tcp://{address}")
            self._dealers[address] = dealer
        self._put(self._dealers[address], frames)

    def answer(self, sender: bytes, frames: Sequence[bytes]) -> bool:
        """Sends a message to an identity that has sent one; returns whether it is still there."""
        assert self._router is not None, "only who listens can answer"
        return self._put(self._router, frames, sender)

    def receive(self, seconds: float) -> Message | None:
        """Waits for a message, at most so long; what is no message of ours is dropped."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(deadline - time.monotonic(), 0)
            ready = self._poller.poll(math.ceil(left * 1000))
            if not ready:
                return None
            frames = ready[0][0].recv_multipart(zmq.NOBLOCK)
            sender = frames.pop(0) if ready[0][0] is self._router else b""
            self.counters.bytes_received += wire.size(frames)
            self.counters.messages_received += 1
            try:
                return Message(sender, wire.read(frames), frames)
            except wire.WireError as error:
                logger.warning("dropped a message: %s", error)

    def forget(self, address: str) -> None:
        """Closes the connection to an address, and drops what has not yet gone there."""
        dealer = self._dealers.pop(address, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=0)

    def close(self, linger: float = 0.0) -> None:
        """Closes all.

        Args:
            linger: for how many seconds at most what was sent last may still go out.
        """
        self._context.destroy(linger=int(1000 * linger))

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * BEAT_SECONDS))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENT_SECONDS))
        self._poller.register(made, zmq.POLLIN)
        return made

    def _put(self, place: "zmq.Socket[bytes]", frames: Sequence[bytes], to: bytes | None = None) -> bool:
        try:
            place.send_multipart([*([] if to is None else [to]), *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False  # nobody there, or the queue is full: the same to who waits for an answer
        self.counters.bytes_sent += wire.size(frames)
        self.counters.messages_sent += 1
        return True


def _numeric(address: str) -> str:
    """An address with the host as a number: ZeroMQ does not look up the one that it listens at."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"{address!r} is no address to listen at, such as node1:8500.")
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"this process cannot listen at {address} ({error}).") from None
    number = str(sorted(found)[0][4][0])  # IPv4 first
    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"
