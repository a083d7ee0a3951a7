"""What torch.compile needs of the functional ops: shapes without data, and gradients.

A traced forward keeps nothing; its backward makes the segments' boundary states again. On one rank
without segments there are none.
"""

from __future__ import annotations

import torch

from ._library import STATE_V_FIRST, ops
from .errors import UnsupportedError, typed

_INPUTS = 8  # q, k, v, g, beta, A_log, dt_bias, initial_state


def _state_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.register_fake("gdn_kcp::chunk")
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, flags, want_final):
    o = v.new_empty(v.shape)
    if not want_final:
        return o, v.new_empty(0, dtype=_state_dtype(q))
    if cu_seqlens is not None:
        documents = cu_seqlens.shape[0] - 1
    else:
        documents = q.shape[0] if q.dim() == 4 else 1
    dims = (q.shape[-1], v.shape[-1])
    if flags & STATE_V_FIRST:
        dims = dims[::-1]
    return o, v.new_empty((documents, v.shape[-2], *dims), dtype=_state_dtype(q))


@torch.library.register_fake("gdn_kcp::chunk_backward")
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, d_o, dfinal, scale, flags):
    def like(t):
        return q.new_empty(0, dtype=_state_dtype(q)) if t is None else t.new_empty(t.shape)

    return tuple(like(t) for t in (q, k, v, g, beta, A_log, dt_bias, initial_state))


def _setup(ctx, inputs, output):
    *tensors, cu_seqlens, scale, flags, want_final = inputs
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.options = (scale, flags)
    ctx.want_final = want_final
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dfinal_state):
    *tensors, cu_seqlens = ctx.saved_tensors
    dfinal = dfinal_state if ctx.want_final else None
    gradients = ops.chunk_backward(*tensors, cu_seqlens, do, dfinal, *ctx.options)
    needed = ctx.needs_input_grad
    return (
        *(d if needed[i] else None for i, d in enumerate(gradients)),
        *(None,) * (len(needed) - _INPUTS),
    )


torch.library.register_autograd("gdn_kcp::chunk", _backward, setup_context=_setup)


@torch.library.register_fake("gdn_kcp::conv")
def _(x, weight, bias, prefix, cu_seqlens, silu):
    return x.new_empty(x.shape)


@torch.library.register_fake("gdn_kcp::conv_backward")
def _(x, weight, bias, prefix, cu_seqlens, silu, dy):
    def like(t):
        return torch.empty(0, device=x.device) if t is None else t.new_empty(t.shape)

    return like(x), like(weight), like(bias), like(prefix)


def _conv_setup(ctx, inputs, output):
    *tensors, silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.silu = silu


def _conv_backward(ctx, dy):
    x, weight, bias, prefix, cu_seqlens = ctx.saved_tensors
    try:
        gradients = ops.conv_backward(x, weight, bias, prefix, cu_seqlens, ctx.silu, dy.contiguous())
    except RuntimeError as error:
        raise typed(error) from None
    needed = ctx.needs_input_grad
    return (*(d if needed[i] else None for i, d in enumerate(gradients)), None, None)


def _no_second_backward(ctx, *gradients):
    raise UnsupportedError("causal_conv1d: expected one backward, got a gradient of its gradients")


torch.library.register_autograd("gdn_kcp::conv", _conv_backward, setup_context=_conv_setup)
torch.library.register_autograd("gdn_kcp::conv_backward", _no_second_backward)
