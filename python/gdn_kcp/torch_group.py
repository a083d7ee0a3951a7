"""Ranks of a torch.distributed group: how they agree, and who runs their collectives."""

from __future__ import annotations

import contextlib
import os
import weakref
from datetime import timedelta
from typing import Any, Callable

import torch
import torch.distributed as dist

from . import board
from ._library import ops
from .errors import Error, InvalidArgumentError, PeerFailedError, packed
from .members import Settle, raise_disagreement, raise_first


@contextlib.contextmanager
def _peers():
    """What torch raises where a rank is gone, as our own error."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        why = f"{error}".split("\n")[0]
        raise PeerFailedError(f"another rank failed, left, or never came: {why}") from error


# Its name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# For groups without a CPU backend (NCCL alone): gloo groups of the same ranks, one for each, to agree
# in. Their collectives are three numbers on the host.
_control_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_CONTROL_TIMEOUT = timedelta(minutes=10)  # NCCL's own


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Where the ranks of ``group`` agree on the host; made once, by all of them."""
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    made = _control_groups.get(group)
    if made is None:
        with _peers():
            made = _control_groups[group] = dist.new_group(
                dist.get_process_group_ranks(group), timeout=_CONTROL_TIMEOUT, backend="gloo",
                use_local_synchronization=True,
            )
    return made


# By the group in which ranks agree: the memory that they share, or None where they are on several hosts.
_boards: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _timeout_of(control: dist.ProcessGroup) -> float:
    """Of a group with gloo, in seconds."""
    try:
        return control._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a torch that does not tell
        return _CONTROL_TIMEOUT.total_seconds()


def _board(control: dist.ProcessGroup) -> board.Board | None:
    """The memory that the ranks of ``control`` share; made once, by all of them."""
    if control in _boards:
        return _boards[control]
    rank, size = dist.get_rank(control), dist.get_world_size(control)
    with _peers():
        made: list[Any] = [board.create(size) if rank == 0 else None]
        dist.broadcast_object_list(made, dist.get_global_rank(control, 0), group=control)
        mine = None
        with contextlib.suppress(OSError):  # of another host
            if made[0] is not None:
                mine = board.Board(*made[0], rank, size, _timeout_of(control))
        have = [False] * size
        dist.all_gather_object(have, mine is not None, group=control)
    if rank == 0 and made[0] is not None:
        os.unlink(made[0][0])
    _boards[control] = mine if all(have) else None
    return _boards[control]


# By group and device index: the library's own communicator of NCCL, a handle of its ops; 0: none. They
# stay for as long as the process, since leaving one waits for the other ranks.
_communicators: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _takes_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` would use NCCL, and the environment does not ask for torch's collectives."""
    return (
        device.type == "cuda"
        and "nccl" in str(dist.get_backend_config(group))
        and os.environ.get("GDN_COLLECTIVES") != "torch"
    )


def _new_communicator(group, control, device: torch.device) -> int:
    """A communicator of all ranks of ``group``, or 0 on all of them."""
    rank, size = dist.get_rank(control), dist.get_world_size(control)

    def all_ranks(value):
        values = [None] * size
        dist.all_gather_object(values, value, group=control)
        return values

    identity = None
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # a process without NCCL
            identity = ops.nccl_id()
    offers = all_ranks((_takes_nccl(group, device), identity))
    if offers[0][1] is None or not all(takes for takes, _ in offers):
        return 0
    made = 0
    with contextlib.suppress(RuntimeError):
        made = ops.nccl_join(offers[0][1], rank, size, torch.empty(0, device=device))
    if all(all_ranks(made)):
        return made
    if made:
        ops.nccl_abandon(made)
    return 0


class TorchMember:
    """A rank of a torch.distributed group: gloo for CPU tensors, NCCL for CUDA tensors.

    Beside a group of NCCL the ranks have a communicator of NCCL of the library's own, which enqueues a
    call's collectives on the call's stream; ``GDN_COLLECTIVES=torch`` leaves them to torch.distributed, as
    does a process whose NCCL is not found.

    Ranks agree in memory that they share where all are on one host. Otherwise, and to make that memory
    and to pass errors on, they use a CPU backend: the group's own (gloo, or the default
    ``cpu:gloo,cuda:nccl``), or a gloo group that the first context of the group makes beside it.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgumentError("group: expected one that this process is in")
        self.communicator = 0
        self._control = _control_group(group)
        self._board = _board(self._control)

    def open(self, device: torch.device) -> None:
        """Makes, or finds, the communicator for tensors on ``device``; every rank calls this."""
        if self.size == 1:
            return
        known = _communicators.setdefault(self.group, {})
        if device not in known:
            with _peers():
                known[device] = _new_communicator(self.group, self._control, device)
        self.communicator = known[device]

    @property
    def collectives(self) -> str:
        return "nccl" if self.communicator else "torch.distributed"

    def agree(self, error: Exception | None, digest: int, what: str) -> None:
        self.begin_agreement(error, digest, what)()

    def begin_agreement(self, error: Exception | None, digest: int, what: str) -> Settle:
        begin = self._begin_over_gloo if self._board is None else self._begin_on_board
        result = begin(error is not None, digest)

        def settle() -> None:
            failed, same = result()
            failures: list[Any] = [None] * self.size
            if failed:
                with _peers():
                    dist.all_gather_object(failures, error and packed(error), group=self._control)
            raise_first(failures)
            if not same:
                raise_disagreement(what)

        return settle

    def _begin_on_board(self, failed: bool, digest: int) -> Callable[[], tuple[bool, bool]]:
        """What will say whether any rank failed, and whether all digests are the same."""
        bits = board.NUMBER_BITS - 1  # of the digest; above them whether this rank failed
        turn = self._board.post(failed << bits | digest & ((1 << bits) - 1))

        def result() -> tuple[bool, bool]:
            try:
                numbers = self._board.read(turn)
            except PeerFailedError as error:
                if self.communicator:  # else what is enqueued there waits without end
                    ops.nccl_abandon(self.communicator)
                raise PeerFailedError(f"another rank failed, left, or never came: {error}") from None
            return any(number >> bits for number in numbers), len(set(numbers)) == 1

        return result

    def _begin_over_gloo(self, failed: bool, digest: int) -> Callable[[], tuple[bool, bool]]:
        digest &= (1 << 62) - 1  # so that its negative fits too
        state = torch.tensor([failed, digest, -digest], dtype=torch.int64)
        with _peers():
            work = dist.all_reduce(state, dist.ReduceOp.MAX, group=self._control, async_op=True)

        def result() -> tuple[bool, bool]:
            with _peers():
                work.wait()
            failed, most, least = state.tolist()
            return bool(failed), most == -least

        return result

    def all_to_all(self, send, send_bytes, receive, receive_bytes) -> None:
        with _peers():
            dist.all_to_all_single(receive, send, receive_bytes, send_bytes, group=self.group)

    def all_gather(self, send, receive, receive_bytes) -> None:
        if len(set(receive_bytes)) == 1:
            if receive.numel():
                with _peers():
                    _all_gather(receive, send, group=self.group)
            return
        # Blocks of different sizes: the same block to every rank.
        blocks = send.repeat(self.size)
        self.all_to_all(blocks, [send.numel()] * self.size, receive, receive_bytes)
