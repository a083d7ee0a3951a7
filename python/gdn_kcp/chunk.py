"""``chunk_gated_delta_rule``: a drop-in for FLA's function of that name."""

from __future__ import annotations

import torch

from . import head_dims
from . import traced  # noqa: F401: registers what torch.compile needs
from ._library import (
    BETA_SIGMOID,
    GATE_IN_KERNEL,
    KEEP_WHERE_LIGHT,
    L2NORM,
    NEG_EIGVAL,
    STATE_V_FIRST,
    ops,
)
from .autograd import Call, apply, autocast, check_deterministic, check_tensors, refuse
from .context import Context
from .errors import Error, InvalidArgumentError, typed
from .members import interrupted
from .untraced import untraced

_NARROW = (torch.bfloat16, torch.float16)
CHUNK_SIZES = (16, 32, 64)  # that FLA takes


def _wide(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """A parameter or state of a model cast to bf16: in fp32, or fp64 as ``like``, its gradient in bf16
    again."""
    if tensor is None or tensor.dtype not in _NARROW:
        return tensor
    return tensor.to(torch.float64 if like.dtype == torch.float64 else torch.float32)


def _tensor(name: str, value) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"{name}: expected on cpu or cuda, got {value.device}")


def host_cu_seqlens(cu_seqlens, cu_seqlens_cpu) -> torch.Tensor | None:
    """The offsets on the host; the caller's own tensor, where one lies there."""
    given = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if given is None:
        return None
    _tensor("cu_seqlens" if cu_seqlens_cpu is None else "cu_seqlens_cpu", given)
    if cu_seqlens_cpu is not None and cu_seqlens is not None and cu_seqlens is not cu_seqlens_cpu:
        _tensor("cu_seqlens", cu_seqlens)
        both_here = cu_seqlens.is_cpu and cu_seqlens_cpu.is_cpu
        if cu_seqlens.shape != cu_seqlens_cpu.shape or (
            both_here and not bool((cu_seqlens == cu_seqlens_cpu).all())
        ):
            raise InvalidArgumentError(
                f"cu_seqlens_cpu: expected a copy of cu_seqlens {list(cu_seqlens.shape)}, got other "
                f"offsets {list(cu_seqlens_cpu.shape)}"
            )
    return given if given.is_cpu else given.cpu()


def _check_context(ctx, cu_seqlens, cu_seqlens_cpu) -> None:
    """A context knows its documents; offsets beside it must be its own, local or global."""
    if not isinstance(ctx, Context):
        raise InvalidArgumentError(
            f"cp_context: expected a gdn_kcp.Context, got {type(ctx).__name__}"
        )
    for name, cu in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if cu is None:
            continue
        _tensor(name, cu)
        own = (ctx.local_cu_seqlens, ctx.partition.cu_seqlens)
        if not any(cu.shape == o.shape and (not cu.is_cpu or bool((cu == o).all())) for o in own):
            raise InvalidArgumentError(
                f"{name}: expected none beside cp_context, or its own offsets, local or global, "
                f"got others of {cu.numel()} entries"
            )


def _run(inputs, ctx, cu_seqlens, cu_seqlens_cpu, options, padding=None):
    """(o, final_state or None) of ``inputs`` = q, k, v, g, beta, A_log, dt_bias, initial_state and
    ``options`` = scale, flags, output_final_state; ``padding``: what q, k and v had before."""
    scale, flags, want_final = options
    if ctx is None and torch.compiler.is_compiling():
        cu = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        o, final_state = ops.chunk(*inputs, cu, scale, flags, want_final)
        return o, final_state if want_final else None
    cu = None
    if ctx is None:
        try:
            cu = host_cu_seqlens(cu_seqlens, cu_seqlens_cpu)
        except RuntimeError as error:
            raise typed(error) from None
    call = Call(ctx, cu, scale, flags | KEEP_WHERE_LIGHT, want_final)
    call.padding = padding
    return apply(call, *inputs)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Context | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    deterministic: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over dense batches or packed documents, forward and backward.

    Per document and value head (natural-log decay g, state S of ``[K, V]``)::

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: ``[B, T, H, K]`` (or ``[T, H, K]``), bf16, on a CPU fp32 or fp64 too; packed documents:
            B = 1.
        v: ``[B, T, HV, V]`` like q, HV a multiple of H.
        g: ``[B, T, HV]`` fp32, bf16 or fp64, <= 0 (not checked), -inf allowed; with
            ``use_gate_in_kernel`` the raw a of ``g = -exp(A_log) * softplus(a + dt_bias)``.
        beta: ``[B, T, HV]`` fp32, bf16 or fp64, in [0, 2] (not checked); with
            ``use_beta_sigmoid_in_kernel`` the raw b of ``sigmoid(b)``, times 2 with ``allow_neg_eigval``.
        scale: default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` fp32 (fp64 for fp64; bf16 and fp16 are widened);
            ``[N, HV, V, K]`` with ``state_v_first``; N documents, or B.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: q and k times ``rsqrt(sum of squares + 1e-6)`` inside.
        cu_seqlens: ``[N + 1]`` int32 or int64, in tokens; rows at and past the last are not read,
            their outputs and gradients are 0. On a GPU pass ``cu_seqlens_cpu`` too, which saves a
            synchronisation. cu_seqlens_cpu: the same on the host, beside it or alone.
        chunk_indices: accepted for compatibility, not needed.
        cp_context: a :class:`Context`; the call then runs over its ranks, and N counts the documents
            of the whole partition (a rank reads and writes the states of those that start and end
            on it; other rows of the results are 0).
        A_log, dt_bias: ``[HV]`` fp32, fp64 or bf16. Their gradients are sums over this rank's tokens:
            reduce them over ranks as those of any replicated parameter.
        chunk_size: 16, 32 or 64, as FLA takes: a hint to its kernels, of no effect here. The kernels
            of this package have chunks of 64 tokens.
        deterministic: accepted; every path is deterministic.

    Head dims: a CPU takes any. The GPU's kernels take K = V = 64 or 128; bf16 rows of other dims up to
    128 are padded with zeros to the least of the two that holds both, which changes no result and
    which ``last_path().padding`` tells. It costs a copy of q, k, v (kept for the backward), o and the
    states and of the gradient of each, and time and memory are those of the padded dims. Larger ones
    are refused.

    Strided views are otherwise taken as they are: unit innermost stride, head stride = head dim.

    For its backward it keeps what ``save_mode="light_akk"`` of :func:`chunk_gdn_kcp` does where that is
    at most 132 bytes a token and value head (on cuda-sm90a), else what ``"light"`` does.

    Returns:
        o like v, and the final states in fp32 (fp64 for fp64), or None.

    Raises:
        InvalidArgumentError, UnsupportedError: naming the argument, what was expected, what came.

    Source: docs/math.md, src/driver/call.cc.
    """
    if cp_context is not None and torch.compiler.is_compiling():
        return _untraced(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu,
            chunk_indices, cp_context, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log,
            dt_bias=dt_bias, chunk_size=chunk_size, deterministic=deterministic,
        )
    try:
        flags = (
            (L2NORM if use_qk_l2norm_in_kernel else 0)
            | (GATE_IN_KERNEL if use_gate_in_kernel else 0)
            | (BETA_SIGMOID if use_beta_sigmoid_in_kernel else 0)
            | (NEG_EIGVAL if allow_neg_eigval else 0)
            | (STATE_V_FIRST if state_v_first else 0)
        )
        check_tensors(q, k, v, g, beta, A_log, dt_bias, initial_state)
        check_deterministic(deterministic)
        if not isinstance(chunk_size, int) or chunk_size not in CHUNK_SIZES:
            raise InvalidArgumentError(f"chunk_size: expected 16, 32 or 64, got {chunk_size!r}")
        initial_state = _wide(initial_state, q)
        if use_gate_in_kernel:
            if A_log is None:
                raise InvalidArgumentError("A_log: expected [HV] with use_gate_in_kernel, got none")
            A_log, dt_bias = _wide(A_log, g), _wide(dt_bias, g)
        elif A_log is not None or dt_bias is not None:
            raise InvalidArgumentError(
                "A_log, dt_bias: expected only with use_gate_in_kernel=True, got it False"
            )
        if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
            raise InvalidArgumentError(
                "allow_neg_eigval: expected only with use_beta_sigmoid_in_kernel=True, got it False"
            )
        if cp_context is not None:
            _check_context(cp_context, cu_seqlens, cu_seqlens_cpu)
        q, k, v = autocast(q.device.type, q, k, v)
        padding = head_dims.padding_of(q, v)
        if padding is not None:
            padding.check(k, initial_state, state_v_first)
            scale = padding.dim_k**-0.5 if scale is None else scale
            q, k, v = padding.keys(q), padding.keys(k), padding.values(v)
            initial_state = padding.states(initial_state, state_v_first)
    except BaseException as error:  # the other ranks wait to hear of any
        refuse(cp_context, error, "forward")
    try:
        inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
        options = (scale, flags, output_final_state)
        if padding is None:
            return _run(inputs, cp_context, cu_seqlens, cu_seqlens_cpu, options)
        o, final_state = _run(inputs, cp_context, cu_seqlens, cu_seqlens_cpu, options, padding)
        return padding.cut_values(o), padding.cut_states(final_state, state_v_first)
    except Error as error:
        if padding is None:
            raise
        raise type(error)(f"{error} ({padding})") from None
    except BaseException as error:
        interrupted(cp_context, error)
        raise


_untraced = untraced(chunk_gated_delta_rule)
