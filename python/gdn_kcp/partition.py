"""Who holds which tokens: one host-side object from the global ``cu_seqlens``, equal on all ranks."""

from __future__ import annotations

import weakref
from typing import NamedTuple, Sequence

import torch

from ._library import ops
from .errors import InvalidArgumentError, int64, typed

_MOST_RANKS = 1 << 20  # kMaxWorldSize of src/plan
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "explicit")


class Fragment(NamedTuple):
    """Tokens ``[offset, offset + length)`` of document ``doc``, held by one rank."""

    doc: int
    offset: int
    length: int


class Crossing(NamedTuple):
    """A local fragment of a document that several fragments share; -1: there is no neighbour."""

    fragment: int
    predecessor_rank: int
    predecessor_fragment: int
    successor_rank: int
    successor_fragment: int


class Partition:
    """Made by :func:`partition`; immutable, reused by every layer of a step, picklable."""

    def __init__(self, cu_seqlens: torch.Tensor, world_size: int, layout: str, cut_points, table):
        self._made_from = (cu_seqlens, world_size, layout, cut_points, table)
        try:
            self.handle: int = ops.partition_create(
                cu_seqlens, world_size, layout, cut_points, table
            )
        except RuntimeError as error:
            raise typed(error) from None
        weakref.finalize(self, ops.partition_free, self.handle).atexit = False
        self.cu_seqlens = cu_seqlens  # global, [N + 1] int64 on the CPU
        self.world_size = world_size
        self.layout = layout
        self.num_documents = cu_seqlens.numel() - 1
        self.num_tokens = int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
        self.digest: int = ops.partition_digest(self.handle)

    def __reduce__(self):
        return Partition, self._made_from

    def __repr__(self) -> str:
        counts = (
            (self.num_documents, "document"), (self.num_tokens, "token"), (self.world_size, "rank"))
        counted = ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts)
        return f"Partition({counted}, {self.layout})"

    def _table(self, op, rank: int, *more) -> torch.Tensor:
        try:
            return op(self.handle, rank, *more)
        except RuntimeError as error:
            raise typed(error) from None

    def fragments(self, rank: int) -> list[Fragment]:
        """The rank's fragments in local order; its rows are their concatenation."""
        return [Fragment(*row) for row in self._table(ops.partition_fragments, rank).tolist()]

    def local_cu_seqlens(self, rank: int) -> torch.Tensor:
        """Where the rank's fragments begin among its rows: ``[fragments + 1]`` int64, CPU."""
        return self._table(ops.partition_local_cu, rank)

    def token_indices(self, rank: int) -> torch.Tensor:
        """The global row of every local row, ``[rows]`` int64, CPU: ``local = x[:, indices]``."""
        return self._table(ops.partition_tokens, rank)

    def local_tokens(self, rank: int) -> int:
        """How many rows the rank holds."""
        return int(self.local_cu_seqlens(rank)[-1])

    def crossing(self, rank: int) -> list[Crossing]:
        """The rank's fragments of documents that several fragments share, and their neighbours."""
        return [Crossing(*row) for row in self._table(ops.partition_crossing, rank).tolist()]

    def halo(self, rank: int, width: int) -> torch.Tensor:
        """Rows that a causal convolution of ``width`` taps needs from before the rank's fragments.

        ``[runs, 5]`` int64: (local fragment, distance of the run's first row from the fragment,
        length, owner rank, first row at the owner).
        """
        return self._table(ops.partition_halo, rank, width)

    def draw(self, width: int = 100) -> str:
        """A drawing, one bar per rank, for a terminal of ``width`` columns."""
        return ops.partition_draw(self.handle, width)


def _host_ints(name: str, values) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(values, dtype=None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name}: expected integers, got {values!r}") from error
    if tensor.numel() == 0:
        tensor = tensor.long()
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(
            f"{name}: expected one dimension of int32 or int64, got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    return tensor.detach().to(device="cpu", dtype=torch.int64, copy=True)


def partition(
    cu_seqlens_global: torch.Tensor | Sequence[int],
    world_size: int,
    layout: str = "contiguous",
    fragments: Sequence[Sequence[Sequence[int]]] | None = None,
    *,
    cut_points: Sequence[Sequence[int]] | None = None,
) -> Partition:
    """Cuts packed documents over ranks. No token count needs to divide anything.

    Args:
        cu_seqlens_global: ``[N + 1]`` int32 or int64 (tensor or list), in tokens: first 0, not
            decreasing; equal neighbours are an empty document.
        world_size: ranks W, at least 1.
        layout: ``"contiguous"`` (the stream cut in W), ``"zigzag"`` (in 2 W; rank r holds part r,
            then 2 W - 1 - r), ``"zigzag_per_document"`` (every document in 2 W), ``"explicit"``.
        fragments: with ``"explicit"``: per rank a list of ``(doc, offset, length)`` in local order;
            together they tile every document exactly once.
        cut_points: with ``"zigzag_per_document"``: per document 2 W + 1 offsets from 0 to its length.

    Returns:
        The same :class:`Partition` on every rank.

    Raises:
        InvalidArgumentError: naming the first offending entry.

    Source: include/gdn/partition.h, src/plan.
    """
    cu = _host_ints("cu_seqlens_global", cu_seqlens_global)
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise InvalidArgumentError(f"world_size: expected an int, got {world_size!r}")
    if not 1 <= world_size <= _MOST_RANKS:
        raise InvalidArgumentError(f"world_size: expected 1 to {_MOST_RANKS}, got {world_size}")
    if (layout == "explicit") != (fragments is not None):
        raise InvalidArgumentError(
            "fragments: expected with layout 'explicit', and only with it; "
            f"got layout {layout!r} {'with' if fragments is not None else 'without'} fragments"
        )
    if cut_points is not None and layout != "zigzag_per_document":
        raise InvalidArgumentError(
            f"cut_points: expected with layout 'zigzag_per_document' only, got layout {layout!r}"
        )
    cuts = None
    if cut_points is not None:
        cuts = _checked_cuts(cut_points, cu.numel() - 1, world_size)
    table = _fragment_table(fragments, world_size) if fragments is not None else None
    return Partition(cu, world_size, layout, cuts, table)


def _list(name: str, values, what: str) -> list:
    if isinstance(values, (str, bytes)):
        raise InvalidArgumentError(f"{name}: expected {what}, got {values!r}")
    try:
        return list(values)
    except TypeError:
        raise InvalidArgumentError(f"{name}: expected {what}, got {values!r}") from None


def _checked_cuts(cut_points, documents: int, world_size: int) -> torch.Tensor:
    lists = _list("cut_points", cut_points, "a list of offsets for each document")
    if len(lists) != documents:
        raise InvalidArgumentError(
            f"cut_points: expected {documents} lists, one per document, got {len(lists)}"
        )
    table = []
    for doc, points in enumerate(lists):
        points = _list(f"cut_points[{doc}]", points, f"{2 * world_size + 1} offsets")
        if len(points) != 2 * world_size + 1:
            raise InvalidArgumentError(
                f"cut_points[{doc}]: expected {2 * world_size + 1} offsets, got {len(points)}"
            )
        table += [int64(f"cut_points[{doc}][{i}]", point) for i, point in enumerate(points)]
    return torch.tensor(table, dtype=torch.int64)


def _fragment_table(fragments, world_size: int) -> torch.Tensor:
    lists = _list("fragments", fragments, f"{world_size} lists, one per rank")
    if len(lists) != world_size:
        raise InvalidArgumentError(
            f"fragments: expected {world_size} lists, one per rank, got {len(lists)}"
        )
    rows = []
    for rank, local in enumerate(lists):
        local = _list(f"fragments[{rank}]", local, "a list of (doc, offset, length)")
        for i, fragment in enumerate(local):
            name = f"fragments[{rank}][{i}]"
            numbers = _list(name, fragment, "(doc, offset, length)")
            if len(numbers) != 3:
                raise InvalidArgumentError(
                    f"{name}: expected (doc, offset, length), got {fragment!r}"
                )
            rows.append([rank, *(int64(name, number) for number in numbers)])
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
