"""Times of chunk_gdn_kcp on a GPU by the form of q, k, v, eager and as CUDA graphs.

split: row.split and views, whose backward concatenates; packed: packed_qkv_views; contig: three
tensors. eager: a call as it is; graph: the same captured by torch.cuda.graph, which is the kernels
without the host; replay: graph="replay", which copies inputs in and results out. The times are CUDA
events around one call after a 256 MiB fill and a synchronisation, medians over palindromic groups, in ms.
Before any time: all forms and modes give the same bits, and the values of the last documents and the
first key head keep the bars against the fp64 reference backend.

Usage: python bench/forms.py [N] [M] [--groups 2] [--calls 20]
"""

import argparse
import os
import statistics
import sys

import torch

import gdn_kcp

SHAPES = {"N": ([2049, 3001, 3142], 2, 6), "M": ([12000, 9000, 6000, 3768, 2000], 16, 48)}
D = 128
FORMS, MODES = ("split", "packed", "contig"), ("eager", "graph", "replay")
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
BARS = dict(o=5e-3, dq=6e-3, dk=6e-3, dv=6e-3, dg=6e-3, dbeta=6e-3)
CHECKED = 6000  # tokens of whole last documents, at most
L2_FILL_BYTES = 256 << 20


class Case:
    """One shape: its operands, and calls of every form and mode on them."""

    def __init__(self, name: str):
        self.lengths, self.H, self.HV = SHAPES[name]
        self.T = sum(self.lengths)
        self.cu = torch.tensor([0, *self.lengths]).cumsum(0)
        self.sizes = [self.H * D, self.H * D, self.HV * D]
        bf16 = dict(dtype=torch.bfloat16, device="cuda")
        row = torch.randn(1, self.T, sum(self.sizes), **bf16)
        q, k, _ = (t.unflatten(-1, (-1, D)) for t in row.split(self.sizes, -1))
        for t in (q, k):  # normalised before the call
            t.copy_(torch.nn.functional.normalize(t.float(), dim=-1))
        self.row = row.requires_grad_()
        self.parts = [t.detach().clone().requires_grad_() for t in self.views("packed")]
        self.g = torch.nn.functional.logsigmoid(torch.randn(1, self.T, self.HV, device="cuda"))
        self.g.requires_grad_()
        self.beta = torch.rand(1, self.T, self.HV, device="cuda").requires_grad_()
        self.do = torch.randn(1, self.T, self.HV, D, **bf16)
        self.ctx = gdn_kcp.build_context(gdn_kcp.partition(self.cu, 1), None, 0, "cuda")
        nbytes = gdn_kcp.workspace_bytes(self.ctx, H_qk=self.H, HV=self.HV)
        self.workspace = gdn_kcp.Workspace(nbytes, "cuda")

    def views(self, form: str):
        if form == "contig":
            return self.parts
        if form == "packed":
            return gdn_kcp.packed_qkv_views(self.row, H_qk=self.H, HV=self.HV)
        return [t.unflatten(-1, (-1, D)) for t in self.row.split(self.sizes, -1)]

    def step(self, form: str, backward: bool, **options):
        """(o, gradients of the row or of its parts, dg, dbeta)."""
        with torch.set_grad_enabled(backward):
            o = gdn_kcp.chunk_gdn_kcp(*self.views(form), self.g, self.beta, self.ctx, **options)
            if not backward:
                return (o,)
            leaves = self.parts if form == "contig" else [self.row]
            return (o.detach(), *torch.autograd.grad(o, [*leaves, self.g, self.beta], self.do))

    def call(self, form: str, mode: str, backward: bool):
        """A function that makes one call and returns its results."""
        if mode == "eager":
            return lambda: self.step(form, backward)
        if mode == "replay":
            options = dict(workspace=self.workspace, graph="replay")
            return lambda: self.step(form, backward, **options)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step(form, backward)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.step(form, backward)

        def replay():
            graph.replay()
            return results

        return replay

    def named(self, results) -> dict:
        """The results by name, gradients of a row as those of its parts."""
        if len(results) == 4:
            parts = results[1].split(self.sizes, -1)
            results = (results[0], *(t.unflatten(-1, (-1, D)) for t in parts), *results[2:])
        return dict(zip(NAMES, results))

    def errors(self, results: dict) -> dict:
        """Relative RMS of each result over the last documents and the first key head's heads."""
        count, tokens = 0, 0
        for length in reversed(self.lengths):
            if tokens + length > CHECKED:
                break
            count, tokens = count + 1, tokens + length
        rows, values = slice(self.T - tokens, None), self.HV // self.H
        heads = [1, 1, values, values, values]
        own = (*self.parts, self.g, self.beta)
        inputs = [t.detach()[:, rows, :n].double().cpu().requires_grad_() for t, n in zip(own, heads)]
        cu = self.cu[-count - 1 :] - self.cu[-count - 1]
        forced, os.environ["GDN_BACKEND"] = os.environ.get("GDN_BACKEND"), "reference"
        try:
            o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=cu)
            do = self.do[:, rows, :values].double().cpu()
            exact = (o.detach(), *torch.autograd.grad(o, inputs, do))
        finally:
            del os.environ["GDN_BACKEND"]
            if forced is not None:
                os.environ["GDN_BACKEND"] = forced
        found = {}
        for name, ref, n in zip(NAMES, exact, [values, *heads]):
            x = results[name][:, rows, :n].double().cpu()
            found[name] = float((x - ref).norm() / ref.norm())
        return found


def same_bits(got: dict, want: dict) -> bool:
    return all(torch.equal(got[name], want[name]) for name in got)


def milliseconds(calls: dict, groups: int, timed: int, warm_up: int = 5) -> dict:
    """The median of each call, arms in the order A B .. B A in every group."""
    fill = torch.empty(L2_FILL_BYTES, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = {key: [] for key in calls}
    for _ in range(groups):
        for key in [*calls, *reversed(calls)]:
            for i in range(-warm_up, timed):
                fill.zero_()
                torch.cuda.synchronize()
                begin.record()
                calls[key]()
                end.record()
                end.synchronize()
                if i >= 0:
                    times[key].append(begin.elapsed_time(end))
    return {key: statistics.median(taken) for key, taken in times.items()}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("shapes", nargs="*", default=["N", "M"], choices=SHAPES)
    p.add_argument("--groups", type=int, default=2)
    p.add_argument("--calls", type=int, default=20)
    args = p.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, gdn_kcp {gdn_kcp.__version__}")
    for shape in args.shapes:
        torch.manual_seed(0)
        case = Case(shape)
        want = case.named(case.step("contig", True))
        path = gdn_kcp.last_path()
        errors = case.errors(want)
        text = ", ".join(f"{name} {x * 1e3:.2f}" for name, x in errors.items())
        print(f"\n{shape}: {case.T} tokens, {case.H}/{case.HV} heads, on {path.backend}; x 1e-3: {text}")
        if any(not x <= BARS[name] for name, x in errors.items()):
            print("no times: an error is above its bar")
            return 1
        print(f"{'ms':<9}{'form':<8}" + "".join(f"{m:>9}" for m in MODES) + "   eager/graph")
        for operation in ("fwd", "fwd+bwd"):
            backward = operation != "fwd"
            calls = {(f, m): case.call(f, m, backward) for f in FORMS for m in MODES}
            for key, call in calls.items():
                if not same_bits(case.named(call()), want):
                    print(f"no times: {operation} {key} gives other bits")
                    return 1
            times = milliseconds(calls, args.groups, args.calls)
            for form in FORMS:
                row = [times[form, mode] for mode in MODES]
                print(f"{operation:<9}{form:<8}" + "".join(f"{t:9.3f}" for t in row)
                      + f"{row[0] / row[1]:14.3f}")
        del case, want, calls
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
