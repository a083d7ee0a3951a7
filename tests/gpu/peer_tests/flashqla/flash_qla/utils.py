"""What FlashQLA's tests take from its utils."""

import torch


def _lengths(cu_seqlens) -> list[int]:
    return cu_seqlens.diff().tolist()


def l2norm(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def pack(x, cu_seqlens):
    """``[1, sum of lengths, ...]`` of rows ``[N, longest, ...]``"""
    return torch.cat([row[:n] for row, n in zip(x, _lengths(cu_seqlens))])[None]


def unpack(x, cu_seqlens):
    """``[N, longest, ...]`` of ``[1, T, ...]``, zeros after a row's end"""
    lengths = _lengths(cu_seqlens)
    rows = x[0, : sum(lengths)].split(lengths)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def pad_and_reshape(x, dim, chunk_size=64):
    """``dim`` in chunks, zeros after its end"""
    after = [0, 0] * (x.dim() - 1 - dim) + [0, -x.shape[dim] % chunk_size]
    return torch.nn.functional.pad(x, after).unflatten(dim, (-1, chunk_size))


def fill_last_chunk_of_g(g, num_tokens, cu_seqlens, chunk_size=64, reverse=False):
    """Sums of gates ``[N, chunks, chunk_size, HV]``, past a row's end as at its end, in place.

    Reversed, the gradient of a part-filled chunk's last place goes to the row's last token.
    """
    lengths = [num_tokens] * len(g) if cu_seqlens is None else _lengths(cu_seqlens)
    for row, length in zip(g, lengths):
        chunk, rest = divmod(length, chunk_size)
        if not rest:
            continue
        if reverse:
            row[chunk, rest - 1] += row[chunk, -1]
        else:
            row[chunk, rest:] = row[chunk, rest - 1].clone()
    return g


def prepare_chunk_offsets(cu_seqlens, chunk_size):
    """First chunks ``[N + 1]`` of packed documents, and how many there are"""
    chunks = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    offsets = torch.nn.functional.pad(chunks.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
    return offsets, int(offsets[-1])
