"""Runs against the installed package, or against the build that GDN_KCP_LIBRARY names."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
if "GDN_KCP_LIBRARY" in os.environ:
    sys.path.insert(0, str(ROOT / "python"))


torch.set_num_threads(1)  # small tensors: threads only cost


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
