"""Runs against the installed package, or against the build that GDN_KCP_LIBRARY names.

A test that uses `device` runs on the CPU and, with a GPU and an extension built with CUDA, on that GPU
(`-k cuda` picks those), unless it is marked `cpu_only`; marked `every_head_dim` with 128 and with 64; marked `misses_on_gpu`
it is known to miss a bar there.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
if "GDN_KCP_LIBRARY" in os.environ:
    sys.path.insert(0, str(ROOT / "python"))


import reference  # noqa: E402: beside this file

import gdn_kcp  # noqa: E402

torch.set_num_threads(1)  # small tensors: threads only cost


def has_gpu() -> bool:
    """Whether some CUDA backend of the extension takes a GPU that torch sees."""
    return torch.cuda.is_available() and gdn_kcp.is_supported("cuda")


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu_only: not on the GPU, with the reason")
    config.addinivalue_line("markers", "every_head_dim: on the GPU with head dims 128 and 64")
    config.addinivalue_line("markers", "misses_on_gpu: a bar, with the reason; an error if it meets it")


def pytest_collection_modifyitems(items):
    for item in items:
        misses = item.get_closest_marker("misses_on_gpu")
        if misses and item.callspec.params["device"] != "cpu":
            item.add_marker(pytest.mark.xfail(strict=True, raises=AssertionError, **misses.kwargs))


def pytest_report_header():
    if not torch.cuda.is_available():
        return "gdn_kcp: no GPU"
    backends = (f"{b.name}: {b.refusal or 'yes'}" for b in gdn_kcp.backends("cuda"))
    return [f"gdn_kcp on {torch.cuda.get_device_name()}", *backends]


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        places = ["cpu"]
        if has_gpu() and not marked("cpu_only"):
            places += ["cuda", "cuda-64"] if marked("every_head_dim") else ["cuda"]
        metafunc.parametrize("device", places, indirect=True)


@pytest.fixture
def device(request):
    """Where reference.py's recipes put their tensors. What a test on the GPU runs, runs there."""
    where, _, dim = request.param.partition("-")
    reference.DEVICE, reference.HEAD_DIM = where, int(dim or 128)
    if where == "cuda":
        gdn_kcp.chunk_gated_delta_rule(*reference.make(1, 1, 1, 128, 128))
    yield where
    reference.DEVICE, reference.HEAD_DIM = "cpu", 128
    if where == "cuda":
        assert gdn_kcp.last_path().backend.startswith("cuda"), gdn_kcp.last_path()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
