"""The Python blocks of docs/python.md and of the README run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from reference import make

ROOT = Path(__file__).resolve().parents[2]


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("i", range(3))
def test_block(i):
    exec(compile(blocks("docs/python.md")[i], "docs/python.md", "exec"), {})


def test_readme_block():
    """It goes on from a caller's own operands."""
    names = dict(zip(("q", "k", "v", "g", "beta"), make(50, 2, 4, 16, 16)))
    names["cu_seqlens"] = torch.tensor([0, 20, 50])
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["o"].shape == names["v"].shape


def test_there_are_blocks():
    assert len(blocks("docs/python.md")) == 3 and len(blocks("README.md")) == 1
