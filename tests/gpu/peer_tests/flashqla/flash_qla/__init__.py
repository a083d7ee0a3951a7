"""Stands for FlashQLA in its own tests: its forward and backward, made of gdn_kcp's operator.

What FlashQLA passes from its forward to its backward (gates summed over chunks, triangles, a cache)
has no counterpart: g goes through as it came, the rest is None. auto_cp has nothing to switch.
"""

import torch

import gdn_kcp

from .states import chunk_states

__all__ = ["chunk_gated_delta_rule_bwd", "chunk_gated_delta_rule_fwd"]


@torch.no_grad()
def chunk_gated_delta_rule_fwd(
    q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, output_final_state=True,
    output_h=False, auto_cp=True, state_v_first=False, enable_fwd_cp_cache=False,
):
    """(g, A, o, h, final_state, cp_cache)"""
    options = {"cu_seqlens": cu_seqlens, "state_v_first": state_v_first}
    o, final_state = gdn_kcp.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, **options
    )
    h = chunk_states(k, v, g, beta, initial_state, **options) if output_h else None
    return g, None, o, h, final_state, None


def chunk_gated_delta_rule_bwd(
    q, k, v, g, beta, A, do, dht=None, scale=None, initial_state=None, cu_seqlens=None,
    state_v_first=False, auto_cp=True, cp_cache=None,
):
    """(dq, dk, dv, dbeta, dg, dh0), the forward run once more"""
    given = (q, k, v, g, beta, initial_state)
    leaves = [None if t is None else t.detach().requires_grad_() for t in given]
    outputs = gdn_kcp.chunk_gated_delta_rule(
        *leaves[:5], scale, leaves[5], dht is not None, cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
    )
    pairs = [(out, d) for out, d in zip(outputs, (do, dht)) if d is not None]
    wanted = [leaf for leaf in leaves if leaf is not None]
    dq, dk, dv, dg, dbeta, *dh0 = torch.autograd.grad(
        [out for out, _ in pairs], wanted, [d for _, d in pairs]
    )
    return dq, dk, dv, dbeta, dg, dh0[0] if dh0 else None
