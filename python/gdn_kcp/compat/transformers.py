"""Puts the operator and the convolution into transformers' GDN models (Qwen3-Next, Qwen3.5).

``enable()`` replaces the two functions that these models' layers look up in their modules, for all
models made before or after; ``disable()`` puts transformers' own back. Packed documents
(``cu_seq_lens_q``) are kept apart.
"""

from __future__ import annotations

import importlib

import torch

from ..chunk import chunk_gated_delta_rule
from ..conv import causal_conv1d
from ..errors import InvalidArgumentError, MissingPackageError

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_NAMES = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
_originals: dict[tuple[str, str], object] = {}


def _chunk(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
           use_qk_l2norm_in_kernel=False, cu_seqlens=None, **unused):
    """transformers' torch_chunk_gated_delta_rule; ``unused`` are arguments of attention layers."""
    if initial_state is not None:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        initial_state = initial_state.to(wide)
    return chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def _conv(hidden_states, weight, bias=None, activation=None, cu_seq_lens_q=None, seq_idx=None,
          **unused):
    """transformers' causal_conv1d_fn: hidden_states [B, C, T]."""
    if seq_idx is not None and cu_seq_lens_q is None:
        raise InvalidArgumentError("seq_idx: expected cu_seq_lens_q beside it, got none")
    x = hidden_states.transpose(1, 2)
    if x.stride(-1) != 1:
        x = x.contiguous()
    return causal_conv1d(x, weight, bias, activation, cu_seq_lens_q).transpose(1, 2)


def enable() -> list[str]:
    """The models that now use this package, by the names of their folders in transformers."""
    done = []
    for model in MODELS:
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ImportError:
            continue
        if not all(hasattr(module, name) for name in _NAMES):
            continue
        for name, ours in zip(_NAMES, (_chunk, _conv)):
            _originals.setdefault((module.__name__, name), getattr(module, name))
            setattr(module, name, ours)
        done.append(model)
    if not done:
        raise MissingPackageError(
            "transformers: expected a version with Qwen3-Next or Qwen3.5, got none"
        )
    return done


def disable() -> None:
    """Puts transformers' own functions back."""
    for (module, name), original in _originals.items():
        setattr(importlib.import_module(module), name, original)
    _originals.clear()
