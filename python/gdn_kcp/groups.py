"""What may be a context's group, and the member of each."""

from __future__ import annotations

import torch.distributed as dist

from .errors import InvalidArgumentError, int64
from .in_process import InProcessGroup
from .members import Solo
from .torch_group import TorchMember


def member_of(group, rank: int):
    """The member that speaks for ``rank`` of ``group`` (None: one rank)."""
    if group is None:
        return Solo()
    if isinstance(group, InProcessGroup):
        rank = int64("rank", rank, f"0 to {group.size - 1}")
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
            f"rank: expected {member.rank}, as in the group, got {rank!r}"
        )
