"""The causal convolution of a GDN layer on a GPU: forward and backward at workload M, [32768, 10240] bf16 with
W = 4 and SiLU in five documents, beside torch's own depthwise convolution, which knows no documents.

CUDA events, a cold L2 (256 MiB filled before each call), medians of 20. TB/s counts x and y once in the
forward, x, dy and dx once in the backward. Nothing is timed unless y, dx and dweight of ours agree with
fp64 in 64 of the channels; torch's arm is not checked.

Usage: python bench/conv.py
"""

import torch

import gdn_kcp

DOCUMENTS, CHANNELS, W = (12000, 9000, 6000, 3768, 2000), (2 * 16 + 48) * 128, 4


def measure(call) -> float:
    cold = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(23):
        cold.fill_(i)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[10]


def exact(x, weight, cu, channels):
    """The convolution of a few channels in fp64."""
    outs = []
    for a, b in zip(cu[:-1], cu[1:]):
        rows = torch.nn.functional.pad(x[0, a:b, :channels].T[None], (W - 1, 0))
        outs.append(torch.nn.functional.conv1d(rows, weight[:channels, None], groups=channels)[0].T)
    return torch.nn.functional.silu(torch.cat(outs))[None]


def check(x, weight, dy, cu) -> None:
    n = 64
    y = gdn_kcp.causal_conv1d(x, weight, cu_seqlens=torch.tensor(cu))
    got = (y, *torch.autograd.grad(y, (x, weight), dy))
    wide, w = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    z = exact(wide[..., :n], w, cu, n)
    want = (z, *torch.autograd.grad(z, (wide, w), dy[..., :n].double()))
    for a, b, name in zip(got, want, ("y", "dx", "dweight")):
        a, b = (a[:n], b[:n]) if name == "dweight" else (a[..., :n], b[..., :n])
        error = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        assert error < 5e-3, (name, error)
        print(f"{name}: rel-RMS {error:.1e}")


def main() -> None:
    tokens = sum(DOCUMENTS)
    cu = [sum(DOCUMENTS[:i]) for i in range(len(DOCUMENTS) + 1)]
    torch.manual_seed(0)
    x = torch.randn(1, tokens, CHANNELS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.5 * torch.randn(CHANNELS, W, device="cuda", dtype=torch.bfloat16)).requires_grad_()
    dy = torch.randn_like(x)
    offsets = torch.tensor(cu)
    check(x, weight, dy, cu)

    def ours():
        return gdn_kcp.causal_conv1d(x, weight, cu_seqlens=offsets)

    def torchs():
        rows = torch.nn.functional.conv1d(x.mT, weight[:, None], padding=W - 1, groups=CHANNELS)
        return torch.nn.functional.silu(rows[..., :tokens]).mT

    gigabytes = x.numel() * x.element_size() / 1e9
    for name, arm in (("gdn_kcp", ours), ("torch", torchs)):
        with torch.no_grad():
            forward = measure(arm)
        y = arm()
        backward = measure(lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True))
        print(f"{name:8} forward {forward:6.3f} ms {2 * gigabytes / forward:6.3f} TB/s   "
              f"backward {backward:6.3f} ms {3 * gigabytes / backward:6.3f} TB/s")


if __name__ == "__main__":
    main()
