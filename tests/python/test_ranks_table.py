"""bench/ranks_table.py on lines as ranks_bench and peers_cp.py print them."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("ranks_table", ROOT / "bench" / "ranks_table.py")
ranks_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ranks_table)

OURS = """2 x NVIDIA H200, model gates, pre-norm, median of 40 calls
M CP2 Z against one rank, bar 5e-03: o 1.2e-03 dq 1.4e-03 pass
M CP1    | fwd 0.569 1.00x (0.551) | fwd+bwd 3.220 1.00x (3.149) | ckpt 3.800 1.00x (3.700) | cuda-sm90a, none
M CP2 Z  | fwd 0.400 1.42x (0.390) | fwd+bwd 2.000 1.61x | ckpt 2.400 1.58x (2.300) | cuda-sm90a, all-gather 0.1..0.2 ms
M CP2 D  no time: failed the comparison
"""
PEERS = """M fla-c vs one GPU rel-RMS o,dq,dk,dv,dg,dbeta: 1.0e-03
M qla-c failed: RuntimeError: no
M CP2 fwd      fla-c 2.610  fla-z 3.840 ms (slowest rank)
M CP2 fwd+bwd  ours-z 1.000  fla-c 8.170  fla-z 10.750 ms (slowest rank)
"""


def test_rows():
    lines = ranks_table.table(ranks_table.ours(OURS), ranks_table.peers(PEERS)).splitlines()
    assert lines[0] == ("| shape | operation | CP1 | CP2 Z | fla-c | fla-z | ours-z "
                        "| fastest peer / Z |")
    assert lines[2] == "| M | fwd | 0.569 (0.551) | 0.400 1.42x (0.390) | 2.610 | 3.840 | - | 6.52 |"
    assert lines[3] == "| M | fwd+bwd | 3.220 (3.149) | 2.000 1.61x | 8.170 | 10.750 | 1.000 | 4.08 |"
    assert lines[4].endswith("| - | - | - | - |")


def test_what_is_not_claimed_is_marked_and_has_no_ratio():
    row = "M CP2 Z  | fwd 0.400 1.42x (0.390) | cuda-sm90a, none | not claimed: 2.7e-03 from one rank, bar 1e-03"
    lines = ranks_table.table(ranks_table.ours(row), ranks_table.peers(PEERS)).splitlines()
    assert lines[2].startswith("| M | fwd | 0.400 1.42x (0.390) not claimed | ")
    assert lines[2].endswith("| - |")


def test_without_peers():
    lines = ranks_table.table(ranks_table.ours(OURS), ranks_table.peers("")).splitlines()
    assert lines[0] == "| shape | operation | CP1 | CP2 Z |"


def test_nothing_measured():
    assert ranks_table.table({}, {}).startswith("| shape | operation |")
