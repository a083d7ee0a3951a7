"""Ranks of a torch.distributed group: who runs their collectives."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ._library import ops
from .errors import InvalidArgumentError, UnsupportedError, packed, typed
from .host_group import HostGroup, backends_of, peers
from .members import Settle, raise_disagreement, raise_first, raise_out_of_step

# Its name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# By group: how its ranks agree, and by device the library's own communicator of NCCL, a handle of its ops,
# or 0 and why there is none. Communicators stay for as long as the process, since to leave one is to wait
# for the other ranks.
_hosts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_communicators: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def collectives_asked() -> str | None:
    """What GDN_COLLECTIVES asks for: nccl (or an error where it cannot be), torch, or nothing."""
    asked = os.environ.get("GDN_COLLECTIVES") or None
    if asked not in (None, "nccl", "torch"):
        raise InvalidArgumentError(f"GDN_COLLECTIVES: expected nccl or torch, got '{asked}'")
    return asked


def _why_not_nccl(group: dist.ProcessGroup, device: torch.device, asked: str | None) -> str:
    """Why this rank of ``group`` has no communicator of its own on ``device``; empty if it may."""
    if asked == "torch":
        return "GDN_COLLECTIVES is torch"
    if device.type != "cuda" or "nccl" not in backends_of(group):
        return f"the context is on {device.type}, the group uses {backends_of(group)}"
    return ops.nccl_missing()


def _new_communicator(host: HostGroup, why_not: str, device: torch.device) -> tuple[int, str]:
    """A communicator of all ranks; or 0 on all of them, and why, the same on all."""
    identity = None
    if host.rank == 0 and not why_not:
        try:
            identity = bytes(ops.nccl_id().tolist())
        except RuntimeError as error:
            why_not = f"{typed(error)}"
    offers = host.gather((why_not, identity))
    reasons = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(offers) if why]
    if reasons:
        return 0, reasons[0]
    made = 0
    try:
        shared = torch.frombuffer(bytearray(offers[0][1]), dtype=torch.uint8)
        made = ops.nccl_join(shared, host.rank, host.size, torch.empty(0, device=device))
    except RuntimeError as error:
        why_not = f"{typed(error)}"
    reasons = [f"rank {rank}: {why}" for rank, why in enumerate(host.gather(why_not)) if why]
    if not reasons:
        return made, ""
    if made:
        ops.nccl_abandon(made)
    return 0, reasons[0]


class TorchMember:
    """A rank of a torch.distributed group: gloo for CPU tensors, NCCL for CUDA tensors.

    Beside a group of NCCL the ranks have a communicator of NCCL of the library's own, which enqueues a
    call's collectives on the call's stream; ``GDN_COLLECTIVES=torch`` leaves them to torch.distributed, as
    does a rank that finds no NCCL. ``GDN_COLLECTIVES=nccl`` refuses to. host_group.py has how they agree.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgumentError("group: expected one that this process is in")
        self.communicator = 0
        self.agreements = 0  # so far
        if group not in _hosts:
            _hosts[group] = HostGroup(group)
        self.host: HostGroup = _hosts[group]
        self.host.start(group)

    def open(self, device: torch.device) -> None:
        """Makes, or finds, the communicator for tensors on ``device``; every rank calls this."""
        if self.size == 1:
            return
        key = "cpu"
        if device.type != "cpu":  # with the index that the current device gives
            key = f"{torch.empty(0, device=device).device}"
        known = _communicators.setdefault(self.group, {})
        asked = collectives_asked()
        ranks = self.host.gather((key in known, asked))
        if not all(has for has, _ in ranks):
            why_not = _why_not_nccl(self.group, device, asked)
            known[key] = _new_communicator(self.host, why_not, device)
        self.communicator, why_not = known[key]
        if not self.communicator and any(asked == "nccl" for _, asked in ranks):
            raise UnsupportedError(f"GDN_COLLECTIVES: expected torch or none here, got nccl: {why_not}")

    @property
    def collectives(self) -> str:
        return "nccl" if self.communicator else "torch.distributed"

    def give_up(self, why: BaseException) -> None:
        """This rank fails alone in what others may have agreed to: they hear of it in their next
        agreement, and nothing that is enqueued waits for them."""
        self.host.close(typed(why))
        if self.communicator:
            ops.nccl_abandon(self.communicator)

    def agree(self, error: Exception | None, digest: int, what: str, at: int = 0) -> None:
        self.begin_agreement(error, digest, what, at)()

    def begin_agreement(
        self, error: Exception | None, digest: int, what: str, at: int = 0
    ) -> Settle:
        self.agreements += 1
        result = self.host.begin(error is not None, digest, at)

        def settle() -> None:
            failures: list[Any] = []
            try:
                failed, same, in_step = result()
                if not in_step:
                    raise_out_of_step()
                if failed:
                    failures = self.host.gather(error and packed(error))
            except BaseException as why:
                self.give_up(why)
                raise
            raise_first(failures)
            if not same:
                raise_disagreement(what)

        return settle

    def all_to_all(self, send, send_bytes, receive, receive_bytes) -> None:
        with peers():
            dist.all_to_all_single(receive, send, receive_bytes, send_bytes, group=self.group)

    def all_gather(self, send, receive, receive_bytes) -> None:
        if len(set(receive_bytes)) == 1:
            if receive.numel():
                with peers():
                    _all_gather(receive, send, group=self.group)
            return
        # Blocks of different sizes: the same block to every rank.
        blocks = send.repeat(self.size)
        self.all_to_all(blocks, [send.numel()] * self.size, receive, receive_bytes)
