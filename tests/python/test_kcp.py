"""Ranks against one rank: layouts, ragged tables, options, explicit halves, errors on all ranks."""

import copy
import math
import pickle

import pytest
import torch
from ranks import LAYOUTS, local_rows, over_ranks
from reference import assert_close, gates, make, states

import gdn_kcp

CU = [0, 70, 70, 71, 200, 260]
pytestmark = pytest.mark.usefixtures("device")
EXPLICIT_3 = [
    [(3, 60, 69), (0, 0, 30)],
    [],
    [(0, 30, 40), (2, 0, 1), (4, 0, 60), (3, 0, 60)],
]


def one_rank(inputs, cu, do, **options):
    inputs = [t.detach().requires_grad_() for t in inputs]
    o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor(cu), **options)
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def compare(got, want, bar):
    for name, a, b in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), got, want):
        assert a.dtype == b.dtype
        assert_close(name, a, b, bar)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8])
def test_layouts(layout, W):
    inputs = make(CU[-1], 2, 4, 32, 16)
    do = torch.randn_like(inputs[2].detach())
    partition = gdn_kcp.partition(CU, W, layout)
    compare(over_ranks(partition, inputs, do), one_rank(inputs, CU, do), 1e-11)


@pytest.mark.parametrize("exchange", ["auto", "allgather", "a2a"])
@pytest.mark.parametrize("save_mode", ["light", "light_akk", "none"])
def test_exchange_and_saving(exchange, save_mode):
    inputs = make(CU[-1], 2, 4, 32, 16)
    do = torch.randn_like(inputs[2].detach())
    partition = gdn_kcp.partition(CU, 3, "zigzag_per_document")
    got = over_ranks(partition, inputs, do, exchange=exchange, save_mode=save_mode, scale=0.2,
                     use_qk_l2norm_in_kernel=True)
    compare(got, one_rank(inputs, CU, do, scale=0.2, use_qk_l2norm_in_kernel=True), 1e-11)


def test_explicit_table_with_an_empty_rank():
    inputs = make(CU[-1], 1, 2, 16, 16)
    do = torch.randn_like(inputs[2].detach())
    partition = gdn_kcp.partition(CU, 3, "explicit", EXPLICIT_3)
    compare(over_ranks(partition, inputs, do), one_rank(inputs, CU, do), 1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("W,cu", [
    (2, [0, 63, 128]), (2, [0, 64, 128]), (2, [0, 65, 128]), (2, [0, 63, 64, 65, 128]),
    (3, [0, 1]), (3, [0, 1, 2]), (4, [0, 7]), (3, [0, 40, 41, 81, 100]), (2, [0, 0, 50, 50, 100, 100]),
])
def test_documents_that_end_beside_a_cut(W, cu, layout):
    """Cuts one token before, at and after a document's end; fewer tokens than ranks; empty ones."""
    inputs = make(cu[-1], 1, 2, 16, 16)
    do = torch.randn_like(inputs[2].detach())
    partition = gdn_kcp.partition(cu, W, layout)
    compare(over_ranks(partition, inputs, do), one_rank(inputs, cu, do), 1e-11)


def test_ranks_are_bitwise_repeatable():
    inputs = make(CU[-1], 2, 4, 32, 32, dtype=torch.bfloat16)
    do = torch.randn_like(inputs[2].detach())
    partition = gdn_kcp.partition(CU, 3, "zigzag")
    first = over_ranks(partition, inputs, do)
    for _ in range(20):
        again = over_ranks(partition, inputs, do)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


TILED = [0, 200, 200, 233, 620]
TILED_PARTITIONS = [
    dict(world_size=2, layout="explicit", fragments=[
        [(3, 128, 259), (0, 0, 64)], [(0, 64, 136), (2, 0, 33), (3, 0, 128)]]),
    dict(world_size=2, layout="zigzag_per_document", cut_points=[
        [0, 64, 128, 192, 200], [0] * 5, [0, 0, 33, 33, 33], [0, 64, 128, 320, 387]]),
    dict(world_size=3, layout="explicit", fragments=[
        [(0, 0, 128), (3, 320, 67)], [], [(3, 0, 320), (2, 0, 33), (0, 128, 72)]]),
    dict(world_size=3, layout="zigzag_per_document", cut_points=[
        [0, 64, 64, 128, 128, 192, 200], [0] * 7, [0] + [33] * 6, [0, 64, 128, 192, 256, 320, 387]]),
]


@pytest.mark.parametrize("exchange", ["allgather", "a2a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_tiles_the_bits_are_those_of_one_rank(dtype, exchange):
    inputs = make(TILED[-1], 2, 4, 64, 64, dtype=dtype)
    inputs[3] = inputs[3].detach() / 16  # states that reach far
    do = torch.randn_like(inputs[2].detach())
    one = over_ranks(gdn_kcp.partition(TILED, 1), inputs, do, tile=64)
    compare(one, one_rank(inputs, TILED, do), 6e-3 if one[0].dtype == torch.bfloat16 else 1e-5)
    for made in TILED_PARTITIONS:
        for save_mode in ("light", "none"):
            got = over_ranks(gdn_kcp.partition(TILED, **made), inputs, do, tile=64, exchange=exchange,
                             save_mode=save_mode)
            assert all(torch.equal(a, b) for a, b in zip(got, one))


@pytest.mark.cpu_only(reason="nothing runs")
@pytest.mark.parametrize("tile,message", [
    (65, "tile: expected 0 or a multiple of 64, got 65"),
    (-64, "tile: expected 0 or a multiple of 64, got -64"),
    ("64", "tile: expected 0 or a multiple of 64, got '64'"),
    (1 << 64, "tile: expected 0 or a multiple of 64, got 18446744073709551616"),
    (64, "tile: expected every fragment to start at a multiple of 64 tokens of its document, got "
         r"offset 100 of document 0 in fragments\[1\]\[0\]"),
])
def test_tiles_are_checked(tile, message):
    """On every rank, also where one alone is wrong."""
    partition, group = gdn_kcp.partition([0, 200], 2), gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        for wrong in ((0, 1), (1,)):
            who = rf"^rank {wrong[0]}: {message}$"
            with pytest.raises(gdn_kcp.InvalidArgumentError, match=who):
                gdn_kcp.build_context(partition, group, rank, "cpu", tile=tile if rank in wrong else 0)

    group.run(main)


@pytest.mark.cpu_only(reason="nothing runs")
def test_ranks_agree_on_the_tile():
    partition, group = gdn_kcp.partition([0, 128], 2), gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="^tile, capacity or partition: expected"):
            gdn_kcp.build_context(partition, group, rank, "cpu", tile=64 * rank)
        assert gdn_kcp.build_context(partition, group, rank, "cpu", tile=64).tile == 64

    group.run(main)


def test_a_saved_set_belongs_to_its_tile(device):
    partition = gdn_kcp.partition([0, 200], 1)
    x = [t.detach() for t in make(200, 1, 2, 16, 16)]
    plain, tiled = (gdn_kcp.build_context(partition, None, 0, device, tile=t) for t in (0, 64))
    o, saved = gdn_kcp.chunk_gdn_kcp_forward(*x, tiled)
    gdn_kcp.chunk_gdn_kcp_backward(*x, tiled, o, saved=saved)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="saved: .* this partition, rank, tile and "):
        gdn_kcp.chunk_gdn_kcp_backward(*x, plain, o, saved=saved)


def test_given_cut_points():
    inputs = make(20, 1, 2, 16, 16)
    do = torch.randn_like(inputs[2].detach())
    cuts = [[0, 1, 1, 9, 12], [0, 0, 3, 3, 8]]
    partition = gdn_kcp.partition([0, 12, 20], 2, "zigzag_per_document", cut_points=cuts)
    assert [tuple(f) for f in partition.fragments(0)] == [(0, 0, 1), (0, 9, 3), (1, 3, 5)]
    compare(over_ranks(partition, inputs, do), one_rank(inputs, [0, 12, 20], do), 1e-11)


@pytest.mark.parametrize("dtype,bar", [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
def test_rounded_operands(dtype, bar):
    inputs = make(CU[-1], 2, 4, 64, 64, dtype=dtype)
    do = torch.randn_like(inputs[2].detach())
    partition = gdn_kcp.partition(CU, 2, "zigzag")
    compare(over_ranks(partition, inputs, do), one_rank(inputs, CU, do), bar)


def test_states_and_activations_over_ranks(device):
    """cp_context of the drop-in: states by owner, gates and betas in the kernel."""
    W, HV = 3, 4
    inputs = make(CU[-1], 2, HV, 16, 32)
    inputs[3] = gates(1, CU[-1], HV).requires_grad_()
    h0 = states(len(CU) - 1, HV, 16, 32)
    A_log, dt_bias = gates(2, HV)
    do = torch.randn_like(inputs[2].detach())
    dfinal = torch.randn_like(h0)
    options = dict(use_gate_in_kernel=True, output_final_state=True,
                   use_beta_sigmoid_in_kernel=True)

    def call(rows, h0, A_log, dt_bias, do, **more):
        leaves = [t.detach().clone().requires_grad_() for t in (*rows, h0, A_log, dt_bias)]
        o, final = gdn_kcp.chunk_gated_delta_rule(
            *leaves[:5], initial_state=leaves[5], A_log=leaves[6], dt_bias=leaves[7], **options,
            **more)
        return (o.detach(), final.detach(), *torch.autograd.grad((o, final), leaves, (do, dfinal)))

    whole = call(inputs, h0, A_log, dt_bias, do, cu_seqlens=torch.tensor(CU))
    partition = gdn_kcp.partition(CU, W, "zigzag")
    group = gdn_kcp.InProcessGroup(W, timeout=60)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, device)
        rows = partition.token_indices(rank)
        return call([t[:, rows] for t in inputs], h0, A_log, dt_bias, do[:, rows], cp_context=ctx)

    parts = group.run(main)
    for rank, part in enumerate(parts):
        rows = partition.token_indices(rank)
        for i, name in enumerate(("o", "", "dq", "dk", "dv", "dg", "dbeta")):
            if name:
                assert_close(name, part[i], whole[i][:, rows], 1e-10)
    # States of their owners, and partial sums.
    for i, name in ((1, "final_state"), (7, "dinitial_state"), (8, "dA_log"), (9, "ddt_bias")):
        assert_close(name, sum(part[i] for part in parts), whole[i], 1e-10)


def test_explicit_halves_and_byte_queries(device):
    inputs = [t.detach() for t in make(CU[-1], 2, 4, 32, 32, dtype=torch.float32)]
    do = torch.randn_like(inputs[2].detach())
    want = one_rank(inputs, CU, do)
    partition = gdn_kcp.partition(CU, 2, "contiguous")
    shape = dict(H_qk=2, HV=4, head_dim=inputs[0].shape[-1], dtype=inputs[0].dtype)

    def halves(*a):
        *local, ctx = a
        local = [t.detach() for t in local]
        rows = partition.token_indices(ctx.rank)
        workspace = gdn_kcp.Workspace(
            gdn_kcp.workspace_bytes(ctx, save_for_backward=False, **shape), device)
        o, saved = gdn_kcp.chunk_gdn_kcp_forward(*local, ctx, workspace=workspace)
        assert saved.block.numel() == gdn_kcp.saved_bytes(ctx, **shape)
        sent = gdn_kcp.comm_bytes(ctx, **shape)
        assert sent > 0 and sent >= gdn_kcp.comm_bytes(ctx, backward=False, **shape)
        kept = gdn_kcp.chunk_gdn_kcp_backward(*local, ctx, do[:, rows], saved=saved)
        again = gdn_kcp.chunk_gdn_kcp_backward(*local, ctx, do[:, rows], workspace=workspace)
        assert all(torch.equal(x, y) for x, y in zip(kept, again))
        more = gdn_kcp.saved_bytes(ctx, save_mode="light_akk", **shape)
        same, whole = gdn_kcp.chunk_gdn_kcp_forward(*local, ctx, save_mode="light_akk")
        assert torch.equal(same, o) and whole.block.numel() == more > saved.block.numel()
        for _ in range(2):  # a saved set is only read
            grads = gdn_kcp.chunk_gdn_kcp_backward(*local, ctx, do[:, rows], saved=whole)
            assert all(torch.equal(x, y) for x, y in zip(grads, again))
        none = gdn_kcp.chunk_gdn_kcp_forward(*local, ctx, save_for_backward=False)
        assert none[1] is None and torch.equal(none[0], o)
        with pytest.raises(gdn_kcp.WorkspaceTooSmallError, match="workspace: expected at least"):
            gdn_kcp.chunk_gdn_kcp_forward(*local, ctx, workspace=gdn_kcp.Workspace(64, device))
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="saved: expected the set of"):
            gdn_kcp.chunk_gdn_kcp_backward(*local, ctx, do[:, rows], saved=saved, scale=0.5)
        return (o, *kept)

    group = gdn_kcp.InProcessGroup(2, timeout=60)
    results = group.run(lambda rank: halves(
        *local_rows(partition, rank, inputs),
        gdn_kcp.build_context(partition, group, rank, device)))
    for rank, got in enumerate(results):
        rows = partition.token_indices(rank)
        compare(got, [t[:, rows] for t in want], 1e-5)


@pytest.mark.cpu_only(reason="other backends cut other segments")
@pytest.mark.parametrize("exchange,records", [("allgather", [3, 5, 4]), ("a2a", [1, 3, 2])])
def test_saved_bytes_are_the_documented_formula(exchange, records):
    """One document over three ranks, one segment each: S_in of ranks 1 and 2, M of rank 1, and the
    received M of three ranks, for all heads or, by all-to-all, for a third of them."""
    HV, D = 3, 64
    partition = gdn_kcp.partition([0, 192], 3)
    group = gdn_kcp.InProcessGroup(3, timeout=60)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, "cpu")
        return gdn_kcp.saved_bytes(ctx, H_qk=1, HV=HV, head_dim=D, exchange=exchange)

    assert group.run(main) == [n * D * D * HV * 4 for n in records]


@pytest.mark.cpu_only(reason="other backends prepare other arrays")
@pytest.mark.parametrize("dtype,element", [(torch.float32, 4), (torch.float64, 8)])
def test_what_light_akk_keeps_is_the_documented_formula(dtype, element):
    """Chunks of 64 tokens of each document: 2 + 1 + 1, each 4288 numbers a head."""
    ctx = gdn_kcp.build_context(gdn_kcp.partition([0, 70, 71, 135], 1), None, 0, "cpu")
    shape = dict(H_qk=1, HV=3, head_dim=32, dtype=dtype)
    light = gdn_kcp.call_bytes(ctx, **shape)
    whole = gdn_kcp.call_bytes(ctx, save_mode="light_akk", **shape)
    prepared = 4 * 3 * 4288 * element
    assert whole == light._replace(saved=light.saved + prepared, backward=light.backward - prepared)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="save_mode: expected one of light, "):
        gdn_kcp.saved_bytes(ctx, save_mode="none", H_qk=1, HV=3)


@pytest.mark.parametrize("cu", [[0, 32768], [0, 12000, 21000, 27000, 30768, 32768]])
def test_memory_per_token_is_below_the_published(cu, device):
    """At 16/48 heads FlashQLA saves 6.2 KiB a token beyond the inputs and takes 44 in passing."""
    ctx = gdn_kcp.build_context(gdn_kcp.partition(cu, 1), None, 0, device)
    kib = 1024 * cu[-1]
    assert gdn_kcp.saved_bytes(ctx, H_qk=16, HV=48) < 6.2 * kib
    assert gdn_kcp.workspace_bytes(ctx, H_qk=16, HV=48, save_for_backward=False) < 44 * kib


def test_an_error_on_one_rank_reaches_all(device):
    partition = gdn_kcp.partition([0, 40], 2)
    inputs = make(40, 1, 2, 16, 16)
    group = gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, device)
        local = local_rows(partition, rank, inputs)
        wrong = list(local)
        if rank == 1:
            wrong[1] = wrong[1][..., :8]
        with pytest.raises(gdn_kcp.InvalidArgumentError) as first:
            gdn_kcp.chunk_gdn_kcp(*wrong, ctx)
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="expected the same on every rank"):
            gdn_kcp.chunk_gdn_kcp(*local, ctx, scale=1.0 + rank)
        o = gdn_kcp.chunk_gdn_kcp(*local, ctx)  # the next correct call works
        do = o.detach()
        bad = do.float() if rank == 0 else do
        own = str(do.dtype).removeprefix("torch.")
        with pytest.raises(gdn_kcp.InvalidArgumentError, match=f"rank 0: do: expected {own}, as q"):
            gdn_kcp.chunk_gdn_kcp_backward(*[t.detach() for t in local], ctx, bad)
        plain = [t.detach() for t in local]
        _, saved = gdn_kcp.chunk_gdn_kcp_forward(*plain, ctx)
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="or saved: expected the same"):
            gdn_kcp.chunk_gdn_kcp_backward(*plain, ctx, do, saved=saved if rank else None)
        o.backward(do)
        return str(first.value)

    messages = group.run(main)
    assert messages[0] == messages[1]
    K = inputs[0].shape[-1]
    assert messages[0].startswith(f"rank 1: k: expected [T=20, H=1, K={K}], got [20, 1, 8]")


def test_backwards_in_another_order_are_no_pair():
    """Of the explicit halves; and a group serves its contexts again after a run that one rank left."""
    group, partition = gdn_kcp.InProcessGroup(2, timeout=20), gdn_kcp.partition([0, 40, 100], 2)
    inputs = [t.detach() for t in make(100, 1, 2, 16, 16)]
    contexts = {}

    def build(rank):
        contexts[rank] = gdn_kcp.build_context(partition, group, rank, "cpu")

    def main(rank, swaps, leaves):
        ctx = contexts[rank]
        local = local_rows(partition, rank, inputs)
        if rank == leaves:
            raise OSError("of its own")
        kept = [gdn_kcp.chunk_gdn_kcp_forward(*local, ctx) for _ in range(2)]
        for o, saved in kept[:: -1 if swaps == rank else 1]:
            gdn_kcp.chunk_gdn_kcp_backward(*local, ctx, torch.ones_like(o), saved=saved)
        leaf = local[0].clone().requires_grad_()
        gdn_kcp.chunk_gdn_kcp(leaf, *local[1:], ctx).sum().backward()

    group.run(build)
    group.run(lambda rank: main(rank, None, None))
    with pytest.raises(gdn_kcp.PeerFailedError, match="different calls|another rank"):
        group.run(lambda rank: main(rank, 1, None))
    with pytest.raises(OSError, match="of its own"):
        group.run(lambda rank: main(rank, None, 1))
    group.run(lambda rank: main(rank, None, None))


def test_a_rank_that_leaves_is_no_hang(device):
    partition = gdn_kcp.partition([0, 40], 2)
    group = gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, device)
        if rank == 1:
            raise KeyError("gone")
        gdn_kcp.chunk_gdn_kcp(*local_rows(partition, rank, make(40, 1, 1, 16, 16)), ctx)

    with pytest.raises(KeyError):
        group.run(main)


def test_different_partitions_are_refused(device):
    group = gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        partition = gdn_kcp.partition([0, 40 + rank], 2)
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="partition: expected the same"):
            gdn_kcp.build_context(partition, group, rank, device)

    group.run(main)


def test_partition_is_what_the_contract_says():
    p = gdn_kcp.partition(torch.tensor([0, 16, 40], dtype=torch.int32), 2, "zigzag_per_document")
    want = [*range(0, 4), *range(12, 22), *range(34, 40)]
    assert p.token_indices(0).tolist() == want
    assert p.token_indices(1).tolist() == [*range(4, 12), *range(22, 34)]
    assert p.local_cu_seqlens(1).tolist() == [0, 8, 20]
    again = pickle.loads(pickle.dumps(p))
    assert again.digest == p.digest and again.fragments(1) == p.fragments(1)
    assert p.crossing(0)[0] == (0, -1, -1, 1, 0)
    assert p.local_tokens(0) == 20 and "rank 1" in p.draw()


def cut(points):
    return gdn_kcp.partition([0, 5], 2, "zigzag_per_document", cut_points=points)


def explicit(fragments):
    return gdn_kcp.partition([0, 5], 2, "explicit", fragments)


@pytest.mark.parametrize("make_it,message", [
    (lambda: gdn_kcp.partition([1, 2], 2), "cu_seqlens"),
    (lambda: gdn_kcp.partition([0, 5, 3], 2), "cu_seqlens"),
    (lambda: gdn_kcp.partition([0.0, 5.0], 2), "cu_seqlens_global: expected one dimension"),
    (lambda: gdn_kcp.partition([0, 5], 0), "world_size"),
    (lambda: gdn_kcp.partition([0, 5], 2, "diagonal"), "layout: expected one of"),
    (lambda: gdn_kcp.partition([0, 5], 2, fragments=[[], []]), "fragments: expected with layout"),
    (lambda: gdn_kcp.partition([0, 5], 2, "explicit", [[(0, 0, 5)]]), "fragments: expected 2"),
    (lambda: gdn_kcp.partition([0, 5], 2, "explicit", [[(0, 0, 5)], [(0, 3, 1)]]), "fragment"),
    (lambda: gdn_kcp.partition([0, 5], 2, "explicit", [[(0, 0, 2)], []]), "fragment"),
    (lambda: gdn_kcp.partition([0, 5], 2, "zigzag_per_document", cut_points=[[0, 5]]),
     r"cut_points\[0\]: expected 5"),
    (lambda: cut("zigzag"), "cut_points: expected a list of offsets for each document, got 'zigzag'"),
    (lambda: cut(3), "cut_points: expected a list of offsets for each document, got 3"),
    (lambda: cut(["01234"]), r"cut_points\[0\]: expected 5 offsets, got '01234'"),
    (lambda: cut([[0, 1, 2, "3", 5]]), r"cut_points\[0\]\[3\]: expected an integer of 64 bits, got '3'"),
    (lambda: cut([[0, 1.5, 2, 3, 5]]), r"cut_points\[0\]\[1\]: expected an integer .*, got 1.5"),
    (lambda: cut([[0, 1, 1 << 64, 3, 5]]), r"cut_points\[0\]\[2\]: expected .*, got 18446744073709551616"),
    (lambda: explicit(3), "fragments: expected 2 lists, one per rank, got 3"),
    (lambda: explicit([5, []]), r"fragments\[0\]: expected a list of \(doc, offset, length\), got 5"),
    (lambda: explicit([[5], []]), r"fragments\[0\]\[0\]: expected \(doc, offset, length\), got 5"),
    (lambda: explicit([[(0, 0, 5)], ["abc"]]), r"fragments\[1\]\[0\]: expected .*, got 'abc'"),
    (lambda: explicit([[(0, 0, 1 << 64)], []]), r"fragments\[0\]\[0\]: expected an integer of 64 bits, got"),
    (lambda: gdn_kcp.partition([0, 1 << 64], 2), "cu_seqlens_global: expected integers, got"),
    *((lambda size=size: gdn_kcp.partition([0, 5], size), f"world_size: expected 1 to 1048576, got {size}$")
      for size in (-3, 0, (1 << 31) + 5, 1 << 64)),
    (lambda: gdn_kcp.partition([0, 5], 2).fragments(2), "rank: expected 0 to 1, got 2"),
])
def test_bad_partitions_name_the_argument(make_it, message):
    with pytest.raises(gdn_kcp.InvalidArgumentError, match=message):
        make_it()


@pytest.mark.cpu_only(reason="nothing runs")
def test_capacity_and_groups_are_checked():
    p = gdn_kcp.partition([0, 40], 1)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="max_tokens: expected at least 40"):
        gdn_kcp.build_context(p, None, 0, "cpu", max_tokens=39)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="max_fragments: expected at least 1"):
        gdn_kcp.build_context(p, None, 0, "cpu", max_fragments=0)
    for name in ("max_tokens", "max_fragments"):
        for wrong in (1 << 63, "40", 40.0):
            with pytest.raises(gdn_kcp.InvalidArgumentError,
                               match=f"^{name}: expected an integer of 64 bits, got {wrong!r}$"):
                gdn_kcp.build_context(p, None, 0, "cpu", **{name: wrong})
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="group: expected 2 ranks"):
        gdn_kcp.build_context(gdn_kcp.partition([0, 40], 2), None, 0, "cpu")
    group = gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="group: expected 1 rank, .* got 2"):
            gdn_kcp.build_context(p, group, rank, "cpu")

    group.run(main)
    ctx = gdn_kcp.build_context(p, None, 0, "cpu", max_tokens=40, max_fragments=1)
    with pytest.raises(gdn_kcp.UnsupportedError, match="graph: expected 'off' on cpu"):
        gdn_kcp.chunk_gdn_kcp(*make(40, 1, 1, 16, 16), ctx, graph="replay")
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="at least max_tokens = 40 rows, got 39"):
        gdn_kcp.chunk_gdn_kcp(*make(39, 1, 1, 16, 16), ctx)


def test_one_rank_too_takes_the_rows_of_its_partition(device):
    ctx = gdn_kcp.build_context(gdn_kcp.partition([0, 60, 100], 1), None, 0, device)
    inputs = [t.detach().to(device) for t in make(128, 1, 2, 16, 16, dtype=torch.float32)]
    for call in (
        lambda: gdn_kcp.chunk_gdn_kcp(*inputs, ctx),
        lambda: gdn_kcp.chunk_gated_delta_rule(*inputs, cp_context=ctx),
    ):
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="expected 100 rows.* rank 0, got 128"):
            call()


def test_contexts_and_workspaces_are_not_copied():
    ctx = gdn_kcp.build_context(gdn_kcp.partition([0, 10], 1), None, 0, "cpu")
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(gdn_kcp.UnsupportedError, match="Context: expected to stay in its process"):
            copied(ctx)
        with pytest.raises(gdn_kcp.UnsupportedError, match="Workspace: expected to stay where it is"):
            copied(gdn_kcp.Workspace(64))


def test_what_another_packing_kept_is_refused():
    inputs = make(40, 1, 2, 16, 16)
    one, other = (
        gdn_kcp.build_context(gdn_kcp.partition(cu, 1), None, 0, "cpu")
        for cu in ([0, 10, 40], [0, 21, 40])
    )
    o, saved = gdn_kcp.chunk_gdn_kcp_forward(*inputs, one)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="saved: expected .* this partition"):
        gdn_kcp.chunk_gdn_kcp_backward(*inputs, other, o, saved=saved)
    handle = gdn_kcp.RecomputeHandle()
    gdn_kcp.chunk_gdn_kcp(*inputs, one, recompute_handle=handle)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="recompute_handle: expected .* this partition"):
        gdn_kcp.chunk_gdn_kcp(*inputs, other, recompute_handle=handle)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="recompute_handle: expected save_mode"):
        gdn_kcp.chunk_gdn_kcp(
            *inputs, one, recompute_handle=gdn_kcp.RecomputeHandle(), save_mode="none")


@pytest.mark.parametrize("K", [16, 48])
def test_a_scale_spelled_out_is_the_default_one(K, device):
    inputs = [t.detach() for t in make(40, 1, 2, K, K)]
    ctx = gdn_kcp.build_context(gdn_kcp.partition([0, 40], 1), None, 0, device)
    K = inputs[0].shape[-1]
    o, saved = gdn_kcp.chunk_gdn_kcp_forward(*inputs, ctx)
    want = gdn_kcp.chunk_gdn_kcp_backward(*inputs, ctx, o, saved=saved)
    for scale in (K**-0.5, 1 / math.sqrt(K)):  # of 48 these differ in the last bit
        got = gdn_kcp.chunk_gdn_kcp_backward(*inputs, ctx, o, saved=saved, scale=scale)
        compare((o, *got), (o, *want), 1e-14)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="saved: expected the set of"):
        gdn_kcp.chunk_gdn_kcp_backward(*inputs, ctx, o, saved=saved, scale=1.0)


@pytest.mark.parametrize("wrong,message", [
    (dict(partition=gdn_kcp.partition([0, 10], 3)), "rank 1: group: expected 3 ranks"),
    (dict(partition=None), "rank 1: partition: expected a Partition, got NoneType"),
    (dict(conv_kernel_size="a"), "rank 1: conv_kernel_size: expected 1 to 8, got 'a'"),
    (dict(max_tokens="a"), "rank 1: max_tokens: expected an integer of 64 bits, got 'a'"),
    (dict(device="nowhere"), "rank 1: device: expected cpu or cuda"),
])
def test_what_one_rank_brings_wrong_every_rank_hears(wrong, message):
    group = gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        given = dict(partition=gdn_kcp.partition([0, 10], 2), device="cpu")
        given |= wrong if rank == 1 else {}
        with pytest.raises(gdn_kcp.InvalidArgumentError, match=message):
            gdn_kcp.build_context(group=group, rank=rank, **given)

    group.run(main)


def test_a_call_that_one_rank_gets_wrong_every_rank_hears():
    group = gdn_kcp.InProcessGroup(2, timeout=60)
    inputs = make(40, 1, 2, 16, 16)
    part = gdn_kcp.partition([0, 40], 2)

    def main(rank):
        ctx = gdn_kcp.build_context(part, group, rank, "cpu")
        local = local_rows(part, rank, inputs)
        for options in (dict(exchange=["a2a"]), dict(use_qk_l2norm_in_kernel=torch.ones(2))):
            with pytest.raises(gdn_kcp.Error, match="rank 1: "):
                gdn_kcp.chunk_gdn_kcp(*local, ctx, **(options if rank == 1 else {}))
        meta = [t.detach().to("meta") for t in local] if rank == 1 else local
        with pytest.raises(gdn_kcp.UnsupportedError, match="rank 1: q: expected a CPU or CUDA tensor"):
            gdn_kcp.chunk_gdn_kcp(*meta, ctx)
        return gdn_kcp.chunk_gdn_kcp(*local, ctx)

    got = torch.cat(group.run(main), 1)
    assert_close("o", got, gdn_kcp.chunk_gated_delta_rule(*inputs)[0], 1e-11)
