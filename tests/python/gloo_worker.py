"""One process of test_gloo.py: ranks of a gloo group against one rank, and errors on all ranks.

Usage: torchrun-style environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import LAYOUTS, local_rows
from reference import assert_close, make
from torch.utils.checkpoint import checkpoint

import gdn_kcp

CU = [0, 50, 51, 51, 170]
BAR = 1e-11


def check(partition, ctx, rank, inputs, want, do, mode, exchange):
    rows = partition.token_indices(rank)
    local = local_rows(partition, rank, inputs)

    def call(*x):
        return gdn_kcp.chunk_gdn_kcp(*x, ctx, exchange=exchange)

    if mode == "plain":
        o = call(*local)
    else:
        o = checkpoint(call, *local, use_reentrant=mode == "reentrant")
    o.backward(do[:, rows])
    got = [o, *(t.grad for t in local)]
    for name, a, b in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), got, want):
        assert_close(f"{partition.layout} {mode} {exchange} {name}", a, b[:, rows], BAR)


def conv(partition, ctx, rank):
    x = torch.randn(1, CU[-1], 6, dtype=torch.float64)
    weight = torch.randn(6, 4, dtype=torch.float64)
    dy = torch.randn_like(x)
    rows = partition.token_indices(rank)
    whole = x.clone().requires_grad_()
    y = gdn_kcp.causal_conv1d(whole, weight, None, "silu", torch.tensor(CU))
    y.backward(dy)
    mine = x[:, rows].clone().requires_grad_()
    z = gdn_kcp.causal_conv1d(mine, weight, None, "silu", cp_context=ctx)
    z.backward(dy[:, rows])
    assert torch.equal(z, y[:, rows])
    assert_close("dx", mine.grad, whole.grad[:, rows], BAR)


def errors(partition, ctx, rank, inputs):
    local = local_rows(partition, rank, inputs)
    bad = list(local)
    if rank == 1:
        bad[2] = bad[2].float()
    try:
        gdn_kcp.chunk_gdn_kcp(*bad, ctx)
    except gdn_kcp.InvalidArgumentError as error:
        assert str(error) == "rank 1: v: expected float64, got float32", error
    else:
        raise AssertionError("no error")
    try:
        gdn_kcp.chunk_gdn_kcp(*local, ctx, use_qk_l2norm_in_kernel=rank == 0)
    except gdn_kcp.InvalidArgumentError as error:
        assert "expected the same on every rank" in str(error), error
    else:
        raise AssertionError("no error")
    gdn_kcp.chunk_gdn_kcp(*local, ctx)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = make(CU[-1], 2, 4, 16, 16)
    do = torch.randn(1, CU[-1], 4, 16, dtype=torch.float64)
    o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor(CU))
    want = [o, *torch.autograd.grad(o, inputs, do)]
    for layout in LAYOUTS:
        partition = gdn_kcp.partition(CU, W, layout)
        ctx = gdn_kcp.build_context(partition, dist.group.WORLD, rank, "cpu")
        for mode in ("plain", "reentrant", "non-reentrant"):
            check(partition, ctx, rank, inputs, want, do, mode, "auto")
        for exchange in ("allgather", "a2a"):
            check(partition, ctx, rank, inputs, want, do, "plain", exchange)
        torch.manual_seed(1)
        conv(partition, ctx, rank)
    errors(partition, ctx, rank, inputs)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {W}: passed")


if __name__ == "__main__":
    sys.exit(main())
