"""What a rank offers to talk to the others, its member: :class:`Solo` here, threads of one process
(in_process.py), or a rank of a torch.distributed group (torch_group.py).

A member offers ``all_to_all`` and ``all_gather`` over blocks of bytes, and ``agree``: before the
first collective of a call all ranks learn whether any of them failed, so that none hangs. An agreement
that has begun may be settled later: what needs no other rank runs meanwhile. A member with a
``communicator`` of the library's own lets that do a call's collectives.
"""

from __future__ import annotations

import contextlib
from typing import Callable, Iterable

import torch

from .errors import InvalidArgumentError, PeerFailedError, unpacked

Settle = Callable[[], None]  # ends an agreement: raises what any rank has to say

# Where ranks agree. Two that meet at different points are out of step: one left a call or a step that
# the other is in, and what it does next is not what the other does.
POINTS = ("context", "forward", "backward", "causal_conv1d", "causal_conv1d: backward")
POINT_BITS = 12
_KINDS = 8  # of points, at most
_NUMBERS = (1 << POINT_BITS) // _KINDS


def point(of: str, number: int = 0) -> int:
    """As a number. ``number``: for a backward, the agreements until its forward's; 0: not known."""
    return POINTS.index(of) + _KINDS * (number and 1 + number % (_NUMBERS - 1))


def in_one_place(points: Iterable[int]) -> bool:
    """Whether these points are the same, as far as they are known."""
    points = set(points)
    return len({p % _KINDS for p in points}) == 1 and len({p // _KINDS for p in points} - {0}) < 2


class AgreesAtOnce:
    """A member whose agreements are settled when they begin."""

    communicator = 0
    agreements = 0  # so far

    def open(self, device: torch.device) -> None:
        """Nothing to open."""

    def give_up(self, why: BaseException) -> None:
        """Nobody to tell: a thread's failure ends the others' waits."""

    def begin_agreement(
        self, error: Exception | None, digest: int, what: str, at: int = 0
    ) -> Settle:
        self.agree(error, digest, what, at)
        return lambda: None


class Solo(AgreesAtOnce):
    """One rank: nobody to talk to."""

    rank, size = 0, 1
    collectives = "none"

    def agree(self, error: Exception | None, digest: int, what: str, at: int = 0) -> None:
        if error is not None:
            raise error


def out_of_step(ctx, error: BaseException) -> None:
    """Ends all agreements of ``ctx``'s ranks, unless ``error`` is one that they all have: this rank has
    left a call in which the others may go on."""
    if getattr(ctx, "world_size", 1) > 1 and not getattr(error, "heard", False):
        ctx.member.give_up(error)


def interrupted(ctx, error: BaseException) -> None:
    """The same for what may end a call at any line of it: an interrupt. Errors have been told."""
    if not isinstance(error, Exception):
        out_of_step(ctx, error)


@contextlib.contextmanager
def in_step(ctx):
    """Part of a call that all ranks of ``ctx`` take part in."""
    try:
        yield
    except BaseException as error:
        out_of_step(ctx, error)
        raise


def raise_first(failures: list[tuple[int, str] | None]) -> None:
    """The lowest failing rank's error, the same on all ranks."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            error = unpacked(failure[0], f"rank {rank}: {failure[1]}")
            error.heard = True
            raise error


def raise_out_of_step() -> None:
    raise PeerFailedError(
        "ranks are at different calls: one left a call or a step that others are in (by an error of its "
        "own between a forward and its backward, say); make a new group"
    )


def raise_disagreement(what: str) -> None:
    error = InvalidArgumentError(f"{what}: expected the same on every rank, got different ones")
    error.heard = True
    raise error
