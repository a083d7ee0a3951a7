"""q, k, v as views of one projected row, without a concatenation in the backward."""

from __future__ import annotations

from typing import Any

import torch

from .errors import InvalidArgumentError


def _columns(row: torch.Tensor, first: int, heads: int, dim: int) -> torch.Tensor:
    return row.narrow(-1, first, heads * dim).unflatten(-1, (heads, dim))


def columns_of(row: torch.Tensor, heads_qk: int, heads_v: int, dim: int) -> tuple:
    """q, k, v of one row, as head views."""
    qk = heads_qk * dim
    return (
        _columns(row, 0, heads_qk, dim),
        _columns(row, qk, heads_qk, dim),
        _columns(row, 2 * qk, heads_v, dim),
    )


def _strided_columns(row: torch.Tensor, heads_qk: int, heads_v: int, dim: int) -> tuple:
    """As `columns_of`, in half the operations: each costs the host microseconds."""
    lead, step, at = row.shape[:-1], heads_qk * dim, row.storage_offset()
    strides = (*row.stride()[:-1], dim, 1)
    shape = (*lead, heads_qk, dim)
    return (
        row.as_strided(shape, strides, at),
        row.as_strided(shape, strides, at + step),
        row.as_strided((*lead, heads_v, dim), strides, at + 2 * step),
    )


def row_of(q, k, v) -> torch.Tensor | None:
    """The dense row that q, k, v are the columns of, in order; None if they are not."""
    # What refuses three tensors of their own comes first, and the storages, which cost most, last.
    *lead, heads, dim = shape = q.shape
    step = heads * dim
    at, bytes_ = q.data_ptr(), step * q.element_size()
    if k.data_ptr() != at + bytes_ or v.data_ptr() != at + 2 * bytes_:
        return None
    if k.shape != shape or v.shape[:-2] != shape[:-2] or v.shape[-1] != dim:
        return None
    if q.dtype != k.dtype or q.dtype != v.dtype or q.numel() == 0 or v.numel() == 0:
        return None
    columns = 2 * step + v.shape[-2] * dim
    strides = [1] * (len(lead) + 1)
    for i in range(len(lead), 0, -1):
        strides[i - 1] = strides[i] * (lead[i] if i < len(lead) else columns)
    wanted = (*strides[:-1], dim, 1)
    for t in (q, k, v):
        # Where the size is 1 the stride means nothing.
        if t.stride() != wanted and any(
            n != 1 and a != b for n, a, b in zip(t.shape, t.stride(), wanted)
        ):
            return None
    storage = q.untyped_storage().data_ptr()
    if k.untyped_storage().data_ptr() != storage or v.untyped_storage().data_ptr() != storage:
        return None
    return q.as_strided((*lead, columns), strides, q.storage_offset())


class PackedViews(torch.autograd.Function):
    """One node with three outputs; its gradient is the row that the three gradients are views of."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, heads_qk: int, heads_v: int, dim: int):
        ctx.set_materialize_grads(False)
        ctx.shape = qkv.shape
        ctx.split = (heads_qk, heads_v, dim)
        ctx.dtype, ctx.device = qkv.dtype, qkv.device
        ctx.gdn_dense_row = qkv.is_contiguous()  # read by autograd.is_packed_row
        return _strided_columns(qkv, heads_qk, heads_v, dim)

    @staticmethod
    def backward(ctx: Any, dq, dk, dv):
        if torch.is_grad_enabled():  # create_graph: what can be differentiated
            return _concatenated(ctx, dq, dk, dv), None, None, None
        return _gradient(ctx, dq, dk, dv), None, None, None


def _concatenated(ctx: Any, dq, dk, dv) -> torch.Tensor:
    heads_qk, heads_v, dim = ctx.split
    parts = [
        torch.zeros((*ctx.shape[:-1], heads * dim), dtype=ctx.dtype, device=ctx.device)
        if gradient is None
        else gradient.flatten(-2)
        for gradient, heads in ((dq, heads_qk), (dk, heads_qk), (dv, heads_v))
    ]
    return torch.cat(parts, -1)


def _gradient(ctx: Any, dq, dk, dv) -> torch.Tensor:
    if dq is not None and dk is not None and dv is not None:
        row = row_of(dq, dk, dv)
        if row is not None and row.shape == ctx.shape:
            return row
    heads_qk, heads_v, dim = ctx.split
    row = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
    first = 0
    for gradient, heads in ((dq, heads_qk), (dk, heads_qk), (dv, heads_v)):
        columns = _columns(row, first, heads, dim)
        columns.zero_() if gradient is None else columns.copy_(gradient)
        first += heads * dim
    return row


def packed_qkv_views(
    qkv: torch.Tensor, *, H_qk: int, HV: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as head views of one row: no copy, and no concatenation in the backward.

    Args:
        qkv: ``[.., T, (2 H_qk + HV) * D]`` with unit innermost stride, any dtype.
        H_qk, HV: key and value heads; D follows from the row.

    Returns:
        q, k ``[.., T, H_qk, D]``, v ``[.., T, HV, D]``: the outputs of one autograd node. Given to
        an operator of this package in this order, the gradients of q, k, v come back as views of
        one row, which becomes the gradient of ``qkv`` as it is. Where a gradient is missing (zeros)
        or was replaced by a hook, they are concatenated. Values are bitwise the same in every form.

    Raises:
        InvalidArgumentError: naming ``qkv``, ``H_qk`` or ``HV``. Autograd refuses an in-place change
            of a view while ``qkv`` requires grad.

    Source: packed.py.
    """
    if not isinstance(qkv, torch.Tensor):
        raise InvalidArgumentError(f"qkv: expected a tensor, got {type(qkv).__name__}")
    for name, heads in (("H_qk", H_qk), ("HV", HV)):
        if not isinstance(heads, int) or heads < 1:
            raise InvalidArgumentError(f"{name}: expected an int of at least 1, got {heads!r}")
    if HV % H_qk:
        raise InvalidArgumentError(f"HV: expected a multiple of H_qk = {H_qk}, got {HV}")
    heads = 2 * H_qk + HV
    if qkv.dim() < 2 or qkv.shape[-1] % heads or qkv.shape[-1] == 0:
        raise InvalidArgumentError(
            f"qkv: expected [.., T, (2 H_qk + HV) * D = {heads} * D], got {list(qkv.shape)}"
        )
    if qkv.stride(-1) != 1:
        raise InvalidArgumentError(f"qkv: expected stride(-1) 1, got {qkv.stride(-1)}")
    dim = qkv.shape[-1] // heads
    if torch.compiler.is_compiling():  # the compiler plans gradients itself
        return columns_of(qkv, H_qk, HV, dim)
    return PackedViews.apply(qkv, H_qk, HV, dim)
