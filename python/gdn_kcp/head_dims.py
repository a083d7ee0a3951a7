"""Head dims that the CUDA kernels lack, padded with zeros to ones that they have. Used by chunk.py.

Exact: padded columns of q and k add nothing to q.k, k.k or a norm, so padded rows and columns of the
state, and padded columns of o, stay zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .errors import InvalidArgumentError

CUDA_DIMS = (64, 128)  # K = V of src/backend/cuda, ascending

last_padding: Padding | None = None  # of the last call, for last_path()


def padded_dim(dim_k: int, dim_v: int) -> int | None:
    """The least K = V of the CUDA kernels that holds both dims; None: they take the two as they are,
    or none holds both."""
    if dim_k == dim_v and dim_k in CUDA_DIMS:
        return None
    return next((dim for dim in CUDA_DIMS if 0 < dim_k <= dim and 0 < dim_v <= dim), None)


class Padding(NamedTuple):
    """The head dims of a call's operands, and the one K = V that they are padded to."""

    dim_k: int
    dim_v: int
    to: int

    def __str__(self) -> str:
        return f"K = {self.dim_k}, V = {self.dim_v} padded with zeros to {self.to}"

    def check(self, k: torch.Tensor, initial_state, state_v_first: bool) -> None:
        """Refuses what does not have the caller's dims, which padding would hide."""
        if k.shape[-1:] != (self.dim_k,):
            raise InvalidArgumentError(
                f"k: expected q's head dim {self.dim_k}, got shape {list(k.shape)}"
            )
        dims = (self.dim_v, self.dim_k) if state_v_first else (self.dim_k, self.dim_v)
        if initial_state is not None and initial_state.shape[-2:] != dims:
            raise InvalidArgumentError(
                f"initial_state: expected last two dimensions {list(dims)}, got shape "
                f"{list(initial_state.shape)}"
            )

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """[.., K] -> [.., to]"""
        return pad(x, (0, self.to - self.dim_k))

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """[.., V] -> [.., to]"""
        return pad(x, (0, self.to - self.dim_v))

    def states(self, x: torch.Tensor | None, state_v_first: bool) -> torch.Tensor | None:
        """[.., K, V], or [.., V, K] -> [.., to, to]"""
        return None if x is None else pad(x, self._state_margins(state_v_first))

    def cut_values(self, x: torch.Tensor) -> torch.Tensor:
        """[.., to] -> [.., V], dense"""
        return pad(x, (0, self.dim_v - self.to))

    def cut_states(self, x: torch.Tensor | None, state_v_first: bool) -> torch.Tensor | None:
        """[.., to, to] -> [.., K, V], or [.., V, K], dense"""
        return None if x is None else pad(x, [-n for n in self._state_margins(state_v_first)])

    def _state_margins(self, state_v_first: bool) -> list[int]:
        """Zeros before and after, of the last dimension first."""
        k, v = self.to - self.dim_k, self.to - self.dim_v
        return [0, k, 0, v] if state_v_first else [0, v, 0, k]


def padding_of(q: torch.Tensor, v: torch.Tensor) -> Padding | None:
    """What operands on a GPU need; None where the kernels take, or refuse, them as they are."""
    if not q.is_cuda:
        return None
    shape_q, shape_v = q.shape, v.shape
    if not shape_q or not shape_v:
        return None
    dim_k, dim_v = shape_q[-1], shape_v[-1]
    to = padded_dim(dim_k, dim_v)
    if to is None or q.dtype != torch.bfloat16:
        return None
    return Padding(dim_k, dim_v, to)
