"""Parts of the package that torch.compile breaks a graph at."""

from __future__ import annotations

import functools
from typing import Callable

import torch


def untraced(function: Callable) -> Callable:
    """``function``, which torch.compile calls and does not look into. For calls under compilation alone:
    what it takes of torch is imported by then, and is slow to import."""
    disabled: Callable | None = None

    def call(*args, **kwargs):
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    # torch.compile counts recompilations by code object: each function has its own.
    call.__code__ = call.__code__.replace(co_name=f"untraced_{function.__name__}")
    return call


def untraced_when_compiling(function: Callable) -> Callable:
    """``function``, at every call of which torch.compile breaks a graph."""
    outside = untraced(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call
