"""pytest plugin: what the tests of a peer come to with gdn_kcp's operator in the peer's place.

A test that asks for head dims or operands that no kernel here takes counts as refused, one that asks
for an argument that the operator lacks as not applicable. A short summary comes last.
"""

import re
from collections import Counter

import pytest
import torch

import gdn_kcp

LARGEST_DIM = 128  # of the GPU's kernels, smaller ones by padding
OTHERS = ("refused", "not applicable")
KINDS = ("passed", "failed", "error", *OTHERS, "skipped")
notes: list[str] = []  # for the summary, by the peers' plugins
left_out: Counter = Counter()  # file: tests that don't call the operator
_backends: Counter = Counter()
_misses: list[str] = []  # of the running test


def leave_out(config, items, keep) -> None:
    """Deselects the tests that ``keep`` does not."""
    out = [item for item in items if not keep(item)]
    left_out.update(item.path.name for item in out)
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if keep(item)]


def compare_on(module, name: str) -> None:
    """Has the module's comparison go on after a miss, so that a failed test names all of them."""
    compare = getattr(module, name)

    def compare_all(*args, **kwargs):
        try:
            compare(*args, **kwargs)
        except AssertionError as error:
            _misses.append(f"{error}".strip().split("\n")[0])

    setattr(module, name, compare_all)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    _misses.clear()
    result = yield
    path = gdn_kcp.last_path()
    _backends[path.backend if path else "none"] += 1
    assert not _misses, f"{len(_misses)} missed: " + "; ".join(_misses[:8])
    return result


def _refused(params: dict, message: str) -> str | None:
    """What a test with these parameters asked for, if the kernels rightly refused it."""
    if "head dims" in message and params.get("D", 0) > LARGEST_DIM:
        return f"head dim {params['D']}"
    if "expected bfloat16, got float32" in message and params.get("dtype") == torch.float32:
        return "float32 operands on a GPU"
    return None


def _other_outcome(item, error: Exception) -> tuple[str, str] | None:
    if isinstance(error, gdn_kcp.UnsupportedError):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        asked = _refused(params, f"{error}")
        return (OTHERS[0], asked) if asked else None
    lacks = re.search(r"unexpected keyword argument '(\w+)'", f"{error}")
    if isinstance(error, TypeError) and lacks and "chunk_gated_delta_rule" in f"{error}":
        return OTHERS[1], f"no argument {lacks[1]}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    other = call.when == "call" and call.excinfo and _other_outcome(item, call.excinfo.value)
    if other:
        report.outcome = "skipped"
        report.longrepr = (f"{item.path}", 0, other[1])
        report.other = other
    return report


def pytest_report_teststatus(report):
    other = getattr(report, "other", None)
    return (other[0], other[0][0], other[0].upper()) if other else None


def _why(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else f"{report.longrepr}").strip().split("\n")[0]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    stats = terminalreporter.stats
    reports = {kind: stats.get(kind, []) for kind in KINDS}
    write = terminalreporter.write_line
    write("== summary")
    for file in sorted({r.nodeid.split("::")[0] for all_ in reports.values() for r in all_}):
        mine = {k: [r for r in all_ if r.nodeid.startswith(file)] for k, all_ in reports.items()}
        counts = ", ".join(f"{len(r)} {k}" for k, r in mine.items() if r or k in KINDS[:2])
        out = left_out[file.split("/")[-1]]
        write(f"{file}: {counts}; {out} that don't call the operator left out")
        for kind in OTHERS:
            why = Counter(r.other[1] for r in mine[kind])
            for reason, count in sorted(why.items()):
                write(f"  {kind}: {count} for {reason}")
        for reason, count in Counter(r.longrepr[2] for r in mine["skipped"]).items():
            write(f"  skipped: {count}, {reason}")
        for report in mine["failed"] + mine["error"]:
            write(f"  FAILED {report.nodeid.split('::')[-1]}: {_why(report)[:400]}")
    for note in notes:
        write(f"  {note}")
    for name, count in _backends.items():
        write(f"  ran to the end on {name}: {count}")
