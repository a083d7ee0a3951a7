"""The operator over context-parallel ranks: autograd, and its explicit halves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._library import L2NORM, exchange_flags, ops, save_flags
from .autograd import (
    Call,
    apply,
    autocast,
    check_deterministic,
    check_packing,
    check_tensors,
    refuse,
    run_backward,
    run_forward,
)
from .context import CallKey, Context, RecomputeHandle, Workspace
from .errors import InvalidArgumentError
from .members import interrupted
from .packed import row_of
from .replay import why_not
from .untraced import untraced, untraced_when_compiling


class Saved(NamedTuple):
    """What an explicit forward keeps for its backward."""

    block: torch.Tensor
    key: CallKey  # that the backward must have too
    refills: int  # of its context
    save_mode: str = "light"
    number: int = 0  # autograd.Call's, of the forward


def _flags(ctx, use_qk_l2norm_in_kernel, deterministic, exchange, graph) -> int:
    if not isinstance(ctx, Context):
        raise InvalidArgumentError(f"ctx: expected a gdn_kcp.Context, got {type(ctx).__name__}")
    check_deterministic(deterministic)
    if graph not in ("off", "replay"):
        raise InvalidArgumentError(f"graph: expected 'off' or 'replay', got {graph!r}")
    return (L2NORM if use_qk_l2norm_in_kernel else 0) | exchange_flags(exchange)


def _block(workspace) -> torch.Tensor | None:
    if workspace is None:
        return None
    if not isinstance(workspace, Workspace):
        raise InvalidArgumentError(
            f"workspace: expected a gdn_kcp.Workspace, got {type(workspace).__name__}"
        )
    return workspace.block


def _replays(ctx: Context, workspace, graph: str):
    """The graphs that the call is captured in or replayed from; None: neither."""
    if graph == "off":
        return None
    error = why_not(ctx, workspace)
    if error is not None:
        raise error
    return workspace.replays


def chunk_gdn_kcp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    ctx: Context,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    deterministic: bool | None = None,
    save_mode: str = "light",
    exchange: str = "auto",
    workspace: Workspace | None = None,
    graph: str = "off",
    recompute_handle: RecomputeHandle | None = None,
) -> torch.Tensor:
    """The gated delta rule over the ranks of a context; every rank calls it with its own rows.

    Args:
        q, k: ``[1, T, H, K]`` or ``[T, H, K]``, bf16, on a CPU fp32 or fp64 too; T the rank's local
            tokens, in the order of ``ctx.partition.token_indices(rank)``.
        v: ``[.., T, HV, V]`` like q; on a GPU K = V = 64 or 128 (:func:`chunk_gated_delta_rule` with
            ``cp_context`` pads others). g, beta: ``[.., T, HV]`` fp32, bf16 or fp64.
        ctx: from :func:`build_context`.
        scale: default ``K ** -0.5``.
        use_qk_l2norm_in_kernel: q and k times ``rsqrt(sum of squares + 1e-6)`` inside.
        deterministic: accepted; every path is deterministic.
        save_mode: ``"light"`` keeps boundary states for the backward (:func:`saved_bytes`),
            ``"light_akk"`` also what each chunk of 64 tokens was prepared as (inverse, gates,
            norms), which the backward else makes again, ``"none"`` keeps nothing and makes (and
            exchanges) all of it again. The results are the same bits; one rank may keep
            ``"light"`` and another ``"light_akk"``.
        exchange: ``"auto"`` (by bytes), ``"allgather"`` or ``"a2a"``; the same on every rank.
        workspace: a :class:`Workspace` of :func:`workspace_bytes`, or None to allocate one.
        graph: ``"off"``, or ``"replay"`` (CUDA): the first call of a kind is captured in a CUDA graph
            that ``workspace`` keeps, and so is its backward; later ones are replayed, also with
            another packing of the context's capacity (:meth:`Context.refill`). A kind is shapes,
            dtypes, options, gradient layout and the context. Inputs are copied in and results out,
            which a graph of the caller's own, by ``torch.cuda.graph``, spares.
        recompute_handle: see :class:`RecomputeHandle`.

    Returns:
        o like v.

    Raises:
        InvalidArgumentError, UnsupportedError, WorkspaceTooSmallError: the same error on every rank,
        before the first collective. PeerFailedError: another rank is gone or does not come in time.

    Source: docs/architecture.md, src/driver/call.cc.
    """
    if torch.compiler.is_compiling() and not _traceable(ctx):
        return _untraced(
            q, k, v, g, beta, ctx, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            deterministic=deterministic, save_mode=save_mode, exchange=exchange, workspace=workspace,
            graph=graph, recompute_handle=recompute_handle,
        )
    try:
        check_tensors(q, k, v, g, beta)
        q, k, v = autocast(q.device.type, q, k, v)
        flags = _flags(ctx, use_qk_l2norm_in_kernel, deterministic, exchange, graph)
        flags |= save_flags(save_mode, "none")
        block = _block(workspace)
        replays = _replays(ctx, workspace, graph)
        if recompute_handle is not None and not isinstance(recompute_handle, RecomputeHandle):
            raise InvalidArgumentError(
                "recompute_handle: expected a gdn_kcp.RecomputeHandle, got "
                f"{type(recompute_handle).__name__}"
            )
        if recompute_handle is not None and save_mode == "none":
            raise InvalidArgumentError(
                "recompute_handle: expected save_mode 'light' or 'light_akk', which it keeps, got 'none'"
            )
    except BaseException as error:  # the other ranks wait to hear of any
        refuse(ctx, error, "forward")
    try:
        if torch.compiler.is_compiling():
            return ops.chunk(
                q, k, v, g, beta, None, None, None, ctx.partition.cu_seqlens, scale, flags, False
            )[0]
        call = Call(ctx, None, scale, flags, False, block, save_mode != "none")
        call.handle = recompute_handle
        call.replays = replays
        return apply(call, q, k, v, g, beta, None, None, None)[0]
    except BaseException as error:
        interrupted(ctx, error)
        raise


_untraced = untraced(chunk_gdn_kcp)


def _traceable(ctx) -> bool:
    """Whether a call is that of one rank, without a process group, which torch.compile traces."""
    if not isinstance(ctx, Context) or ctx.world_size > 1 or ctx.tile:
        return False
    return ctx.partition.layout != "explicit"


@untraced_when_compiling
def chunk_gdn_kcp_forward(
    q, k, v, g, beta, ctx: Context, *, scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False, deterministic: bool | None = None,
    exchange: str = "auto", workspace: Workspace | None = None, graph: str = "off",
    save_for_backward: bool = True, save_mode: str = "light",
) -> tuple[torch.Tensor, Saved | None]:
    """The forward half of :func:`chunk_gdn_kcp`, without autograd: o, and what its backward needs.

    ``save_mode``: ``"light"`` or ``"light_akk"``, of the saved set.
    """
    try:
        check_tensors(q, k, v, g, beta)
        flags = _flags(ctx, use_qk_l2norm_in_kernel, deterministic, exchange, graph)
        key = CallKey.of(ctx, q, v, scale, flags)
        flags |= save_flags(save_mode)
        block = _block(workspace)
        replays = _replays(ctx, workspace, graph)
    except BaseException as error:  # the other ranks wait to hear of any
        refuse(ctx, error, "forward")
    try:
        call = Call(ctx, None, scale, flags, False, block, save_for_backward)
        call.replays = replays
        with torch.no_grad():
            inputs = (q, k, v, g, beta, None, None, None)
            o, _, saved = run_forward(call, inputs, save_for_backward)
        if not save_for_backward:
            return o, None
        return o, Saved(saved, key, ctx.refills, save_mode, call.number)
    except BaseException as error:
        interrupted(ctx, error)
        raise


@untraced_when_compiling
def chunk_gdn_kcp_backward(
    q, k, v, g, beta, ctx: Context, do: torch.Tensor, *, saved: Saved | None = None,
    scale: float | None = None, use_qk_l2norm_in_kernel: bool = False,
    deterministic: bool | None = None, exchange: str = "auto",
    workspace: Workspace | None = None, graph: str = "off",
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, dg, dbeta of :func:`chunk_gdn_kcp`, without autograd.

    ``saved=None`` makes the boundary states again, with their exchange. Where q, k, v are the
    columns of one dense row, by pointers and strides, so are dq, dk, dv; otherwise they are three
    contiguous tensors. ``do`` may have any strides. Options must be those of the forward.
    """
    try:
        check_tensors(q, k, v, g, beta)
        flags = _flags(ctx, use_qk_l2norm_in_kernel, deterministic, exchange, graph)
        workspace_block = _block(workspace)
        replays = _replays(ctx, workspace, graph)
        if saved is not None and not isinstance(saved, Saved):
            raise InvalidArgumentError(
                f"saved: expected what chunk_gdn_kcp_forward returned, got {type(saved).__name__}"
            )
        key = CallKey.of(ctx, q, v, scale, flags)
        if saved is not None:
            check_packing(ctx, saved.refills)
            key.check(saved.key, "saved: expected the set")
            flags |= save_flags(saved.save_mode)
    except BaseException as error:  # the other ranks wait to hear of any
        refuse(ctx, error, "backward", saved.number if isinstance(saved, Saved) else 0)
    try:
        call = Call(ctx, None, scale, flags, False, workspace_block, saved is not None)
        call.replays = replays
        call.number = saved.number if saved is not None else 0
        with torch.no_grad():
            block = saved.block if saved is not None else None
            packed = row_of(q, k, v) is not None
            inputs = (q, k, v, g, beta, None, None, None)
            return tuple(run_backward(call, inputs, do, None, block, packed)[:5])
    except BaseException as error:
        interrupted(ctx, error)
        raise
