"""The names and arguments of FlashInfer's Blackwell-only KCP package: its users change one import.

    from gdn_kcp.compat import flashinfer as kcp
    kcp.cake_gdn_det_kcp(q, k, v, g, beta, ctx)

``det`` sets deterministic=True (every path here is deterministic). Arguments that only steer that
package's kernels are accepted at their default and refused otherwise, by name.
"""

from __future__ import annotations

import inspect
from typing import Any

from .. import context as _context
from .. import info as _info
from .. import kcp as _kcp
from .. import packed as _packed
from ..partition import partition as _partition
from ..errors import UnsupportedError

# Defaults of the arguments that only steer that package's kernels.
_CALL = dict(boundary_mode="saved", options=None, save_transfer=True, precision_mode=0,
             transfer_walk="tf32_hilo", offset_class="fla", layout="tma", group_reduce="fused",
             reuse_recompute_tapes=None, recompute_output="auto", backend="kernels", segments=None,
             test_knobs=None)
_BYTES = dict(boundary_mode="saved", save_transfer=True, C=None, P=None, group_reduce="fused",
              reuse_recompute_tapes=None, fused_walks=1, graph="off")
_FREE = ("with_conv",)  # accepted with any value: no effect on memory here


def _at_default(name: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    for argument, value in given.items():
        if argument in _FREE:
            continue
        if argument not in defaults:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        if value != defaults[argument]:
            raise UnsupportedError(
                f"{argument}: expected its default {defaults[argument]!r}, got {value!r}"
            )


def _save_mode(save_mode: str | None) -> str:
    if save_mode not in (None, "light", "light_akk"):
        raise UnsupportedError(f"save_mode: expected 'light' or 'light_akk', got {save_mode!r}")
    return save_mode or "light"


def _make(X: str) -> dict[str, Any]:
    """The functions of one of the two packages, by name."""
    deterministic = True if X == "det" else None
    prefix = f"cake_gdn_{X}_train_kcp"

    def partition(cu_seqlens_global_cpu, world_size, layout="contiguous", fragments=None, *,
                  cut_points=None):
        return _partition(
            cu_seqlens_global_cpu, world_size, layout, fragments, cut_points=cut_points)

    def build_context(part, group, rank, device, conv_kernel_size=4, *, sm_count=None, **more):
        allowed = {"graph_replay": False} if X == "nondet" else {}
        _at_default("build_context", {"sm_count": sm_count, **more}, {"sm_count": None, **allowed})
        return _context.build_context(part, group, rank, device, conv_kernel_size)

    def call(q, k, v, g, beta, ctx, *, scale=None, save_mode="light" if X == "det" else None,
             workspace=None, graph="off", recompute_handle=None, use_qk_l2norm_in_kernel=False,
             exchange="a2a", **steering):
        _at_default(f"cake_gdn_{X}_kcp", steering, _CALL)
        return _kcp.chunk_gdn_kcp(
            q, k, v, g, beta, ctx, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            deterministic=deterministic, save_mode=_save_mode(save_mode), exchange=exchange,
            workspace=workspace, graph=graph, recompute_handle=recompute_handle)

    def forward(q, k, v, g, beta, ctx, *, scale=None, save_mode=None, workspace=None, graph="off",
                use_qk_l2norm_in_kernel=False, exchange="a2a", save_for_backward=True, **steering):
        _at_default(f"{prefix}_forward", steering, _CALL)
        return _kcp.chunk_gdn_kcp_forward(
            q, k, v, g, beta, ctx, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            deterministic=deterministic, exchange=exchange, workspace=workspace, graph=graph,
            save_for_backward=save_for_backward, save_mode=_save_mode(save_mode))

    def backward(q, k, v, g, beta, ctx, do, *, saved=None, scale=None, save_mode=None,
                 workspace=None, graph="off", use_qk_l2norm_in_kernel=False, exchange="a2a",
                 **steering):
        _at_default(f"{prefix}_backward", steering, _CALL)
        kept = getattr(saved, "save_mode", None)
        if save_mode is not None and kept not in (None, _save_mode(save_mode)):
            raise UnsupportedError(
                f"save_mode: expected {kept!r}, as in the forward that kept saved, got {save_mode!r}"
            )
        return _kcp.chunk_gdn_kcp_backward(
            q, k, v, g, beta, ctx, do, saved=saved, scale=scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, deterministic=deterministic,
            exchange=exchange, workspace=workspace, graph=graph)

    def packed_qkv_views(qkv, *, H_qk, HV):
        return _packed.packed_qkv_views(qkv, H_qk=H_qk, HV=HV)

    def workspace_bytes(ctx, *, H_qk, HV, save_mode=None, backward=True, save_for_backward=True,
                        use_qk_l2norm_in_kernel=False, **steering):
        _at_default(f"{prefix}_workspace_bytes", steering, _BYTES)
        return _context.workspace_bytes(
            ctx, H_qk=H_qk, HV=HV, backward=backward, save_for_backward=save_for_backward,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, save_mode=_save_mode(save_mode))

    def saved_bytes(ctx, *, H_qk, HV, save_mode=None, **steering):
        _at_default(f"{prefix}_saved_bytes", steering, _BYTES)
        return _context.saved_bytes(ctx, H_qk=H_qk, HV=HV, save_mode=_save_mode(save_mode))

    def comm_bytes(ctx, *, H_qk, HV, backward=True, exchange="a2a", **steering):
        _at_default(f"{prefix}_comm_bytes", steering, _BYTES)
        return _context.comm_bytes(ctx, H_qk=H_qk, HV=HV, backward=backward, exchange=exchange)

    def is_supported(device):
        return _info.is_supported(device)

    made = {
        f"{prefix}_partition": partition,
        f"{prefix}_build_context": build_context,
        f"cake_gdn_{X}_kcp": call,
        f"{prefix}_forward": forward,
        f"{prefix}_backward": backward,
        f"{prefix}_packed_qkv_views": packed_qkv_views,
        f"{prefix}_workspace_bytes": workspace_bytes,
        f"{prefix}_saved_bytes": saved_bytes,
        f"{prefix}_comm_bytes": comm_bytes,
        f"is_{prefix}_supported": is_supported,
    }
    for name, function in made.items():
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"See gdn_kcp; arguments {inspect.signature(function)}."
    return made


globals().update(_make("det"))
globals().update(_make("nondet"))

# Earlier names of the same functions.
chunk_gdn_kcp = globals()["cake_gdn_nondet_kcp"]
packed_qkv_views_kcp = globals()["cake_gdn_nondet_train_kcp_packed_qkv_views"]
chunk_gdn_det_kcp = globals()["cake_gdn_det_kcp"]
packed_qkv_views_det_kcp = globals()["cake_gdn_det_train_kcp_packed_qkv_views"]
