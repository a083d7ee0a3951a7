"""Ranks of a group of NCCL alone, through PyTorch, on as many GPUs: that the library's own communicator
gives the bits of torch's collectives, that every rank hears what one brings wrong before the first
collective, that the next call works, and what a call, its agreement and either kind of collectives take.

Usage: torchrun --nproc-per-node W tests/gpu/nccl_ranks.py [CALLS]. Exit status 1 if bits differ or an
error is not heard.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import gdn_kcp
from gdn_kcp.torch_group import TorchMember

NAMES = ("q", "k", "v", "g", "beta")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
group = dist.group.WORLD
others = dist.new_group()  # of the same ranks: a group has one kind of collectives


def operands(tokens: int, heads: tuple[int, int]) -> dict[str, torch.Tensor]:
    random = torch.Generator(device).manual_seed(7 + rank)
    h, hv = heads

    def normal(*shape):
        return torch.randn(1, tokens, *shape, generator=random, device=device)

    x = {"q": normal(h, 128), "k": normal(h, 128), "v": normal(hv, 128)}
    x = {name: value.to(torch.bfloat16) for name, value in x.items()}
    x["g"] = torch.nn.functional.logsigmoid(normal(hv) + 5)
    x["beta"] = normal(hv).sigmoid()
    return {name: value.requires_grad_() for name, value in x.items()}


def step(x, context, backward: bool) -> list[torch.Tensor]:
    o = gdn_kcp.chunk_gdn_kcp(*[x[name] for name in NAMES], context, use_qk_l2norm_in_kernel=True)
    if not backward:
        return [o]
    return [o, *torch.autograd.grad(o, [x[name] for name in NAMES], torch.ones_like(o))]


def heard(what: str, call, expected: str) -> bool:
    """Whether ``call`` fails with our error, in which ``expected`` stands; printed where it does not."""
    try:
        call()
        got = "no error"
    except gdn_kcp.Error as error:
        got = f"{type(error).__name__}: {error}"
    if expected not in got:
        print(f"rank {rank}, {what}: expected '{expected}', got {got}", flush=True)
    return expected in got


def errors(context, x, wrong: int) -> bool:
    """Rank ``wrong`` brings something of its own that does not fit, in turn everything of one kind."""
    mine = dict(x)
    if rank == wrong:
        mine["v"] = x["v"].float()
    ok = heard("values of fp32", lambda: step(mine, context, True), f"rank {wrong}: v")
    if rank == wrong:
        mine = dict(x, k=x["k"][:, :, :, :64])
    ok &= heard("half a key", lambda: step(mine, context, True), f"rank {wrong}: ")
    norm = rank != wrong
    ok &= heard(
        "options of its own",
        lambda: gdn_kcp.chunk_gdn_kcp(*[x[name] for name in NAMES], context,
                                      use_qk_l2norm_in_kernel=norm),
        "expected the same on every rank")
    step(x, context, True)  # the next call works
    return ok


def times(x, own, torchs, calls: int) -> list[str]:
    """Of a call from an empty queue, the slowest rank's median; on the host until the call returns."""
    agree = TorchMember.begin_agreement
    arms = {
        "own NCCL": (own, agree),
        "without agreement": (own, lambda *_: lambda: None),
        "torch's collectives": (torchs, agree),
    }
    rows = []
    for what, backward in (("forward", False), ("forward + backward", True)):
        gpu = {name: [] for name in arms}
        host = {name: [] for name in arms}
        for name in (*arms, *reversed(arms)) * 2:
            context, TorchMember.begin_agreement = arms[name]
            for call in range(calls):
                dist.barrier(device_ids=[device.index])
                torch.cuda.synchronize()
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                began = time.perf_counter()
                marks[0].record()
                step(x, context, backward)
                marks[1].record()
                spent = (time.perf_counter() - began) * 1e6
                torch.cuda.synchronize()
                if call >= calls // 4:
                    gpu[name].append(marks[0].elapsed_time(marks[1]) * 1e3)
                    host[name].append(spent)
        TorchMember.begin_agreement = agree
        for name in arms:
            medians = [statistics.median(gpu[name]), statistics.median(host[name])]
            slowest = torch.tensor(medians, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            rows.append("{:18} {:19} {:6.0f} us on the GPU, {:5.0f} on the host".format(
                what, name, *slowest.tolist()))
    return rows


def main() -> int:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    passed = True
    for shape, documents, heads in (("M", (12000, 9000, 6000, 3768, 2000), (16, 48)),
                                    ("N", (2048, 3000, 3144), (2, 6))):
        cu = torch.tensor([0, *documents]).cumsum(0)
        partition = gdn_kcp.partition(cu, size, "zigzag")
        os.environ.pop("GDN_COLLECTIVES", None)
        own = gdn_kcp.build_context(partition, group, rank, device)
        os.environ["GDN_COLLECTIVES"] = "torch"
        torchs = gdn_kcp.build_context(partition, others, rank, device)
        assert (own.collectives, torchs.collectives) == ("nccl", "torch.distributed"), own
        x = operands(partition.local_tokens(rank), heads)
        both = zip(("o", *("d" + name for name in NAMES)), step(x, own, True), step(x, torchs, True))
        for name, a, b in both:
            if not torch.equal(a, b):
                print(f"rank {rank}, {shape}: {name} differs between the collectives", flush=True)
                passed = False
        for wrong in range(size):
            for context in (own, torchs):
                passed &= errors(context, x, wrong)
        for row in times(x, own, torchs, calls):
            if rank == 0:
                print(f"{shape} over {size} ranks, zigzag: {row}", flush=True)
    verdict = torch.tensor(int(passed), device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    if rank == 0:
        print("passed" if verdict.item() else "FAILED", flush=True)
    dist.destroy_process_group()
    return 0 if verdict.item() else 1


if __name__ == "__main__":
    sys.exit(main())
