"""How far the work is."""

import datetime
import time
from collections.abc import Callable

from jaxdl.data.images.prepare.contents import Contents
from jaxdl.data.images.prepare.shards import Shard

TELL_EVERY = 5.0
"""Seconds between two lines."""


class Progress:
    """Says every few seconds how far the work is and how long the rest will take."""

    def __init__(self, shards: list[Shard], say: Callable[[str], None]) -> None:
        self._say, self._shards = say, len(shards)
        self._left = sum(shard.length for shard in shards if shard.number == 0)
        self._began = self._told = time.monotonic()
        self._done = self._kept = self._new = 0

    def shard(self, contents: Contents, *, new: bool) -> None:
        """Counts a shard; those that were there already say nothing about the speed."""
        examples = contents.examples + len(contents.skipped)
        now = time.monotonic()
        if not new and not self._new:
            self._began = now
        self._done += 1
        self._left -= examples
        self._kept += not new
        self._new += examples if new else 0
        if now - self._told < TELL_EVERY and self._done < self._shards:
            return
        self._told = now
        line = f"{self._done:,}/{self._shards:,} shards"
        if self._kept:
            line += f", {self._kept:,} of them there before"
        if self._new:
            rate = self._new / (now - self._began)
            left = datetime.timedelta(seconds=round(self._left / rate))
            line += f"; {rate:,.0f} examples/s, {left} left"
        self._say(line)
