"""The states before every chunk, by one call of the operator a chunk."""

import torch

import gdn_kcp

CHUNK = 64


def chunk_states(k, v, g, beta, initial_state, cu_seqlens, state_v_first):
    """``[B, chunks, HV, K, V]`` of a dense batch; packed documents' in a row, B = 1."""
    if cu_seqlens is None:
        rows, length = v.shape[:2]
        bounds = [(row * length, (row + 1) * length) for row in range(rows)]
    else:
        ends = cu_seqlens.tolist()
        bounds = list(zip(ends, ends[1:]))
    # Every document in one row: a dense batch is packed documents of one length.
    k, v, g, beta = (t.flatten(0, 1) for t in (k, v, g, beta))
    dims = (v.shape[-1], k.shape[-1]) if state_v_first else (k.shape[-1], v.shape[-1])
    shape = (len(bounds), v.shape[1], *dims)
    state = initial_state
    if state is None:
        state = v.new_zeros(shape, dtype=torch.float32)
    before = [[] for _ in bounds]
    for at in range(0, max(b - a for a, b in bounds), CHUNK):
        alive = [i for i, (a, b) in enumerate(bounds) if at < b - a]
        for i in alive:
            before[i].append(state[i])
        starts = [(bounds[i][0] + at, bounds[i][1]) for i in alive]
        parts = [slice(start, min(start + CHUNK, end)) for start, end in starts]
        x = [torch.cat([t[part] for part in parts])[None] for t in (k, v, g, beta)]
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + part.stop - part.start)
        _, after = gdn_kcp.chunk_gated_delta_rule(
            x[0], *x, initial_state=state[alive], output_final_state=True,
            cu_seqlens=torch.tensor(offsets), state_v_first=state_v_first,
        )
        state = state.index_copy(0, torch.tensor(alive, device=state.device), after)
    h = torch.stack([s for states in before for s in states])
    return h[None] if cu_seqlens is not None else h.unflatten(0, (len(bounds), -1))
