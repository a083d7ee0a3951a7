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
NUMBER_BITS = 43
_TURNS = 1 << 20
_SLOTS = 64  # turns that a rank may be ahead of the slowest reader, of which each needs every rank
_CLOSED = _SLOTS  # a rank's word behind its slots: 1 for good once it will not go on with the others
_ROW = _SLOTS + 8  # words of a rank
_WORD = 8  # bytes

_BUSY_S = 200e-6  # how long a rank asks again and again before it sleeps between
_SLEEP_S = 50e-6
_PROBE_S = 20e-3  # how often a rank that waits looks whether the others are alive


def create(size: int) -> tuple[str, str] | None:
    """The path and token of new memory for ``size`` ranks, or None where it cannot be made."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    token = secrets.token_hex(16)
    path = None
    try:
        descriptor, path = tempfile.mkstemp(prefix="gdn_kcp.", dir=folder)
        with open(descriptor, "wb") as file:
            file.write(bytes(size * _ROW * _WORD) + token.encode())
    except OSError:
        if path is not None:
            os.unlink(path)
        return None
    return path, token


class Board:
    """One rank's view. All ranks ``post`` in the same order, and ``read`` what they posted.

    A rank holds a lock on its byte of the file for as long as it lives, so that the others see it go.
    """

    def __init__(self, path: str, token: str, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout  # in seconds
        length = size * _ROW * _WORD
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
        word = (turn % _TURNS << NUMBER_BITS) | number
        self._words[self.rank * _ROW + turn % _SLOTS] = word
        return turn

    def read(self, turn: int) -> list[int]:
        """The numbers of all ranks, by rank. PeerFailedError: one left, did not come in time, or has
        closed the board. Then, and when interrupted, this rank closes it too: the others may have gone
        on with what this one did not hear of."""
        try:
            self._check_open(self.rank)
            numbers = [self._number(rank, turn) for rank in range(self.size)]
            for rank in range(self.size):
                self._check_open(rank)
        except BaseException:
            self.close()
            raise
        return numbers

    def close(self) -> None:
        """From now on every rank's ``read`` fails."""
        self._words[self.rank * _ROW + _CLOSED] = 1

    def _check_open(self, rank: int) -> None:
        if self._words[rank * _ROW + _CLOSED]:
            raise PeerFailedError(f"rank {rank} gave up a call that others had agreed to")

    def _number(self, rank: int, turn: int) -> int:
        at, tag = rank * _ROW + turn % _SLOTS, turn % _TURNS
        if self._words[at] >> NUMBER_BITS != tag:
            self._wait(rank, at, tag)
        return self._words[at] & ((1 << NUMBER_BITS) - 1)

    def _wait(self, rank: int, at: int, tag: int) -> None:
        def posted() -> bool:
            return self._words[at] >> NUMBER_BITS == tag

        began = probed = time.monotonic()
        while not posted():
            self._check_open(rank)
            now = time.monotonic()
            if now - began < _BUSY_S:
                os.sched_yield()
                continue
            if now - began > self.timeout and not posted():
                raise PeerFailedError(f"rank {rank} did not come within {self.timeout:g} s")
            if now - probed > _PROBE_S and rank != self.rank:
                probed = now
                if self._left(rank) and not posted():  # it may have posted, then left
                    raise PeerFailedError(f"rank {rank} left")
            time.sleep(_SLEEP_S)

    def _left(self, rank: int) -> bool:
        with contextlib.suppress(OSError):  # it holds its lock
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
            return True
        return False
