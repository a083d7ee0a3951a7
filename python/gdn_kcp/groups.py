"""How ranks talk: one rank, threads of one process, or a torch.distributed process group.

A member offers ``all_to_all`` and ``all_gather`` over blocks of bytes, and ``agree``: before the
first collective of a call all ranks learn whether any of them failed, so that none hangs. An agreement
that has begun may be settled later: what needs no other rank runs meanwhile. A member with a
``communicator`` of the library's own lets that do a call's collectives.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from datetime import timedelta
from typing import Any, Callable

import torch
import torch.distributed as dist

from . import board
from ._library import ops
from .errors import Error, InvalidArgumentError, PeerFailedError, packed, unpacked

Settle = Callable[[], None]  # ends an agreement: raises what any rank has to say


class _AgreesAtOnce:
    """A member whose agreements are settled when they begin."""

    communicator = 0

    def open(self, device: torch.device) -> None:
        """Nothing to open."""

    def begin_agreement(self, error: Exception | None, digest: int, what: str) -> Settle:
        self.agree(error, digest, what)
        return lambda: None


class Solo(_AgreesAtOnce):
    """One rank: nobody to talk to."""

    rank, size = 0, 1
    collectives = "none"

    def agree(self, error: Exception | None, digest: int, what: str) -> None:
        if error is not None:
            raise error


def _raise_first(failures: list[tuple[int, str] | None]) -> None:
    """The lowest failing rank's error, the same on all ranks."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise unpacked(failure[0], f"rank {rank}: {failure[1]}")


def _raise_disagreement(what: str) -> None:
    raise InvalidArgumentError(f"{what}: expected the same on every rank, got different ones")


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
            _raise_first(failures)
            if not same:
                _raise_disagreement(what)

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


class InProcessGroup:
    """``size`` ranks as threads of this process, for tests and for several ranks on one GPU.

    ``group.run(fn)`` calls ``fn(rank)`` on one thread per rank and returns their results in rank
    order; the first failing rank's error is raised. Backwards run on the rank's own thread.
    """

    def __init__(self, size: int, timeout: float = 300.0):
        if size < 1:
            raise InvalidArgumentError(f"size: expected at least 1, got {size}")
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._slots: list[Any] = [None] * size

    def member(self, rank: int) -> "ThreadMember":
        return ThreadMember(self, rank)

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size
        self._barrier.reset()

        def main(rank: int) -> None:
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn(rank)
            except BaseException as error:  # noqa: BLE001: handed to the caller
                errors[rank] = error
                self._barrier.abort()  # nobody waits for a rank that left

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [error for error in errors if error is not None]
        for error in raised:
            if not isinstance(error, PeerFailedError):
                raise error
        if raised:
            raise raised[0]
        return results

    def exchange(self, rank: int, item: Any, take: Callable[[list[Any]], Any]) -> Any:
        """Shows every rank's item to ``take``; items stay valid until all have taken."""
        self._slots[rank] = item
        try:
            self._barrier.wait()
            taken = take(self._slots)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerFailedError("another rank failed, left, or never came") from None
        return taken


class ThreadMember(_AgreesAtOnce):
    """One rank of an :class:`InProcessGroup`."""

    collectives = "threads"

    def __init__(self, group: InProcessGroup, rank: int):
        self.group, self.rank, self.size = group, rank, group.size

    def agree(self, error: Exception | None, digest: int, what: str) -> None:
        states = self.group.exchange(self.rank, (error and packed(error), digest), list)
        _raise_first([failure for failure, _ in states])
        if len({digest for _, digest in states}) > 1:
            _raise_disagreement(what)

    def _share(self, item: tuple, take: Callable[[list[Any]], Any]) -> None:
        def taken(items: list[Any]) -> None:
            take(items)
            if item[0].is_cuda:
                torch.cuda.current_stream(item[0].device).synchronize()

        if item[0].is_cuda:
            torch.cuda.current_stream(item[0].device).synchronize()
        self.group.exchange(self.rank, item, taken)

    def all_to_all(self, send, send_bytes, receive, receive_bytes) -> None:
        def take(items: list[Any]) -> None:
            at = 0
            for (block, sizes), size in zip(items, receive_bytes):
                begin = sum(sizes[: self.rank])
                receive[at : at + size].copy_(block[begin : begin + size])
                at += size

        self._share((send, send_bytes), take)

    def all_gather(self, send, receive, receive_bytes) -> None:
        def take(items: list[Any]) -> None:
            at = 0
            for (block,), size in zip(items, receive_bytes):
                receive[at : at + size].copy_(block)
                at += size

        self._share((send,), take)


def member_of(group, rank: int):
    """The member that speaks for ``rank`` of ``group`` (None: one rank)."""
    if group is None:
        return Solo()
    if isinstance(group, InProcessGroup):
        if not 0 <= rank < group.size:
            raise InvalidArgumentError(f"rank: expected 0 to {group.size - 1}, got {rank}")
        return group.member(rank)
    if isinstance(group, dist.ProcessGroup):
        return TorchMember(group)
    raise InvalidArgumentError(
        "group: expected a torch.distributed process group, an InProcessGroup or None, got "
        f"{type(group).__name__}"
    )


def check_member(member, rank: int, world_size: int) -> None:
    """Refuses a member of another group size than the partition's, or of another rank."""
    if member.size != world_size:
        got = "none" if isinstance(member, Solo) else member.size
        ranks = f"{world_size} rank{'' if world_size == 1 else 's'}"
        raise InvalidArgumentError(f"group: expected {ranks}, as in the partition, got {got}")
    if member.rank != rank:
        raise InvalidArgumentError(
            f"rank: expected {member.rank}, as in the group, got {rank}"
        )
