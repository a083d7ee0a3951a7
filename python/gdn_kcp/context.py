"""One rank's view of a partition, and the memory of its calls."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch

from ._library import exchange_flags, ops, save_flags
from .errors import InvalidArgumentError, UnsupportedError, int64, typed
from .groups import check_member, member_of
from .members import in_step
from .partition import Partition
from .replay import Replays
from .torch_group import collectives_asked


def _resolved(scale, q):
    """The scale of a call, the default also where it is spelled out, as K ** -0.5 or 1 / sqrt(K)."""
    if q.dim() == 0 or q.shape[-1] == 0:  # the call will be refused
        return scale
    default = q.shape[-1] ** -0.5
    if scale is None or isinstance(scale, float) and math.isclose(scale, default, rel_tol=1e-15):
        return default
    return scale


class CallKey(NamedTuple):
    """What a forward and the calls that go on from it must have in common."""

    options: tuple  # shapes and options
    place: tuple  # who holds which tokens in which segments

    @staticmethod
    def of(ctx: Context, q, v, scale, flags: int) -> CallKey:
        options = (tuple(q.shape), tuple(v.shape), str(q.dtype), _resolved(scale, q), flags)
        room = (ctx.max_tokens, ctx.max_fragments)
        return CallKey(options, (ctx.partition.digest, ctx.rank, ctx.tile, *room))

    def check(self, kept: CallKey, expected: str) -> None:
        """Refuses what a forward of another key has kept; ``expected`` names it."""
        if kept.options != self.options:
            raise InvalidArgumentError(
                f"{expected} of a forward with {self.options}, got one with {kept.options}"
            )
        if kept.place != self.place:
            raise InvalidArgumentError(
                f"{expected} of a forward over this partition, rank, tile and capacity, got one over others"
            )


_ALIGNMENT = 256  # of workspaces, in bytes; gdn/gdn.h


class Context:
    """Made by :func:`build_context`; reused by every layer and call of a step.

    Holds one rank's plan for each shape of heads that was called, made on its first call.
    """

    def __init__(
        self, partition: Partition, member, device: torch.device, conv_kernel_size: int,
        max_tokens: int = 0, max_fragments: int = 0, tile: int = 0,
    ):
        self.rank: int = member.rank
        self.world_size: int = member.size
        self.device = device
        self.conv_kernel_size = conv_kernel_size
        self.member = member
        self.max_tokens, self.max_fragments = max_tokens, max_fragments  # 0: this packing alone
        self.tile = tile  # 0: segments as is fastest
        self.handle: int = ops.session_create(
            partition.handle, member.rank, "", "auto", tile, max_tokens, max_fragments
        )
        weakref.finalize(self, ops.session_free, self.handle).atexit = False
        self.refills = 0  # so far: a backward belongs to the packing of its forward
        self._hold(partition)

    def _hold(self, partition: Partition) -> None:
        self.partition = partition
        self.local_cu_seqlens = partition.local_cu_seqlens(self.rank)
        self.local_tokens = int(self.local_cu_seqlens[-1])
        self._digests: dict[tuple, int] = {}
        self.halos: dict[int, Any] = {}  # conv.Halo by width

    @property
    def rows(self) -> int:
        """Rows of the operands: ``max_tokens``, those past ``local_tokens`` slack; or all local."""
        return self.max_tokens or self.local_tokens

    def refill(self, partition: Partition) -> None:
        """Takes another packing within ``max_tokens`` and ``max_fragments`` (a collective).

        Layout and world size stay. The tables on the device are written anew in the order of the
        current stream, without a synchronisation; byte counts and addresses stay, so that a CUDA
        graph captured before serves the new packing. Not within a stream capture; the backward of a
        forward before the refill raises.

        Raises:
            InvalidArgumentError: on every rank, naming the argument; the context stays as it was.
        """
        error: Exception | None = None
        digest = 0
        try:
            _check_partition(partition)
            digest = partition.digest
            ops.session_refill(self.handle, partition.handle)
        except RuntimeError as raised:
            error = typed(raised)
        try:
            with in_step(self):
                self.member.agree(error, digest, "partition")
        except BaseException:
            if error is None:
                ops.session_refill(self.handle, self.partition.handle)
            raise
        self.refills += 1
        self._hold(partition)

    def __reduce_ex__(self, protocol):
        raise UnsupportedError(
            "Context: expected to stay in its process, got copied or pickled; pickle its partition and "
            "build_context() there"
        )

    def __repr__(self) -> str:
        return (
            f"Context(rank {self.rank} of {self.partition!r} on {self.device}, "
            f"collectives: {self.collectives})"
        )

    @property
    def collectives(self) -> str:
        """What runs the calls' collectives: ``nccl`` (this library's own), ``torch.distributed``,
        ``threads``, or ``none`` on one rank."""
        return self.member.collectives

    def token_indices(self) -> torch.Tensor:
        """The global row of every local row, on the context's device."""
        return self.partition.token_indices(self.rank).to(self.device)

    def digest(self, q, v, scale, flags: int) -> int:
        """What all ranks must have in common to run one call together."""
        key = (q.shape[-2:], v.shape[-2:], q.dtype, scale, flags)
        known = self._digests.get(key)
        if known is None:
            heads, dims = (q.shape[-2], v.shape[-2]), (q.shape[-1], v.shape[-1])
            like = torch.empty(0, dtype=q.dtype, device=q.device)
            table = ops.query(self.handle, self.rows, *heads, *dims, like, scale, flags)
            known = self._digests[key] = int(table[6])
        return known


def _check_partition(partition) -> None:
    if not isinstance(partition, Partition):
        raise InvalidArgumentError(
            f"partition: expected a Partition, got {type(partition).__name__}"
        )


def usable_device(device) -> torch.device:
    """The device, if torch can hold a tensor there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidArgumentError(f"device: expected cpu or cuda, got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device: expected cpu or cuda, got {found}")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        why = str(error).split("\n")[0]
        raise UnsupportedError(
            f"device: expected cpu, or a GPU that torch can use, got {found}: {why}"
        ) from None
    return found


def _capacity(
    partition: Partition, max_tokens: int | None, max_fragments: int | None
) -> tuple[int, int]:
    """(0, 0) without a capacity; what is not given is what the partition needs."""
    if max_tokens is None and max_fragments is None:
        return 0, 0
    for name, given in (("max_tokens", max_tokens), ("max_fragments", max_fragments)):
        if given is not None and int64(name, given) < 1:
            raise InvalidArgumentError(f"{name}: expected at least 1, got {given!r}")
    ranks = range(partition.world_size)
    if max_tokens is None:
        max_tokens = max(1, *(partition.local_tokens(rank) for rank in ranks))
    if max_fragments is None:
        held = (partition.local_cu_seqlens(rank).numel() - 1 for rank in ranks)
        max_fragments = max(1, -(-partition.num_documents // partition.world_size), *held)
    return max_tokens, max_fragments


def build_context(
    partition: Partition,
    group,
    rank: int,
    device,
    conv_kernel_size: int = 4,
    *,
    max_tokens: int | None = None,
    max_fragments: int | None = None,
    tile: int = 0,
) -> Context:
    """A rank's :class:`Context`, checked against the other ranks of ``group`` (a collective).

    Args:
        partition: from :func:`partition`, the same on every rank.
        group: a torch.distributed process group (gloo for CPU tensors, NCCL for CUDA tensors), an
            :class:`InProcessGroup`, or None for one rank; as large as the partition's world size.
            Beside a group that uses NCCL the first context makes a communicator of NCCL of this
            library's own, which stays until the process ends (``GDN_COLLECTIVES=torch``: none, the calls'
            collectives are torch's; ``nccl``: an error where it cannot be), and beside one of NCCL
            alone a backend of gloo to agree over.
        rank: this rank in the group.
        device: where the tensors of the calls are.
        conv_kernel_size: taps of :func:`causal_conv1d` (at most), 1 to 8.
        max_tokens, max_fragments: capacity for other packings (:meth:`Context.refill`), the same on
            every rank: rows and fragments of any rank (and world_size * max_fragments documents,
            with and without tokens). Operands then have max_tokens rows, those past the packing's
            are slack, and initial and final states have a row for every document of the capacity.
            One of them alone: the other is what this partition needs.
        tile: tokens, a multiple of 64, the same on every rank: o and all gradients are then bitwise
            the same over every number of ranks and every layout, a refill's too, whose cuts are
            multiples of the tile from the start of their document. 0: segments as is fastest.

    Raises:
        InvalidArgumentError: on every rank, also if the ranks brought different partitions.
    """
    member = member_of(group, rank)
    error: Exception | None = None
    context, digest = None, 0
    try:
        _check_partition(partition)
        collectives_asked()
        digest = partition.digest
        check_member(member, rank, partition.world_size)
        if not isinstance(conv_kernel_size, int) or not 1 <= conv_kernel_size <= 8:
            raise InvalidArgumentError(
                f"conv_kernel_size: expected 1 to 8, got {conv_kernel_size!r}"
            )
        capacity = _capacity(partition, max_tokens, max_fragments)
        for value in (*capacity, int64("tile", tile, "0 or a multiple of 64")):
            digest = (digest * 0x100000001B3 + value) & ((1 << 62) - 1)
        context = Context(
            partition, member, usable_device(device), conv_kernel_size, *capacity, tile
        )
    except Exception as raised:  # noqa: BLE001: the other ranks wait to hear of any
        error = typed(raised)
    except BaseException as interrupt:
        member.give_up(interrupt)
        raise
    member.agree(error, digest, "tile, capacity or partition")
    member.open(context.device)
    return context


class Bytes(NamedTuple):
    """Byte counts of one shape of heads on one rank."""

    forward: int  # workspace of a forward
    backward: int  # workspace of a backward that has a saved set
    recompute: int  # workspace of a backward without one
    saved: int  # what a forward keeps for its backward, beyond its inputs
    sent_forward: int  # handed to other ranks
    sent_backward: int


def call_bytes(
    ctx: Context,
    *,
    H_qk: int,
    HV: int,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    use_qk_l2norm_in_kernel: bool = False,
    exchange: str = "auto",
    save_mode: str = "light",
) -> Bytes:
    """All byte counts of calls with these shapes; the functions below give one each."""
    like = torch.empty(0, dtype=dtype, device=ctx.device)
    flags = int(use_qk_l2norm_in_kernel) | exchange_flags(exchange) | save_flags(save_mode)
    try:
        table = ops.query(
            ctx.handle, ctx.rows, H_qk, HV, head_dim, head_dim_v or head_dim, like, None,
            flags,
        )
    except RuntimeError as error:
        raise typed(error) from None
    return Bytes(*table.tolist()[:6])


def workspace_bytes(
    ctx: Context, *, H_qk: int, HV: int, backward: bool = True, save_for_backward: bool = True,
    **shape,
) -> int:
    """Bytes of a :class:`Workspace` that serves the forward and, with ``backward``, the backward.

    ``save_for_backward=False`` makes room for a backward that recomputes the summaries.
    ``shape``: ``head_dim``, ``head_dim_v``, ``dtype``, ``use_qk_l2norm_in_kernel``, ``exchange``,
    ``save_mode``.
    """
    b = call_bytes(ctx, H_qk=H_qk, HV=HV, **shape)
    last = b.backward if save_for_backward else b.recompute
    return max(b.forward, last) if backward else b.forward


def saved_bytes(ctx: Context, *, H_qk: int, HV: int, save_mode: str = "light", **shape) -> int:
    """Bytes that a forward keeps for its backward beside its inputs: boundary states and maps.

    ``(S_in slots * V + (M slots + received) * K) * K * HV`` elements of fp32 (fp64 for fp64), each
    table rounded up to 256 bytes; slots: segments that do not start their document, or do neither
    start nor end it. 0 where every document is one segment.

    ``save_mode="light_akk"`` adds what chunks are prepared as, which leaves the workspace of the
    backward: per chunk of 64 tokens ``5120 HV + 512 H_qk`` bytes on cuda-sm90a (3.98 KiB a token at
    16/48 heads), ``17924 HV + 512 H_qk`` on cuda-portable (13.3), and ``17152 HV`` on the CPU (12.6;
    twice that for fp64), each array rounded up to 256 bytes.
    """
    return call_bytes(ctx, H_qk=H_qk, HV=HV, save_mode=save_mode, **shape).saved


def comm_bytes(ctx: Context, *, H_qk: int, HV: int, backward: bool = True, **shape) -> int:
    """Bytes that this rank hands to other ranks in a forward and, with ``backward``, a backward.

    They depend on the documents that cross ranks and on the heads, not on document lengths.
    """
    b = call_bytes(ctx, H_qk=H_qk, HV=HV, **shape)
    return b.sent_forward + (b.sent_backward if backward else 0)


class Workspace:
    """Memory that a caller keeps for calls in turn: ``Workspace(workspace_bytes(ctx, ...))``.

    One call at a time uses it. Without one, a call allocates its own from torch's allocator. It
    also keeps the graphs of calls with ``graph="replay"``, and their copies of inputs and outputs.
    """

    def __init__(self, nbytes: int, device="cpu"):
        nbytes = int64("nbytes", nbytes)
        if nbytes < 0:
            raise InvalidArgumentError(f"nbytes: expected at least 0, got {nbytes}")
        block = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        self.block = block.narrow(0, -block.data_ptr() % _ALIGNMENT, nbytes)
        self.replays = Replays()

    def __reduce_ex__(self, protocol):
        raise UnsupportedError(
            "Workspace: expected to stay where it is, got copied or pickled; make another of its nbytes"
        )

    @property
    def nbytes(self) -> int:
        return self.block.numel()


class RecomputeHandle:
    """Keeps the boundary states of a checkpointed forward, so that its recompute needs no collective.

    Make one per checkpointed call, outside the checkpoint, and pass it through::

        handle = gdn_kcp.RecomputeHandle()
        o = checkpoint(lambda *x: chunk_gdn_kcp(*x, ctx, recompute_handle=handle), ...)

    The first forward fills it, the recompute empties it; a third forward with it is an error, since
    its inputs may be others. :meth:`reset` makes it new. It holds :func:`saved_bytes` of the calls'
    ``save_mode`` meanwhile.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets what is kept; the next forward fills it again."""
        self._saved: torch.Tensor | None = None
        self._key: CallKey | None = None
        self._state = "new"
        self.number = 0  # autograd.Call's, of the first forward

    def take(self, key: CallKey) -> torch.Tensor | None:
        """What the first forward kept, once; None if this is the first."""
        if self._state == "new":
            return None
        if self._state == "used":
            raise InvalidArgumentError(
                "recompute_handle: expected a new one, got one that a forward and its recompute used"
            )
        key.check(self._key, "recompute_handle: expected the shapes and options")
        saved, self._saved, self._state = self._saved, None, "used"
        return saved

    def keep(self, key: CallKey, saved: torch.Tensor, number: int) -> None:
        """Called by the forward that fills it."""
        self._saved, self._key, self._state, self.number = saved, key, "filled", number
