"""A picture of `gdn bench -o times.json` (or bench/compare.py's): a bar per arm at the median of its
group medians, a whisker from the fastest group to the slowest; what is not claimed is hatched.

Usage: python bench/plot.py times.json times.png
A file of bench/compare.py is judged first: gdn bench --judge times.json -o judged.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402: after the choice of a backend without a display


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    report = json.loads(args.times.read_text())

    names = list(dict.fromkeys(a["name"] for r in report["rows"] for a in r["arms"]))
    colours = dict(zip(names, plt.rcParams["axes.prop_cycle"].by_key()["color"] * len(names)))
    rows = [r for r in report["rows"] if any("groups" in a for a in r["arms"])]
    sizes = [sum("groups" in a for a in r["arms"]) + 1 for r in rows]
    figure, grid = plt.subplots(len(rows), figsize=(8, 1 + 0.35 * sum(sizes)), squeeze=False,
                                height_ratios=sizes, layout="constrained")
    for row, axes in zip(rows, grid[:, 0]):
        timed = [a for a in row["arms"] if "groups" in a]
        for at, arm in enumerate(timed):
            medians = [statistics.median(g) for g in arm["groups"]]
            ms = statistics.median(medians)
            axes.barh(at, ms, color=colours[arm["name"]], edgecolor="white",
                      hatch=None if arm.get("claimed", True) else "//")
            axes.plot([min(medians), max(medians)], [at, at], color="black", linewidth=1)
            axes.text(max(medians), at, f" {ms:.3f}", va="center", fontsize="small")
        axes.set_yticks(range(len(timed)), [a["name"] for a in timed])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        norm = "norm inside" if row["norm"] else "pre-norm"
        axes.set_ylabel(f"{row['shape']}\n{norm}\n{row['operation']}", rotation=0, ha="right",
                        va="center", labelpad=12)
    grid[-1, 0].set_xlabel("ms")
    figure.suptitle(f"{report.get('device', '')}\n{report.get('protocol', '')}; "
                    "hatched: not claimed", fontsize="small")
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
