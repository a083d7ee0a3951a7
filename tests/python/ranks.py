"""Packed inputs over ranks, and the results of all ranks put together again."""

import reference
import torch

import gdn_kcp

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")


def local_rows(partition, rank, tensors):
    """Each [1, T, ..] tensor's rows of the rank, as leaves."""
    rows = partition.token_indices(rank)
    return [t.detach()[:, rows].clone().requires_grad_() for t in tensors]


def joined(partition, parts, total):
    """Per-rank [1, rows, ..] results as one [1, total, ..]; rows of no rank are 0."""
    out = parts[0].new_zeros((1, total, *parts[0].shape[2:]))
    for rank, part in enumerate(parts):
        out[:, partition.token_indices(rank)] = part
    return out


def over_ranks(partition, inputs, do, *, call=None, tile=0, **options):
    """o and gradients of all ranks joined, run on an in-process group.

    `call(q, k, v, g, beta, ctx)` -> o; default: chunk_gdn_kcp with the options.
    """
    call = call or (lambda *a: gdn_kcp.chunk_gdn_kcp(*a, **options))
    group = gdn_kcp.InProcessGroup(partition.world_size, timeout=60)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, reference.DEVICE, tile=tile)
        local = local_rows(partition, rank, inputs)
        o = call(*local, ctx)
        gradient = do[:, partition.token_indices(rank)]
        return (o.detach(), *torch.autograd.grad(o, local, gradient))

    results = group.run(main)
    total = inputs[0].shape[1]
    return [joined(partition, list(parts), total) for parts in zip(*results)]
