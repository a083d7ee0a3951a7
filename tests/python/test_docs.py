"""The Python blocks of docs/python.md run as they stand."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block):
    exec(compile(block, "docs/python.md", "exec"), {})


def test_there_are_blocks():
    assert len(BLOCKS) == 2
