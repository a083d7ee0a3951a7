"""The Python blocks of docs/python.md and of the README run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import make

ROOT = Path(__file__).resolve().parents[2]


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("i", range(4))
def test_block(i, tmp_path):
    block = blocks("docs/python.md")[i]
    if not block.startswith("# torchrun"):
        exec(compile(block, "docs/python.md", "exec"), {})
        return
    script = tmp_path / "this_file.py"
    script.write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, script], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_readme_block():
    """It goes on from a caller's own operands."""
    names = dict(zip(("q", "k", "v", "g", "beta"), make(50, 2, 4, 16, 16)))
    names["cu_seqlens"] = torch.tensor([0, 20, 50])
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["o"].shape == names["v"].shape


def test_there_are_blocks():
    assert len(blocks("docs/python.md")) == 4 and len(blocks("README.md")) == 1
