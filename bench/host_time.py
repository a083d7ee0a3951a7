"""Host time of the PyTorch operator: what a call costs beside its kernels.

On the CPU one token, where the kernels are microseconds, by this process's CPU time; on a GPU shape
N, by the time until the call returns, with nothing queued before it. torch's own part, a Python
autograd function that returns its inputs as gradients, is shown beside it.

Usage: python bench/host_time.py [--device cuda] [--calls 200] [--groups 15]
"""

import argparse
import statistics
import time

import torch

import gdn_kcp


class Nothing(torch.autograd.Function):
    """torch's own share: five inputs saved, five gradients returned."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return inputs[2].clone()

    @staticmethod
    def backward(ctx, do):
        return ctx.saved_tensors


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

    rows = {
        "torch's own share, forward + backward": with_gradients(lambda x: Nothing.apply(*x)),
        "chunk_gated_delta_rule, forward": lambda: drop_in(plain),
        "chunk_gated_delta_rule, forward + backward": with_gradients(drop_in),
        "chunk_gdn_kcp, forward": lambda: kcp(plain),
        "chunk_gdn_kcp, forward + backward": with_gradients(kcp),
    }
    print(f"{device}, torch {torch.__version__}: us per call, least and median of {args.groups}")
    for name, call in rows.items():
        least, median = microseconds(call, device, args.calls, args.groups)
        print(f"{name:<46}{least:8.1f}{median:8.1f}")


if __name__ == "__main__":
    main()
