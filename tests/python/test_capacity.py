"""Contexts of a capacity, refilled with other packings; and graph="replay", on the CPU with a stand-in
for CUDA's graphs: the same copies, keys and gradients."""

import pytest
import reference
import torch
from reference import assert_close, make, states

import gdn_kcp
from gdn_kcp import replay

ROWS, FRAGMENTS = 96, 4
pytestmark = pytest.mark.usefixtures("device")
PACKINGS = ([0, 40, 96], [0, 96], [0, 0, 7, 7, 50], [0], [0, 1, 2, 3, 96])


def equal(a, b):
    assert torch.equal(a, b) and torch.isfinite(a).all()


def operands(rows=ROWS):
    """q, k, v, g, beta of [1, T, ..], no leaves."""
    return [t.detach() for t in make(rows, 1, 2, 32, 32, dtype=torch.float32)]


def context(cu, **capacity):
    partition = gdn_kcp.partition(cu, 1)
    return gdn_kcp.build_context(partition, None, 0, reference.DEVICE, **capacity)


def roomy(cu):
    return context(cu, max_tokens=ROWS, max_fragments=FRAGMENTS)


def shape():
    """Of the operands, for byte queries."""
    v = operands(1)[2]
    return dict(H_qk=1, HV=2, head_dim=v.shape[-1], dtype=v.dtype)


def run(ctx, inputs, **options):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    o = gdn_kcp.chunk_gdn_kcp(*leaves, ctx, **options)
    o.backward(torch.cos(o.detach()))
    return [o.detach(), *(t.grad for t in leaves)]


def test_refilled_contexts_are_bitwise_those_of_the_packing_alone():
    inputs = operands()
    ctx = roomy([0, 5])
    for cu in PACKINGS:
        ctx.refill(gdn_kcp.partition(cu, 1))
        assert ctx.local_tokens == cu[-1] and ctx.rows == ROWS
        got = run(ctx, inputs)
        for a, b in zip(got, run(context(cu), [t[:, : cu[-1]] for t in inputs])):
            equal(a[:, : cu[-1]], b)
        for t in got:
            assert not t[0, cu[-1] :].any()


def test_a_backward_belongs_to_the_packing_of_its_forward():
    ctx = roomy([0, 40, 96])
    leaves = [t.detach().clone().requires_grad_() for t in operands()]
    o = gdn_kcp.chunk_gdn_kcp(*leaves, ctx)
    _, saved = gdn_kcp.chunk_gdn_kcp_forward(*leaves, ctx)
    ctx.refill(gdn_kcp.partition([0, 96], 1))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="refilled"):
        o.backward(torch.ones_like(o))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="refilled"):
        gdn_kcp.chunk_gdn_kcp_backward(*leaves, ctx, torch.ones_like(o), saved=saved)
    again = gdn_kcp.chunk_gdn_kcp(*leaves, ctx)
    again.backward(torch.ones_like(again))
    assert all(t.grad is not None for t in leaves)


def test_byte_counts_are_those_of_the_capacity():
    ctx = roomy([0, 96])
    before = gdn_kcp.context.call_bytes(ctx, **shape())
    ctx.refill(gdn_kcp.partition([0, 1], 1))
    after = gdn_kcp.context.call_bytes(ctx, **shape())
    assert before == after


def test_states_have_a_row_for_every_document_of_the_capacity():
    q, k, v, g, beta = operands()
    state = states(FRAGMENTS, 2, 32, 32).float()
    ctx = roomy([0, 50])
    _, final = gdn_kcp.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, cp_context=ctx
    )
    assert final.shape == state.shape
    equal(final[1:], state[1:])
    assert not torch.equal(final[0], state[0])


@pytest.mark.cpu_only(reason="test_conv.py")
def test_the_convolution_follows_a_refill():
    x, weight = torch.randn(1, ROWS, 8), torch.randn(8, 4)
    ctx = roomy([0, 96])
    for cu in ([0, 40, 96], [0, 7]):
        ctx.refill(gdn_kcp.partition(cu, 1))
        want = gdn_kcp.causal_conv1d(x, weight, cu_seqlens=torch.tensor(cu))
        equal(gdn_kcp.causal_conv1d(x, weight, cp_context=ctx), want)


@pytest.mark.cpu_only(reason="nothing runs")
def test_a_refill_keeps_to_the_tile():
    """Found before the first call too."""
    made = gdn_kcp.partition([0, 64], 2, "explicit", [[(0, 0, 64)], []])
    off = gdn_kcp.partition([0, 64], 2, "explicit", [[(0, 0, 32)], [(0, 32, 32)]])
    group = gdn_kcp.InProcessGroup(2)

    def rank_main(rank):
        ctx = gdn_kcp.build_context(
            made, group, rank, "cpu", max_tokens=64, max_fragments=2, tile=64)
        for _ in range(2):
            with pytest.raises(gdn_kcp.InvalidArgumentError, match="tile: expected every fragment"):
                ctx.refill(off)
            assert ctx.partition is made
            gdn_kcp.call_bytes(ctx, **shape())

    group.run(rank_main)


def test_ranks_refill_together(device):
    group = gdn_kcp.InProcessGroup(2)
    inputs = operands()

    def rank_main(rank):
        first = gdn_kcp.partition([0, 96], 2)
        ctx = gdn_kcp.build_context(first, group, rank, device, max_tokens=64, max_fragments=3)
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="partition: expected the same"):
            ctx.refill(gdn_kcp.partition([0, 96] if rank else [0, 50, 96], 2))
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="max_tokens: expected at least 65"):
            ctx.refill(gdn_kcp.partition([0, 130], 2))
        assert ctx.partition is first
        ctx.refill(gdn_kcp.partition([0, 70, 96], 2))
        rows = ctx.token_indices()
        mine = []
        for t in inputs:
            padded = t.new_full((64, *t.shape[2:]), float("nan"))
            padded[: len(rows)] = t[0, rows]
            mine.append(padded)
        return rows, gdn_kcp.chunk_gdn_kcp(*mine, ctx)

    want = gdn_kcp.chunk_gdn_kcp(*inputs, context([0, 70, 96]))[0]
    for rows, o in group.run(rank_main):
        assert_close("o", o[: len(rows)], want[rows], 1e-5)
        assert not o[len(rows) :].any()


def test_what_does_not_fit_names_the_argument():
    ctx = roomy([0, 50])
    for cu, message in (
        ([0, 97], "max_tokens: expected at least 97, the rows of rank 0, got 96"),
        ([0, 1, 2, 3, 4, 5], "max_fragments: expected at least 5, the fragments of rank 0, got 4"),
    ):
        with pytest.raises(gdn_kcp.InvalidArgumentError, match=message):
            ctx.refill(gdn_kcp.partition(cu, 1))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="partition: expected layout contiguous"):
        ctx.refill(gdn_kcp.partition([0, 50], 1, "zigzag"))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="partition: expected a Partition"):
        ctx.refill([0, 50])
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="refill: expected a context with"):
        context([0, 50]).refill(gdn_kcp.partition([0, 50], 1))


@pytest.mark.cpu_only(reason="replays there")
def test_replay_on_the_cpu_is_refused_by_name():
    ws = gdn_kcp.Workspace(0)
    with pytest.raises(gdn_kcp.UnsupportedError, match="graph: expected 'off' on cpu"):
        gdn_kcp.chunk_gdn_kcp(*make(40, 1, 1, 16, 16), context([0, 40]), workspace=ws, graph="replay")
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="graph: expected 'off' or 'replay'"):
        gdn_kcp.chunk_gdn_kcp(*make(40, 1, 1, 16, 16), context([0, 40]), graph="on")


@pytest.fixture
def graphs(device, monkeypatch):
    """The outputs of each capture. On the CPU replaying runs the call again on the graph's own inputs."""
    captures = []
    real = replay.capture

    def watched(run_it):
        outputs, fill = real(run_it)
        captures.append(outputs)
        return outputs, fill

    if device == "cuda":
        monkeypatch.setattr(replay, "capture", watched)
        return captures

    def capture(run_it):
        outputs = tuple(torch.full_like(t, 7) for t in run_it())
        row = replay.row_of(*run_it()[:3]) if len(outputs) > 3 else None
        if row is not None:
            q, v = outputs[0], outputs[2]
            columns = replay.columns_of(torch.empty_like(row), q.shape[-2], v.shape[-2], q.shape[-1])
            outputs = (*columns, *outputs[3:])
        captures.append(outputs)

        def fill():
            for to, of in zip(outputs, run_it()):
                to.copy_(of)

        return outputs, fill

    monkeypatch.setattr(replay, "capture", capture)
    monkeypatch.setattr("gdn_kcp.kcp.why_not", lambda ctx, workspace: None)
    return captures


def workspace(ctx):
    nbytes = gdn_kcp.workspace_bytes(ctx, save_for_backward=False, **shape())
    return gdn_kcp.Workspace(nbytes, reference.DEVICE)


@pytest.mark.parametrize("save_mode", ["light", "light_akk", "none"])
def test_replays_are_bitwise_the_calls(graphs, save_mode):
    ctx = roomy([0, 96])
    ws = workspace(ctx)
    for seed, cu in enumerate(PACKINGS):
        ctx.refill(gdn_kcp.partition(cu, 1))
        torch.manual_seed(seed)
        inputs = operands()
        got = run(ctx, inputs, workspace=ws, graph="replay", save_mode=save_mode)
        for a, b in zip(got, run(context(cu), [t[:, : cu[-1]] for t in inputs])):
            equal(a[:, : cu[-1]], b)
    assert len(ws.replays) == len(graphs) == 2  # one forward, one backward


def test_two_layers_in_turn_do_not_disturb_each_other(graphs):
    ctx = roomy([0, 40, 96])
    ws = workspace(ctx)

    def both(**options):
        torch.manual_seed(3)
        q, k, v, g, beta = (t.requires_grad_() for t in operands())
        options["use_qk_l2norm_in_kernel"] = True  # q are keys too, and long ones blow up
        o = gdn_kcp.chunk_gdn_kcp(q, k, v, g, beta, ctx, **options)
        p = gdn_kcp.chunk_gdn_kcp(k, q, torch.sin(o), g, beta, ctx, **options)
        (o * p).sum().backward()
        return o.detach(), p.detach(), *(t.grad for t in (q, k, v, g, beta))

    want = both()
    for a, b in zip(both(workspace=ws, graph="replay"), want):
        equal(a, b)
    assert len(graphs) == 2


def test_kinds_are_captured_apart(graphs):
    ctx = roomy([0, 40, 96])
    ws = workspace(ctx)
    inputs = operands()
    for options in ({}, {"use_qk_l2norm_in_kernel": True}, {"scale": 0.5}):
        for a, b in zip(run(ctx, inputs, workspace=ws, graph="replay", **options),
                        run(ctx, inputs, **options)):
            equal(a, b)
    assert len(graphs) == 6
    other = roomy([0, 40, 96])
    run(other, inputs, workspace=ws, graph="replay")
    assert len(graphs) == 8


def test_packed_gradients_stay_one_row(graphs):
    ctx = roomy([0, 40, 96])
    ws = workspace(ctx)
    _, _, v, g, beta = operands()
    row = torch.randn(ROWS, (2 * 1 + 2) * v.shape[-1]).to(v.device, v.dtype)

    def gradient(**options):
        qkv = row.clone().requires_grad_()
        q, k, v = gdn_kcp.packed_qkv_views(qkv, H_qk=1, HV=2)
        o = gdn_kcp.chunk_gdn_kcp(
            q, k, v, g.view(ROWS, 2), beta.view(ROWS, 2), ctx, use_qk_l2norm_in_kernel=True, **options)
        o.square().sum().backward()
        return qkv.grad

    equal(gradient(workspace=ws, graph="replay"), gradient())
    assert replay.row_of(*graphs[-1][:3]) is not None


def test_halves_replay_too(graphs):
    ctx = roomy([0, 40, 96])
    ws = workspace(ctx)
    inputs = operands()
    want_o, want_saved = gdn_kcp.chunk_gdn_kcp_forward(*inputs, ctx)
    do = torch.cos(want_o)
    want = gdn_kcp.chunk_gdn_kcp_backward(*inputs, ctx, do, saved=want_saved)
    o, saved = gdn_kcp.chunk_gdn_kcp_forward(*inputs, ctx, workspace=ws, graph="replay")
    equal(o, want_o)
    for kept in (saved, None):
        got = gdn_kcp.chunk_gdn_kcp_backward(
            *inputs, ctx, do, saved=kept, workspace=ws, graph="replay"
        )
        for a, b in zip(got, want):
            equal(a, b)
    assert len(graphs) == 3
