"""One table of a run of bench/ranks_gpus.sh: ours on one GPU and over the ranks, predictions, peers.

Usage: python bench/ranks_table.py OURS PEERS    (what ranks_bench and peers_cp.py printed)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OPERATIONS = ("fwd", "fwd+bwd", "ckpt")
NOT_CLAIMED = " not claimed"
Times = dict[tuple[str, str], dict[str, str]]  # (shape, operation) -> arm -> text of its time


def ours(text: str) -> Times:
    """Rows such as 'M CP2 Z | fwd 0.310 1.83x (0.302) | ...': the last of each arm counts. A row that
    ends in '| not claimed: why' is marked."""
    times: Times = {}
    for line in text.splitlines():
        row = re.match(r"([A-N]) (CP\d+)(?: ([CZD]))? +(\|.*)", line)
        if not row:
            continue
        arm = row[2] if row[3] is None else f"{row[2]} {row[3]}"
        for operation, ms, speed, predicted in re.findall(
                r"\| (\S+) ([\d.]+) ([\d.]+)x(?: \(([\d.]+)\))?", row[4]):
            cell = ms if row[3] is None else f"{ms} {speed}x"
            cell += f" ({predicted})" if predicted else ""
            cell += NOT_CLAIMED if "| not claimed: " in row[4] else ""
            times.setdefault((row[1], operation), {})[arm] = cell
    return times


def peers(text: str) -> Times:
    """Rows such as 'M CP2 fwd  fla-c 2.61  fla-z 3.84 ms (slowest rank)'."""
    times: Times = {}
    for line in text.splitlines():
        row = re.match(r"([A-N]) CP\d+ (\S+) +(.*) ms \(slowest rank\)", line)
        if row:
            cells = re.findall(r"(\S+) ([\d.]+)", row[3])
            times.setdefault((row[1], row[2]), {}).update(cells)
    return times


def milliseconds(cell: str) -> float:
    return float(cell.split()[0])


def table(mine: Times, theirs: Times) -> str:
    arms = list(dict.fromkeys(arm for row in mine.values() for arm in row))
    others = list(dict.fromkeys(arm for row in theirs.values() for arm in row))
    head = ["shape", "operation", *arms, *others] + (["fastest peer / Z"] if others else [])
    rows = [head, ["---"] * len(head)]
    for shape in dict.fromkeys(shape for shape, _ in mine):
        for operation in OPERATIONS:
            own = mine.get((shape, operation), {})
            other = theirs.get((shape, operation), {})
            row = [shape, operation, *(own.get(arm, "-") for arm in arms),
                   *(other.get(arm, "-") for arm in others)]
            if others:
                zigzag = [cell for arm, cell in own.items()
                          if arm.endswith("Z") and not cell.endswith(NOT_CLAIMED)]
                peer_times = [milliseconds(cell) for arm, cell in other.items()
                              if not arm.startswith("ours")]
                row.append(f"{min(peer_times) / milliseconds(zigzag[0]):.2f}"
                           if zigzag and peer_times else "-")
            rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    note = ("ms, slowest rank; times as fast as our own one GPU; (predicted by gdn simulate); "
            "C contiguous, Z zigzag, D zigzag per document; not claimed: misses a bar of accuracy")
    return "\n".join(lines + ["", note])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(table(ours(Path(sys.argv[1]).read_text()), peers(Path(sys.argv[2]).read_text())))


if __name__ == "__main__":
    main()
