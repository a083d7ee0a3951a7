"""examples/train_lm.py, shortened: falling loss, a PNG, 2 ranks as 1 rank."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_training_over_two_ranks(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, ROOT / "examples/train_lm.py", "--steps", "20", "--tokens", "256",
               "--document", "200", "--layers", "1", "--width", "32", "--out", tmp_path,
               ROOT / "LICENSE"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < first - 0.3
    apart = float(re.search(r"difference of a loss ([\d.e+-]+)", done.stdout).group(1))
    assert apart < 1e-4
    assert (tmp_path / "train_lm.png").read_bytes()[:4] == b"\x89PNG"
