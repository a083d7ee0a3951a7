"""One number of every rank of one host, in memory that they share: an agreement in microseconds.

A collective of gloo takes 100 to 300 us on one host, most of it threads that wake each other; before every
call that is as long as the call. Here a rank writes one word and reads those of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import secrets
import tempfile
import time

from .errors import PeerFailedError

# A word is [its turn | number], so that one aligned store shows both; a turn comes back, in another slot
# or 2^20 turns later, when all ranks have long read it.
_FIELD_BITS = 43
NUMBER_BITS = _FIELD_BITS - 1
_GAVE_UP = (1 << _FIELD_BITS) - 1  # no number: for what a rank had posted, when it waits no longer
_TURNS = 1 << 20
_SLOTS = 64  # turns that a rank may be ahead of the slowest reader, of which each needs every rank
_WORD = 8

_BUSY_S = 200e-6  # how long a rank asks again and again before it sleeps between
_SLEEP_S = 50e-6
_PROBE_S = 20e-3  # how often a rank that waits looks whether the others are alive


def create(size: int) -> tuple[str, str] | None:
    """The path and token of new memory for ``size`` ranks, or None where it cannot be made."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    token = secrets.token_hex(16)
    try:
        descriptor, path = tempfile.mkstemp(prefix="gdn_kcp.", dir=folder)
        with open(descriptor, "wb") as file:
            file.write(bytes(size * _SLOTS * _WORD) + token.encode())
    except OSError:
        return None
    return path, token


class Board:
    """One rank's view. All ranks ``post`` in the same order, and ``read`` what they posted.

    A rank holds a lock on its byte of the file for as long as it lives, so that the others see it go.
    """

    def __init__(self, path: str, token: str, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout  # in seconds
        length = size * _SLOTS * _WORD
        self._file = open(path, "r+b")  # closed when the process ends: closing gives up the lock
        self._file.seek(length)
        if self._file.read() != token.encode():
            raise OSError(f"{path}: of other ranks")
        self._words = memoryview(mmap.mmap(self._file.fileno(), length)).cast("Q")
        self._turns = itertools.count(1)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def post(self, number: int) -> int:
        """Shows ``number``, of NUMBER_BITS bits; its turn is what ``read`` asks for."""
        turn = next(self._turns)
        self._show(turn, number)
        return turn

    def read(self, turn: int) -> list[int]:
        """The numbers of all ranks, by rank. PeerFailedError: one left, did not come in time, or has
        given up waiting, as this rank then does too: it will not go on with the others."""
        try:
            return [self._number(rank, turn) for rank in range(self.size)]
        except PeerFailedError:
            self._show(turn, _GAVE_UP)
            raise

    def _show(self, turn: int, number: int) -> None:
        word = (turn % _TURNS << _FIELD_BITS) | number
        self._words[self.rank * _SLOTS + turn % _SLOTS] = word

    def _number(self, rank: int, turn: int) -> int:
        at, tag = rank * _SLOTS + turn % _SLOTS, turn % _TURNS
        if self._words[at] >> _FIELD_BITS != tag:
            self._wait(rank, at, tag)
        number = self._words[at] & _GAVE_UP
        if number == _GAVE_UP:
            raise PeerFailedError(f"rank {rank} had given up waiting")
        return number

    def _wait(self, rank: int, at: int, tag: int) -> None:
        began = time.monotonic()
        probed = began
        while self._words[at] >> _FIELD_BITS != tag:
            now = time.monotonic()
            if now - began < _BUSY_S:
                os.sched_yield()
                continue
            if now - began > self.timeout:
                raise PeerFailedError(f"rank {rank} did not come within {self.timeout:g} s")
            if now - probed > _PROBE_S:
                probed = now
                # It may have posted and left since the loop looked.
                if self._left(rank) and self._words[at] >> _FIELD_BITS != tag:
                    raise PeerFailedError(f"rank {rank} left")
            time.sleep(_SLEEP_S)

    def _left(self, rank: int) -> bool:
        with contextlib.suppress(OSError):  # it holds its lock
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
            return True
        return False
