"""This package where users already are: FLA, transformers, and the names of a Blackwell package."""

import importlib as _importlib

_MODULES = ("fla", "flashinfer", "transformers")


def __getattr__(name: str):
    if name in _MODULES:  # each on first use
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
