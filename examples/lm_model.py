"""A small byte-level GDN language model: what train_lm.py trains.

A layer: packed projection -> causal convolution -> gated delta rule -> gated norm -> projection,
then a gated MLP. With ``ctx`` every layer runs over context-parallel ranks; only the convolution's
halo and the operator's boundary states cross them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gdn_kcp


@dataclass
class Config:
    vocabulary: int = 256
    width: int = 128
    layers: int = 3
    H: int = 2  # key heads
    HV: int = 4  # value heads
    D: int = 32  # head dim
    conv: int = 4
    checkpoint: bool = True


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        channels = (2 * c.H + c.HV) * c.D
        self.qkv = nn.Linear(c.width, channels, bias=False)
        self.conv = nn.Parameter(torch.empty(channels, c.conv))
        nn.init.uniform_(self.conv, -(c.conv**-0.5), c.conv**-0.5)
        self.ab = nn.Linear(c.width, 2 * c.HV, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.HV).uniform_(1, 8).log())
        dt = torch.exp(torch.empty(c.HV).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus^-1(dt)
        self.gate = nn.Linear(c.width, c.HV * c.D, bias=False)
        self.norm = RMSNorm(c.D)
        self.out = nn.Linear(c.HV * c.D, c.width, bias=False)

    def forward(self, x, cu_seqlens, ctx):
        c = self.c
        row = gdn_kcp.causal_conv1d(
            self.qkv(x), self.conv, None, "silu", None if ctx else cu_seqlens, ctx
        )
        q, k, v = gdn_kcp.packed_qkv_views(row, H_qk=c.H, HV=c.HV)
        a, b = self.ab(x).chunk(2, -1)
        o, _ = gdn_kcp.chunk_gated_delta_rule(
            q, k, v, a, b, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True,
            cu_seqlens=None if ctx else cu_seqlens, cp_context=ctx,
        )
        gate = self.gate(x).unflatten(-1, (c.HV, c.D))
        return self.out((self.norm(o) * F.silu(gate)).flatten(-2))


class Layer(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(c.width), RMSNorm(c.width)])
        self.mixer = GatedDeltaNet(c)
        self.up = nn.Linear(c.width, 4 * c.width, bias=False)
        self.down = nn.Linear(2 * c.width, c.width, bias=False)

    def forward(self, x, cu_seqlens, ctx):
        x = x + self.mixer(self.norms[0](x), cu_seqlens, ctx)
        value, gate = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(value * F.silu(gate))


class LanguageModel(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)

    def forward(self, tokens, cu_seqlens=None, ctx=None):
        """tokens [1, T] (this rank's) -> logits [1, T, vocabulary]."""
        x = self.embed(tokens)
        for layer in self.layers:
            if self.c.checkpoint and self.training:
                x = checkpoint(layer, x, cu_seqlens, ctx, use_reentrant=False)
            else:
                x = layer(x, cu_seqlens, ctx)
        return self.head(self.norm(x))
