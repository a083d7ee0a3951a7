"""pytest plugin for FLA's tests of the gated delta rule: gdn_kcp's operator in FLA's place.

float16 becomes bfloat16. The tolerances, the references and everything else are FLA's.
"""

import ast
import importlib
import inspect
import sys
import types

import peer_outcomes
import pytest
import torch

import gdn_kcp

OPERATOR = "chunk_gated_delta_rule"


def _absent(name: str):
    """Stands for a name that this version of FLA lacks."""
    if name.startswith("IS_"):
        return False

    def absent(*args, **kwargs):
        raise RuntimeError(f"the installed FLA has no {name}")

    return absent


def _fill_imports(path) -> None:
    """What the file imports and the installed FLA lacks becomes something that fails in use."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "fla":
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError:
            module = sys.modules[node.module] = types.ModuleType(node.module)
        for alias in node.names:
            if not hasattr(module, alias.name):
                setattr(module, alias.name, _absent(alias.name))
                peer_outcomes.notes.append(f"not in the installed FLA: {node.module}.{alias.name}")


def _uses_operator(code: types.CodeType) -> bool:
    return OPERATOR in code.co_names or any(
        _uses_operator(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)
    )


def pytest_configure():
    try:
        importlib.import_module("fla")
    except ModuleNotFoundError as error:
        raise pytest.UsageError(f"FLA's tests need FLA: {error}") from None


def pytest_collectstart(collector):
    if isinstance(collector, pytest.Module):
        _fill_imports(collector.path)


def pytest_collection_modifyitems(config, items):
    for module in {item.module for item in items}:
        setattr(module, OPERATOR, gdn_kcp.chunk_gated_delta_rule)
        peer_outcomes.compare_on(module, "assert_close")
    peer_outcomes.leave_out(
        config, items, lambda item: _uses_operator(inspect.unwrap(item.function).__code__)
    )
    peer_outcomes.notes.append("torch.float16 in a test's name stands for bfloat16")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.funcargs.get("dtype") == torch.float16:
        pyfuncitem.funcargs["dtype"] = torch.bfloat16
    return (yield)

