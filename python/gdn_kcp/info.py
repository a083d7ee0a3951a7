"""Which code runs here, which ran last, and why a faster one did not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import head_dims
from ._library import ops
from .context import usable_device
from .errors import UnsupportedError, typed
from .head_dims import Padding


class Backend(NamedTuple):
    """One way to run the operator; ``refusal``: why not on the device asked about, or ""."""

    name: str
    description: str
    refusal: str


class Path(NamedTuple):
    """The backend of the last call of this process, why each faster one did not run, and what head
    dims :func:`chunk_gated_delta_rule` padded for it (None: none; a traced call does not say)."""

    backend: str
    description: str
    refused: dict[str, str]
    padding: Padding | None


def backends(device=None) -> list[Backend]:
    """All backends compiled in, fastest first, asked about bf16 and head dim 128 on ``device``
    (default: the first GPU that torch sees, else the CPU)."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    like = torch.empty(0, device=usable_device(device))
    try:
        lines = ops.backend_list(like).splitlines()
    except RuntimeError as error:
        raise typed(error) from None
    return [Backend(*line.split("\t")) for line in lines]


def is_supported(device=None) -> bool:
    """Whether some backend takes bf16 and head dim 128 on ``device``; :func:`backends` says why not."""
    try:
        return any(not backend.refusal for backend in backends(device))
    except UnsupportedError:
        return False


def last_path() -> Path | None:
    """What the last forward or backward ran on; None before the first."""
    text = ops.last_path()
    if not text:
        return None
    name, description, *refused = text.split("\n")
    why_not = dict(line.split(": ", 1) for line in refused)
    return Path(name, description, why_not, head_dims.last_padding)
