"""Registers the operator as a backend of FLA's own dispatch (fla-core 0.6).

After ``enable()`` every FLA layer, model and training script runs on it; calls that it does not
take are refused with a reason, which FLA logs, and stay with FLA. ``disable()`` removes it. FLA's
context-parallel contexts, contiguous and zigzag, are translated into ours: their ranks gather the
document boundaries once per context.
"""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from ..chunk import CHUNK_SIZES, chunk_gated_delta_rule
from ..context import Context, build_context
from ..errors import MissingPackageError
from ..head_dims import CUDA_DIMS
from ..info import backends
from ..partition import partition

_OPERATION = "gated_delta_rule"
_TYPE = "gdn_kcp"
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_KNOWN = {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_indices", "chunk_size"}


def _parts(cp) -> list[tuple[int, bool, list[int]]]:
    """(place in the stream, whether a document starts it, its offsets) of a rank's one or two parts."""
    offsets = (cp.cu_seqlens if cp.cu_seqlens_cpu is None else cp.cu_seqlens_cpu).tolist()
    rank, size = dist.get_rank(cp.group), dist.get_world_size(cp.group)
    if cp.layout == "contiguous":
        return [(rank, bool(cp.is_first_rank), offsets)]
    front = offsets[: cp.front_num_seqs + 1]
    back = [at - cp.part_len for at in offsets[cp.front_num_seqs :]]
    first = cp.is_first_by_part
    return [(rank, bool(first[0]), front), (2 * size - 1 - rank, bool(first[1]), back)]


def global_cu_seqlens(gathered: list[list[tuple[int, bool, list[int]]]]) -> list[int]:
    """The offsets of whole documents from the parts of all ranks."""
    cu, at = [], 0
    for _, starts, offsets in sorted(part for parts in gathered for part in parts):
        cu += [at + offset for offset in offsets[:-1] if offset > 0 or starts]
        at += offsets[-1]
    return cu + [at]


def context_of(cp, device) -> Context:
    """Our context of an FLA one, kept on it; a collective on first use."""
    known = getattr(cp, "_gdn_kcp_context", None)
    if known is None:
        gathered = [None] * dist.get_world_size(cp.group)
        dist.all_gather_object(gathered, _parts(cp), group=cp.group)
        made = partition(global_cu_seqlens(gathered), len(gathered), cp.layout)
        known = build_context(made, cp.group, dist.get_rank(cp.group), device,
                              cp.conv1d_kernel_size or 4)
        cp._gdn_kcp_context = known
    return known


def refused_dims(device_type: str, dim_k: int, dim_v: int) -> str | None:
    """Why head dims are not taken; None if they are, on a GPU with padding up to its largest."""
    if device_type != "cuda" or max(dim_k, dim_v) <= CUDA_DIMS[-1]:
        return None
    return f"head dims: expected at most {CUDA_DIMS[-1]} on a GPU, got K = {dim_k}, V = {dim_v}"


def refused_dtype(device_type: str, dtype: torch.dtype) -> str | None:
    """Why q's dtype is not taken, after what autocast makes of it; None if it is."""
    if device_type != "cuda" or dtype == torch.bfloat16:
        return None
    cast = dtype == torch.float32 and torch.is_autocast_enabled(device_type)
    if cast and torch.get_autocast_dtype(device_type) == torch.bfloat16:
        return None
    return f"q: expected bfloat16 on a GPU, got {dtype}"


def refusal(q, k, v, g, beta, cp_context=None, initial_state=None, **options) -> str | None:
    """Why this package does not take a call; None if it does."""
    unknown = [n for n, value in options.items() if n not in _KNOWN and value is not None]
    if unknown:
        return f"{unknown[0]}: unknown argument"
    if options.get("chunk_size", 64) not in CHUNK_SIZES:
        return f"chunk_size: expected 16, 32 or 64, got {options['chunk_size']}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in _DTYPES or t.dtype != q.dtype:
            return f"{name}: expected bfloat16, float32 or float64, as q's, got {t.dtype}"
    if g.dtype == torch.float16 or beta.dtype == torch.float16:
        return "g, beta: expected bfloat16, float32 or float64, got float16"
    if initial_state is not None and initial_state.dtype not in (torch.float32, torch.float64):
        return f"initial_state: expected float32, got {initial_state.dtype}"
    if q.device.type not in ("cpu", "cuda"):
        return f"device: expected cpu or cuda, got {q.device}"
    reason = refused_dtype(q.device.type, q.dtype) or refused_dims(
        q.device.type, q.shape[-1], v.shape[-1]
    )
    if reason is not None:
        return reason
    refused = [f"{b.name}: {b.refusal}" for b in backends(q.device)]
    if all(b.refusal for b in backends(q.device)):
        return f"{q.device}: {'; '.join(refused)}"
    return None


def _dispatch():
    """FLA's module of backends."""
    try:
        return importlib.import_module("fla.backends")
    except ImportError as error:
        missing = (getattr(error, "name", None) or "fla").partition(".")[0]
        of, package = ("fla-core 0.6", "fla-core") if missing == "fla" else ("as fla-core needs", missing)
        raise MissingPackageError(
            f"{missing}: expected {of} (pip install {package}), got: {error}"
        ) from error


def enable() -> None:
    """Registers the backend, before FlashQLA's (priority 3)."""
    dispatch = _dispatch()
    if getattr(dispatch, "_DISPATCH_DISABLED", False):
        raise RuntimeError("FLA_DISABLE_BACKEND_DISPATCH=1: FLA's dispatch is off")

    class GdnKcpBackend(dispatch.BaseBackend):
        """gdn_kcp: forward and backward on one rank or over context-parallel ranks."""

        backend_type = _TYPE
        package_name = "gdn_kcp"
        env_var = "FLA_GDN_KCP"
        default_enable = True
        priority = 2

        def chunk_gated_delta_rule_verifier(
            self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
            allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
            cp_context=None, **kwargs,
        ):
            reason = refusal(q, k, v, g, beta, cp_context, initial_state, **kwargs)
            if reason is None and allow_neg_eigval and not use_beta_sigmoid_in_kernel:
                reason = "allow_neg_eigval: expected only with use_beta_sigmoid_in_kernel"
            return reason is None, reason

        def chunk_gated_delta_rule(self, q, k, v, g, beta, *args, cp_context=None, **kwargs):
            if cp_context is not None:
                cp_context = context_of(cp_context, q.device)
                for name in ("cu_seqlens", "cu_seqlens_cpu"):
                    kwargs.pop(name, None)
            return chunk_gated_delta_rule(q, k, v, g, beta, *args, cp_context=cp_context, **kwargs)

    dispatch.register(_OPERATION)(GdnKcpBackend)


def disable() -> None:
    """Removes the backend; FLA runs its own again."""
    _dispatch()._get_operation_registry(_OPERATION)._backends.pop(_TYPE, None)
