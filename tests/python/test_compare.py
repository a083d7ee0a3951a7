"""bench/compare.py without a GPU: the order of blocks, what is measured, who gets no time."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import make, recurrence

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("compare", ROOT / "bench" / "compare.py")
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)

PROTOCOL = dict(name="test", runs=2, groups=2, warm_up=1, timed=2)


class FakeClock:
    """Counts calls; every third is under the power cap."""

    def __init__(self):
        self.calls = 0

    def ms(self, call):
        call()
        self.calls += 1
        return float(self.calls), self.calls % 3 == 0


def right(x, norm):
    o = recurrence(*(x[n][0] for n in compare.OPERANDS), x["cu"], norm=norm)[0]
    return o[None].to(x["v"].dtype)


def fake_peers():
    def inputs(documents, heads, gate, norm):
        q, k, v, g, beta = make(sum(documents), *heads, 4, 4)
        cu = torch.tensor([0, *torch.tensor(documents).cumsum(0)])
        return dict(q=q, k=k, v=v, g=g, beta=beta, do=torch.randn_like(v), cu=cu)

    def reference(q, k, v, g, beta, cu, norm, heads):
        o = recurrence(q[0], k[0], v[0], g[0], beta[0], cu, norm=norm)[0][None]
        return o[:, :, heads], None

    def err(x, ref):
        x, ref = x.detach(), ref.detach()
        return (((x - ref).norm() / ref.norm()).item(),
                ((x - ref).abs().max() / ref.abs().max()).item())

    def absent():
        raise ImportError("no such package")

    def broken(x, norm):
        if not torch.is_grad_enabled():
            raise RuntimeError("no forward alone")
        return right(x, norm)

    return SimpleNamespace(
        SHAPES={"T": ([5, 3], (1, 2))}, make=inputs, gdn_ref=reference, err=err,
        leaf=lambda x: {n: t.detach().requires_grad_() if n in compare.OPERANDS else t
                        for n, t in x.items()},
        ARMS={"fla": lambda: right, "off": lambda: lambda x, norm: 1.02 * right(x, norm),
              "gone": absent, "broken": lambda: broken})


def test_blocks_are_palindromic_and_the_second_run_reversed():
    order = "".join(f"{'' if i % 4 else ' '}{'AB'[a]}"
                    for i, (_, a) in enumerate(compare.schedule(2, 2, 2)))
    assert order == " ABBA ABBA BAAB BAAB"
    assert [g for g, _ in compare.schedule(2, 2, 2)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_measure_counts_timed_calls_alone():
    clock = FakeClock()
    arms = compare.measure(clock, PROTOCOL, [lambda: None, lambda: None])
    assert clock.calls == 2 * 2 * 4 * 3
    for arm in arms:
        assert [len(g) for g in arm["groups"]] == [4] * 4
        assert arm["power_readings"] == 16
    assert sum(arm["capped"] for arm in arms) == 16  # the last call of each block


@pytest.mark.parametrize("norm", [False, True])
def test_rows(norm, capsys):
    peers = fake_peers()
    arms = compare.load_arms(peers, ["ours", "fla", "off", "gone", "broken"], lambda: right)
    args = argparse.Namespace(norm=norm, gates="model", protocol=PROTOCOL,
                              ops=["fwd", "bwd", "fwd+bwd", "ckpt"])
    rows = compare.rows_of_shape(peers, FakeClock(), args, "T", arms)
    json.dumps(rows)
    assert [r["operation"] for r in rows] == args.ops
    for row in rows:
        assert row["tokens"] == 8 and row["norm"] is norm
        named = {a["name"]: a for a in row["arms"]}
        assert list(named)[:3] == ["ours", "ours again", "fla"]
        assert named["ours again"]["again"] is True and "again" not in named["fla"]
        assert "fails the accuracy check: o, dq" in named["off"]["why_no_time"]
        assert "no such package" in named["gone"]["why_no_time"]
        assert "no forward alone" in named["broken"]["why_no_time"]
        assert ["groups" in a for a in row["arms"]] == [True] * 3 + [False] * 3
    assert "off: rel-RMS/max error o 2.0e-02" in capsys.readouterr().out


STUB = """#!{python}
import json, sys
if sys.argv[2] == "--judge":
    print(open(sys.argv[3]).read())
else:
    arm = dict(name="cpu", process=0, groups=[[1.0]])
    print(json.dumps(dict(rows=[dict(shape="T", operation="fwd", arms=[arm, dict(arm, again=True)])])))
"""


@pytest.mark.parametrize("importable", [True, False])
def test_the_whole_script(importable, tmp_path, monkeypatch):
    gdn = tmp_path / "gdn"
    gdn.write_text(STUB.format(python=sys.executable))
    gdn.chmod(0o755)

    def load_ours():
        if not importable:
            raise ImportError("no extension")
        return right

    class Clock(FakeClock):
        power_cap = SimpleNamespace(why_not="a fake")

    monkeypatch.setattr(compare, "import_peers", lambda folder: fake_peers())
    monkeypatch.setattr(compare, "load_ours", load_ours)
    monkeypatch.setattr(compare, "Clock", Clock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["compare.py", "T", "--peers", "x", "--gdn", str(gdn),
                                      "--quick", "--ops", "fwd", "--arms", "ours,fla",
                                      "-o", str(out)])
    assert compare.main() == 0
    report = json.loads(out.read_text())
    assert report["protocol"].endswith("(reduced)") and report["power_cap"] == "a fake"
    arms = [(a["name"], a["process"], "groups" in a) for a in report["rows"][0]["arms"]]
    assert arms == ([("ours", 0, True), ("ours again", 0, True), ("fla", 0, True)]
                    if importable else
                    [("cpu", 1, True), ("cpu", 1, True), ("fla", 0, True), ("ours", 0, False)])


def test_checked_documents():
    assert compare.clipped([12000, 9000, 6000, 3768, 2000]) == [12000, 9000, 6000, 3768, 2000]
    assert compare.clipped([254976]) == [compare.CHECKED_TOKENS]
    assert compare.clipped([30000, 5000, 5000]) == [30000, 2768]
    assert compare.clipped([10]) == [10]
