"""Host time of the PyTorch operator: what a call costs beside its kernels.

On the CPU one token, where the kernels are microseconds, by this process's CPU time; on a GPU shape
N, by the time until the call returns, with nothing queued before it. torch's own part, a Python
autograd function that returns its inputs as gradients, is shown beside it.

On a GPU autograd runs a backward on a thread of its own, and how long that thread takes to wake may
depend on how long it has slept, so on how long the kernels take: torch's own part is also shown beside
kernels as long as the operator's, and both with the backward on the calling thread. The halves on their
own have neither thread nor autograd: what the package and its launches cost. A training step wakes that
thread once for all its layers, and the host runs ahead of the GPU: what a layer adds to a step of several is
shown last.

Usage: python bench/host_time.py [--device cuda] [--calls 200] [--groups 15]
"""

import argparse
import statistics
import time

import torch

import gdn_kcp


class Nothing(torch.autograd.Function):
    """torch's own share: five inputs saved, five gradients returned. `cycles`: of the GPU, kept busy
    in the forward and in the backward."""

    @staticmethod
    def forward(ctx, cycles, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.cycles = cycles
        if cycles[0]:
            torch.cuda._sleep(cycles[0])
        return inputs[2].clone()

    @staticmethod
    def backward(ctx, do):
        if ctx.cycles[1]:
            torch.cuda._sleep(ctx.cycles[1])
        return (None, *ctx.saved_tensors)


def microseconds(call, device, calls, groups):
    """(least, median) over the groups; a call's time up to its return."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    times = []
    for _ in range(groups + 1):
        spent = 0.0
        for _ in range(calls):
            if device == "cuda":
                torch.cuda.synchronize()
            begun = clock()
            call()
            spent += clock() - begun
        times.append(spent / calls * 1e6)
    times = times[1:]  # the first group warms up
    return min(times), statistics.median(times)


def where_it_goes(f, leaves, do, device, calls) -> dict:
    """Medians of what a forward + backward's time passes in."""
    stamps, real = [], gdn_kcp.autograd.run_backward

    def stamped(*args):
        stamps.append(time.perf_counter())
        try:
            return real(*args)
        finally:
            stamps.append(time.perf_counter())

    parts = []
    gdn_kcp.autograd.run_backward = stamped
    try:
        for _ in range(calls):
            stamps.clear()
            if device == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            o = f(leaves)
            forward = time.perf_counter()
            torch.autograd.grad(o, leaves, do)
            ends = [begun, forward, *stamps, time.perf_counter()]
            parts.append([b - a for a, b in zip(ends, ends[1:])])
    finally:
        gdn_kcp.autograd.run_backward = real
    names = ("forward", "autograd until the backward", "the backward's call", "autograd after it")
    return {n: statistics.median(p) * 1e6 for n, p in zip(names, zip(*parts))}


def a_layer(f, layers: list, do) -> float:
    """What one of `layers`, leaves each, adds to a forward + backward of all, with the wait for the GPU."""

    def step(some):
        leaves = [leaf for layer in some for leaf in layer]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        torch.autograd.grad([f(layer) for layer in some], leaves, [do] * len(some))
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def median(some):
        return statistics.median([step(some) for _ in range(60)][10:]) * 1e6

    return (median(layers) - median(layers[:1])) / (len(layers) - 1)


def gpu_microseconds(call) -> float:
    """Of a call's kernels, with the host ahead of the GPU; least of some."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--calls", type=int, default=200)
    p.add_argument("--groups", type=int, default=15)
    args = p.parse_args()
    device = args.device
    torch.set_num_threads(1)
    if device == "cuda":
        lengths, H, HV, D = (2049, 3001, 3142), 2, 6, 128
    else:
        lengths, H, HV, D = (1,), 1, 1, 16
    T = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    bf16 = dict(dtype=torch.bfloat16, device=device)
    q, k, v = (torch.randn(1, T, h, D, **bf16) for h in (H, H, HV))
    g, beta = -torch.rand(1, T, HV, device=device), torch.rand(1, T, HV, device=device)
    plain = [q, k, v, g, beta]
    leaves = [t.clone().requires_grad_() for t in plain]
    do = torch.randn_like(v)
    ctx = gdn_kcp.build_context(gdn_kcp.partition(cu, 1), None, 0, device)
    offsets = dict(cu_seqlens=cu.to(device), cu_seqlens_cpu=cu)

    def drop_in(inputs):
        return gdn_kcp.chunk_gated_delta_rule(*inputs, **offsets)[0]

    def kcp(inputs):
        return gdn_kcp.chunk_gdn_kcp(*inputs, ctx)

    def with_gradients(f):
        return lambda: torch.autograd.grad(f(leaves), leaves, do)

    def on_this_thread(f):
        def call():
            with torch.autograd.set_multithreading_enabled(False):
                f()

        return call

    def nothing(cycles):
        return with_gradients(lambda x: Nothing.apply(cycles, *x))

    with torch.no_grad():
        o, saved = gdn_kcp.chunk_gdn_kcp_forward(*plain, ctx)
    whole = with_gradients(kcp)
    rows = {
        "torch's own share, forward + backward": nothing((0, 0)),
        "chunk_gated_delta_rule, forward": lambda: drop_in(plain),
        "chunk_gated_delta_rule, forward + backward": with_gradients(drop_in),
        "chunk_gdn_kcp, forward": lambda: kcp(plain),
        "chunk_gdn_kcp, forward + backward": whole,
        "chunk_gdn_kcp_forward": lambda: gdn_kcp.chunk_gdn_kcp_forward(*plain, ctx),
        "chunk_gdn_kcp_backward": lambda: gdn_kcp.chunk_gdn_kcp_backward(
            *plain, ctx, do, saved=saved),
    }
    if device == "cuda":
        forward = gpu_microseconds(rows["chunk_gdn_kcp_forward"])
        backward = gpu_microseconds(rows["chunk_gdn_kcp_backward"])
        rate = 1_000_000 / gpu_microseconds(lambda: torch.cuda._sleep(1_000_000))
        busy = nothing((int(forward * rate), int(backward * rate)))
        nbytes = gdn_kcp.workspace_bytes(ctx, H_qk=H, HV=HV)
        options = dict(workspace=gdn_kcp.Workspace(nbytes, device), graph="replay")

        def replayed(inputs):
            return gdn_kcp.chunk_gdn_kcp(*inputs, ctx, **options)

        rows |= {
            "torch's share beside kernels as long": busy,
            "torch's share beside them, on one thread": on_this_thread(busy),
            "chunk_gdn_kcp, the same, on one thread": on_this_thread(whole),
            "chunk_gdn_kcp, forward, replay": lambda: replayed(plain),
            "chunk_gdn_kcp, forward + backward, replay": with_gradients(replayed),
        }
        print(f"kernels: forward {forward:.0f} us, backward {backward:.0f} us")
    print(f"{device}, torch {torch.__version__}: us per call, least and median of {args.groups}")
    for name, call in rows.items():
        least, median = microseconds(call, device, args.calls, args.groups)
        print(f"{name:<46}{least:8.1f}{median:8.1f}")
    if device == "cuda":
        layers = [[t.clone().requires_grad_() for t in plain] for _ in range(9)]
        for name, f in {"chunk_gated_delta_rule": drop_in, "chunk_gdn_kcp": kcp}.items():
            spent, busy = a_layer(f, layers, do), gpu_microseconds(with_gradients(f))
            print(f"{name}, a layer of nine: {spent:.0f} us; kernels {busy:.0f}")
    parts = where_it_goes(kcp, leaves, do, device, args.calls)
    print("chunk_gdn_kcp, forward + backward: "
          + ", ".join(f"{name} {spent:.0f}" for name, spent in parts.items()))


if __name__ == "__main__":
    main()
