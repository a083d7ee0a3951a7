"""Ours beside FLA and FlashQLA on one GPU: one process, all arms on the same inputs, the protocol of
docs/benchmarks.md; the table is `gdn bench --judge`'s, which decides what may be claimed.

Usage: python bench/compare.py --peers FOLDER [--gdn build/cuda/cli/gdn] M N [--norm] [--quick]
FOLDER holds peers.py (the peers' arms), workloads.py (shapes and inputs) and ref64.py (an fp64
recurrence). Needs torch, the peers' packages and gdn_kcp (GDN_KCP_LIBRARY names its extension;
GDN_BACKEND forces one of its backends). Where gdn_kcp does not import, ours are `gdn bench`'s times of
another process: shown, not claimed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

Arm = Callable[[dict[str, Any], bool], Any]  # (inputs, norm inside) -> o
OPERANDS = ("q", "k", "v", "g", "beta")
OPERATIONS = ("fwd", "bwd", "fwd+bwd", "ckpt")
CHECKED_TOKENS = 32768  # of the first documents, two value heads
BARS = (1e-2, 2e-2)  # rel-RMS and max error that any arm must keep
L2_FILL_BYTES = 256 << 20
SHORT = dict(name="short", runs=2, groups=8, warm_up=5, timed=20)
QUICK = dict(name="quick", runs=2, groups=1, warm_up=5, timed=20)


def schedule(runs: int, groups: int, arms: int) -> list[tuple[int, int]]:
    """(group, arm) of every block: palindromic groups, odd runs in reverse order."""
    blocks = []
    for group in range(runs * groups):
        order = list(range(arms)) if group // groups % 2 == 0 else list(range(arms))[::-1]
        blocks += [(group, arm) for arm in order + order[::-1]]
    return blocks


class PowerCap:
    """Whether the software power cap holds the clock of a GPU down, by NVML; else why not known."""

    SOFTWARE_POWER_CAP = 0x4

    def __init__(self, uuid: str) -> None:
        self.why_not = ""
        self._device = ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self.why_not = "libnvidia-ml.so.1 is not here"
            return
        code = self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByUUID(
            uuid.encode(), ctypes.byref(self._device))
        if code or self.held() is None:
            self.why_not = f"NVML refuses with code {code}"

    def held(self) -> bool | None:
        if self.why_not:
            return None
        reasons = ctypes.c_ulonglong()
        # The name before driver 535, which later ones keep.
        if self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(
                self._device, ctypes.byref(reasons)):
            return None
        return bool(reasons.value & self.SOFTWARE_POWER_CAP)


class Clock:
    """Times of calls on the GPU, each with a cold L2."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._fill = torch.empty(L2_FILL_BYTES, dtype=torch.uint8, device="cuda")
        self.power_cap = PowerCap(f"GPU-{torch.cuda.get_device_properties(0).uuid}")

    def ms(self, call: Callable[[], Any]) -> tuple[float, bool | None]:
        cuda = self._torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self._fill.zero_()
        cuda.synchronize()
        begin.record()
        call()
        end.record()
        capped = self.power_cap.held()
        end.synchronize()
        return begin.elapsed_time(end), capped


def measure(clock: Any, protocol: dict[str, Any], calls: list[Callable[[], Any]]) -> list[dict]:
    """Per call what `gdn bench --judge` wants of an arm: groups, power_readings, capped."""
    arms = [dict(groups=[[] for _ in range(protocol["runs"] * protocol["groups"])],
                 power_readings=0, capped=0) for _ in calls]
    for group, arm in schedule(protocol["runs"], protocol["groups"], len(calls)):
        for i in range(-protocol["warm_up"], protocol["timed"]):
            ms, capped = clock.ms(calls[arm])
            if i < 0:
                continue
            arms[arm]["groups"][group].append(ms)
            arms[arm]["power_readings"] += capped is not None
            arms[arm]["capped"] += capped is True
    return arms


def import_peers(folder: Path) -> Any:
    """peers.py as a module. It runs its main on import, which without shapes does nothing."""
    sys.path.insert(0, str(folder))
    arguments, sys.argv = sys.argv, ["peers.py", "", ""]
    try:
        return importlib.import_module("peers")
    finally:
        sys.argv = arguments


def load_ours() -> Arm:
    module = importlib.import_module("gdn_kcp")

    def arm(x: dict[str, Any], norm: bool) -> Any:
        return module.chunk_gated_delta_rule(
            *(x[n] for n in OPERANDS), cu_seqlens=x["cu"], cu_seqlens_cpu=x["cu_cpu"],
            use_qk_l2norm_in_kernel=norm)[0]

    return arm


def make_inputs(peers: Any, documents: list[int], heads: tuple[int, int], norm: bool,
                gates: str) -> dict[str, Any]:
    x = peers.leaf(peers.make(documents, heads, gate=gates, norm=norm))
    x["cu32"], x["cu_cpu"] = x["cu"].int(), x["cu"].cpu()
    return x


def gradients(arm: Arm, x: dict[str, Any], norm: bool, d_o: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    o = arm(x, norm)
    return o, torch.autograd.grad(o, [x[n] for n in OPERANDS], d_o)


def operation_call(arm: Arm, x: dict[str, Any], operation: str, norm: bool) -> Callable[[], Any]:
    import torch
    import torch.utils.checkpoint

    operands = [x[n] for n in OPERANDS]
    if operation == "fwd":
        def call() -> Any:
            with torch.no_grad():
                return arm(x, norm)
    elif operation == "bwd":
        o = arm(x, norm)
        def call() -> Any:
            return torch.autograd.grad(o, operands, x["do"], retain_graph=True)
    elif operation == "fwd+bwd":
        def call() -> Any:
            return gradients(arm, x, norm, x["do"])[1]
    else:
        def call() -> Any:
            o = torch.utils.checkpoint.checkpoint(
                lambda *a: arm({**x, **dict(zip(OPERANDS, a))}, norm), *operands,
                use_reentrant=False)
            return torch.autograd.grad(o, operands, x["do"])
    return call


def clipped(documents: list[int]) -> list[int]:
    """The first documents, CHECKED_TOKENS tokens in all."""
    kept: list[int] = []
    for length in documents:
        kept.append(min(length, CHECKED_TOKENS - sum(kept)))
        if sum(kept) == CHECKED_TOKENS:
            break
    return kept


class Check:
    """The fp64 recurrence on two value heads of the first documents, computed once."""

    def __init__(self, peers: Any, documents: list[int], heads: tuple[int, int], norm: bool,
                 gates: str) -> None:
        import torch

        self._err, self._norm = peers.err, norm
        self.x = x = make_inputs(peers, clipped(documents), heads, norm, gates)
        self.heads = list(range(0, heads[1], max(1, heads[1] // 2)))[:2]
        exact = {n: x[n].detach().double().requires_grad_() for n in OPERANDS}
        self.o = peers.gdn_ref(*exact.values(), x["cu"], norm=norm, heads=self.heads)[0]
        self.d_o = torch.zeros_like(x["do"])
        self.d_o[:, :, self.heads] = x["do"][:, :, self.heads]
        self.gradients = torch.autograd.grad(self.o, list(exact.values()),
                                             x["do"][:, :, self.heads].double())

    def failure(self, name: str, arm: Arm) -> str:
        """Why the arm gets no time; "" where it is right. Prints its figures."""
        o, grads = gradients(arm, self.x, self._norm, self.d_o)
        figures = {"o": self._err(o[:, :, self.heads], self.o)}
        for operand, got, want in zip(OPERANDS, grads, self.gradients):
            if operand in ("v", "g", "beta"):
                got, want = got[:, :, self.heads], want[:, :, self.heads]
            figures["d" + operand] = self._err(got, want)
        wrong = [t for t, (rms, most) in figures.items() if not (rms <= BARS[0] and most <= BARS[1])]
        print(f"  {name}: rel-RMS/max error " +
              ", ".join(f"{t} {rms:.1e}/{most:.1e}" for t, (rms, most) in figures.items()),
              flush=True)
        return "fails the accuracy check: " + ", ".join(wrong) if wrong else ""


def load_arms(peers: Any, names: list[str], ours: Callable[[], Arm]) -> dict[str, Arm | str]:
    """By name the arm, or why there is none."""
    arms: dict[str, Arm | str] = {}
    for name in names:
        try:
            arms[name] = ours() if name == "ours" else peers.ARMS[name]()
        except Exception as error:  # whatever an import of somebody else's package raises
            arms[name] = f"not available: {type(error).__name__}: {error}"[:200]
    return arms


def rows_of_shape(peers: Any, clock: Any, args: argparse.Namespace, shape: str,
                  arms: dict[str, Arm | str]) -> list[dict]:
    documents, heads = peers.SHAPES[shape]
    absent = {name: arm for name, arm in arms.items() if isinstance(arm, str)}
    print(f"{shape}: two value heads of the first {sum(clipped(documents))} tokens against fp64",
          flush=True)
    check = Check(peers, documents, heads, args.norm, args.gates)
    for name, arm in arms.items():
        if name in absent:
            continue
        try:
            failure = check.failure(name, arm)
        except Exception as error:
            failure = f"failed: {type(error).__name__}: {error}"[:200]
        if failure:
            absent[name] = failure
    del check
    x = make_inputs(peers, documents, heads, args.norm, args.gates)
    rows = []
    for operation in args.ops:
        gc.collect()
        calls = {}
        for name in arms:
            try:
                if name not in absent:
                    calls[name] = operation_call(arms[name], x, operation, args.norm)
                    calls[name]()
            except Exception as error:
                calls.pop(name, None)
                absent[name] = f"failed: {type(error).__name__}: {error}"[:200]
        running = list(calls)
        twice = running[:1] + running  # the first arm again: the noise
        timed = measure(clock, args.protocol, [calls[name] for name in twice])
        del calls
        listed = [dict(name=name, process=0, **arm) for name, arm in zip(twice, timed)]
        if listed:
            listed[1] |= dict(name=running[0] + " again", again=True)
        listed += [dict(name=name, process=0, why_no_time=why) for name, why in absent.items()]
        rows.append(dict(shape=shape, norm=args.norm, gates=args.gates, tokens=sum(documents),
                         operation=operation, arms=listed))
        print(f"  {operation}: " + ", ".join(
            f"{a['name']} {min(map(min, a['groups'])):.3f}" for a in listed if "groups" in a) +
            " ms (fastest)", flush=True)
    return rows


def add_ours_of_another_process(args: argparse.Namespace, rows: list[dict]) -> None:
    """`gdn bench` on the same device after this process's own times, as the first arm of each row."""
    command = [args.gdn, "bench", *args.shapes, "--gates", args.gates, "--json",
               "--ops", ",".join(args.ops)]
    command += ["--norm"] if args.norm else []
    command += ["--quick"] if args.protocol["name"] == "quick" else ["--short"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    by_key = {(r["shape"], r["operation"]): r["arms"] for r in report["rows"]}
    for row in rows:
        mine = by_key.get((row["shape"], row["operation"]), [])
        row["arms"] = [{**arm, "process": 1} for arm in mine] + [
            arm for arm in row["arms"] if not arm.get("again")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", help="workload letters, e.g. M N")
    parser.add_argument("--peers", type=Path, required=True, help="folder of peers.py")
    parser.add_argument("--gdn", default="build/cuda/cli/gdn")
    parser.add_argument("--arms", default="ours,fla,qla", help="ours first: the table's ratios")
    parser.add_argument("--ops", default="fwd,fwd+bwd,ckpt", help=", ".join(OPERATIONS))
    parser.add_argument("--norm", action="store_true", help="q and k normalised inside")
    parser.add_argument("--gates", default="model", help="model, slow or fla")
    parser.add_argument("--quick", action="store_true", help="2 groups: for daily work")
    parser.add_argument("-o", "--output", type=Path, help="keep the JSON")
    args = parser.parse_args()
    args.ops = args.ops.split(",")
    args.protocol = QUICK if args.quick else SHORT
    if unknown := [o for o in args.ops if o not in OPERATIONS]:
        parser.error(f"--ops: expected {', '.join(OPERATIONS)}, got {', '.join(unknown)}")

    import torch

    peers = import_peers(args.peers.resolve())
    if unknown := [s for s in args.shapes if s not in peers.SHAPES]:
        parser.error(f"expected shapes of {', '.join(peers.SHAPES)}, got {', '.join(unknown)}")
    arms = load_arms(peers, args.arms.split(","), load_ours)
    clock = Clock()
    rows = [row for shape in args.shapes for row in rows_of_shape(peers, clock, args, shape, arms)]
    power_cap = clock.power_cap.why_not or "read by NVML"
    del clock
    if isinstance(arms.get("ours"), str):
        torch.cuda.empty_cache()
        add_ours_of_another_process(args, rows)
    p = args.protocol
    report = dict(
        device=f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        protocol=f"{p['name']}: {p['runs']} runs of {p['groups']} groups, 2 blocks of "
                 f"{p['warm_up']} + {p['timed']} calls per arm" +
                 (" (reduced)" if p is QUICK else ""),
        power_cap=power_cap, rows=rows)
    with tempfile.TemporaryDirectory() as folder:
        path = args.output or Path(folder) / "compare.json"
        path.write_text(json.dumps(report, indent=1))
        return subprocess.run([args.gdn, "bench", "--judge", str(path)]).returncode


if __name__ == "__main__":
    sys.exit(main())
