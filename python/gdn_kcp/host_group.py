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
from .members import KINDS, NUMBERS, POINT_BITS, in_one_place

# What a word of the board has, from its upper end: whether the rank failed, its point, its digest.
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
            with peers():
                return self._gather(pickle.dumps(value))
        except BaseException as error:  # the others are at another collective from here on
            self.close(error)
            raise

    def _gather(self, mine: bytes) -> list:
        def allgather(row: torch.Tensor) -> list[torch.Tensor]:
            rows = [torch.empty_like(row) for _ in range(self.size)]
            self._gloo.allgather([rows], [row]).wait()
            return rows

        lengths = allgather(torch.tensor([len(mine)], device="cpu"))
        padded = mine.ljust(max(int(length) for length in lengths), b"\0")
        rows = allgather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
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
        begin = self._begin_over_gloo if self.board is None else self._begin_on_board
        return begin(failed, _folded(digest), at)

    def _begin_on_board(self, failed: bool, digest: int, at: int) -> Callable[[], Agreed]:
        turn = self.board.post((failed << POINT_BITS | at) << _DIGEST_BITS | digest)

        def result() -> Agreed:
            try:
                numbers = self.board.read(turn)
            except PeerFailedError as error:
                raise PeerFailedError(f"another rank failed, left, or never came: {error}") from None
            digests = {number % (1 << _DIGEST_BITS) for number in numbers}
            points = [(number >> _DIGEST_BITS) % (1 << POINT_BITS) for number in numbers]
            failed = any(number >> _DIGEST_BITS + POINT_BITS for number in numbers)
            return Agreed(failed, len(digests) == 1, in_one_place(points))

        return result

    def _begin_over_gloo(self, failed: bool, digest: int, at: int) -> Callable[[], Agreed]:
        number, kind = divmod(at, KINDS)
        least = -(number or NUMBERS)  # where it is not known, above all numbers
        state = [failed, digest, -digest, kind, -kind, number, least]
        state = torch.tensor(state, dtype=torch.int64, device="cpu")
        with peers():
            work = self._gloo.allreduce([state], dist.ReduceOp.MAX)

        def result() -> Agreed:
            with peers():
                work.wait()
            failed, digest, minus_least, kind, minus_first, last, minus_next = state.tolist()
            in_step = kind == -minus_first and last in (0, -minus_next)
            return Agreed(bool(failed), digest == -minus_least, in_step)

        return result
