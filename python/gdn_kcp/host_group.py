"""How the ranks of a torch.distributed group agree on the host, before their devices talk.

In memory that they share (board.py) where all are on one host, else over gloo: the group's own, or where
it has none (NCCL alone) one made beside it over the same store.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import time
from datetime import timedelta
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist

from . import board
from .errors import Error, PeerFailedError
from .members import POINT_BITS, in_one_place

# What a word has that a rank posts, from its upper end: whether the rank failed, its point, its digest.
_DIGEST_BITS = board.NUMBER_BITS - 1 - POINT_BITS

_LONG = timedelta(minutes=10)  # where a group does not tell its timeout: NCCL's own


@contextlib.contextmanager
def peers():
    """What torch raises where a rank is gone, as our own error."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        why = f"{error}".split("\n")[0]
        raise PeerFailedError(f"another rank failed, left, or never came: {why}") from error


def backends_of(group: dist.ProcessGroup) -> str:
    """As ``cpu:gloo,cuda:nccl``."""
    return str(dist.get_backend_config(group))


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):  # no such backend, or it does not tell
            return group._get_backend(torch.device(device)).options._timeout
    return _LONG


def _gloo_of(group: dist.ProcessGroup):
    """A backend of gloo with the group's ranks, in their order."""
    if "gloo" in backends_of(group):
        return group._get_backend(torch.device("cpu"))
    store = dist.distributed_c10d._get_process_group_store(group)
    return dist.ProcessGroupGloo(
        dist.PrefixStore("gdn_kcp", store), dist.get_rank(group), dist.get_world_size(group),
        timeout=_timeout_of(group),
    )


class Agreed(NamedTuple):
    failed: bool  # on any rank
    same: bool  # all digests
    in_step: bool  # all points


def _folded(digest: int) -> int:
    """To the bits that a word has for it, which all of its own change (Knuth's multiplicative hash)."""
    return digest * 0x9E3779B97F4A7C15 % (1 << 64) >> 64 - _DIGEST_BITS


@functools.cache
def _linger_at_exit() -> None:
    """gloo's threads let go of a collective's tensors after it has ended, and need the interpreter for it:
    where that ends meanwhile, torch aborts the process. So they get it for a moment, once, at the end."""
    atexit.register(time.sleep, 0.1)


class HostGroup:
    """One rank's part of it; every rank of ``group`` makes one, together."""

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.board: board.Board | None = None
        self._closed: str | None = None  # why
        self._gloo = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Meets the others, in the first context of the group; does nothing later."""
        self._check_open()
        if self._gloo is not None:
            return
        try:
            _linger_at_exit()
            with peers():
                self._gloo = _gloo_of(group)
            self.board = self._shared_board(_timeout_of(group).total_seconds())
        except BaseException as error:
            self.close(error)
            raise

    def _shared_board(self, timeout: float) -> board.Board | None:
        """None on every rank where one cannot open it."""
        place = board.create(self.size) if self.rank == 0 else None
        made = place
        mine = None
        try:
            place = self.gather(place)[0]
            if place is not None:
                with contextlib.suppress(OSError):  # of another host
                    mine = board.Board(*place, self.rank, self.size, timeout)
            return mine if all(self.gather(mine is not None)) else None
        finally:
            if made is not None:
                os.unlink(made[0])

    def gather(self, value) -> list:
        """The small ``value`` of every rank, by rank. As torch's all_gather_object, which needs NumPy."""
        self._check_open()
        try:
            return self._gather(pickle.dumps(value))
        except BaseException as error:  # the others are at another collective from here on
            self.close(error)
            raise

    def _gather(self, mine: bytes) -> list:
        lengths = self._allgather(torch.tensor([len(mine)], device="cpu"))()
        padded = mine.ljust(max(int(length) for length in lengths), b"\0")
        rows = self._allgather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))()
        return [pickle.loads(bytes(row[: int(n)].tolist())) for row, n in zip(rows, lengths)]

    def _check_open(self) -> None:
        if self._closed is not None:
            raise PeerFailedError(self._closed)

    def close(self, why: BaseException) -> None:
        """This rank will not go on with what others may have agreed to: every later agreement fails."""
        self._closed = self._closed or f"{type(why).__name__} in an earlier call: {why}"
        if self.board is not None:
            self.board.close()

    def begin(self, failed: bool, digest: int, at: int) -> Callable[[], Agreed]:
        """What will say what came of it. ``at``: a point of members.py.

        PeerFailedError, now or then: a rank left, did not come in time, or closed its part.
        """
        self._check_open()
        word = (failed << POINT_BITS | at) << _DIGEST_BITS | _folded(digest)
        read = (self._post_over_gloo if self.board is None else self._post_on_board)(word)

        def result() -> Agreed:
            words = read()
            digests = {word % (1 << _DIGEST_BITS) for word in words}
            points = [(word >> _DIGEST_BITS) % (1 << POINT_BITS) for word in words]
            failed = any(word >> _DIGEST_BITS + POINT_BITS for word in words)
            return Agreed(failed, len(digests) == 1, in_one_place(points))

        return result

    def _post_on_board(self, word: int) -> Callable[[], list[int]]:
        turn = self.board.post(word)

        def read() -> list[int]:
            try:
                return self.board.read(turn)
            except PeerFailedError as error:
                raise PeerFailedError(f"another rank failed, left, or never came: {error}") from None

        return read

    def _post_over_gloo(self, word: int) -> Callable[[], list[int]]:
        rows = self._allgather(torch.tensor([word], dtype=torch.int64, device="cpu"))
        return lambda: [int(row) for row in rows()]

    def _allgather(self, row: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begins it; what it returns waits for the rows of all ranks."""
        rows = [torch.empty_like(row) for _ in range(self.size)]
        with peers():
            work = self._gloo.allgather([rows], [row])

        def wait() -> list[torch.Tensor]:
            with peers():
                work.wait()
            return rows

        return wait
