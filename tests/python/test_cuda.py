"""What only a GPU has: streams, the current device, graph captures, host waits, memory of large calls."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import reference
import torch
from conftest import has_gpu
from reference import assert_close, make
from torch.utils.checkpoint import checkpoint

import gdn_kcp

pytestmark = pytest.mark.skipif(not has_gpu(), reason="needs a GPU and an extension built with CUDA")

N = [2049, 3001, 3142]  # shape N of docs/benchmarks.md
SLEEP = 200_000_000  # clock cycles of a GPU kept busy, about 0.1 s


@pytest.fixture(autouse=True)
def gpu():
    reference.DEVICE = "cuda"
    yield
    reference.DEVICE, reference.HEAD_DIM = "cpu", 128
    torch.cuda.synchronize()


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def context(cu, **capacity):
    return gdn_kcp.build_context(gdn_kcp.partition(cu, 1), None, 0, "cuda", **capacity)


def leaves_of(inputs):
    return [t.detach().clone().requires_grad_() for t in inputs]


def run(inputs, cu, do=None):
    """o and all gradients of one call."""
    leaves = leaves_of(inputs)
    o, _ = gdn_kcp.chunk_gated_delta_rule(*leaves, cu_seqlens=cu)
    do = torch.cos(o.detach()) if do is None else do
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def kcp(inputs, ctx, **options):
    leaves = leaves_of(inputs)
    o = gdn_kcp.chunk_gdn_kcp(*leaves, ctx, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.cos(o.detach()))]


def assert_equal(got, want):
    for name, a, b in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), got, want):
        assert torch.equal(a, b), name


def fresh(lengths):
    """Operands and offsets that no call had before: the tables are made by the test's own call."""
    fresh.calls += 1
    lengths = [*lengths, 64 + fresh.calls]
    return make(sum(lengths), 2, 4, 128, 128), offsets(lengths)


fresh.calls = 0


def test_hopper_takes_its_own_backend():
    run(make(300, 2, 4, 128, 128), None)
    path = gdn_kcp.last_path()
    if torch.cuda.get_device_capability() == (9, 0):
        assert path.backend == "cuda-sm90a" and not path.refused
    reference.HEAD_DIM = 64
    run(make(300, 2, 4, 64, 64), None)
    path = gdn_kcp.last_path()
    assert path.backend == "cuda-portable" and "64" in path.refused["cuda-sm90a"]


@pytest.mark.parametrize("D", [64, 128])
def test_a_hundred_runs_are_bitwise_equal(D):
    reference.HEAD_DIM = D
    inputs, cu = make(sum(N), 2, 6, D, D), offsets(N)
    first = run(inputs, cu)
    for _ in range(100):
        assert_equal(run(inputs, cu), first)


@pytest.mark.parametrize("D", [64, 128])
def test_several_segments_against_the_reference_backend(D, monkeypatch):
    reference.HEAD_DIM = D
    inputs, cu = make(sum(N), 2, 6, D, D), offsets(N)
    do = torch.randn_like(inputs[2].detach())
    got = run(inputs, cu, do)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    want = run([t.detach().double().cpu() for t in inputs], cu, do.double().cpu())
    for name, a, b in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), got, want):
        assert_close(name, a, b, 0)


@pytest.mark.parametrize("K,V,to", [(60, 60, 64), (64, 100, 128), (128, 64, 128)])
def test_padding_is_bitwise_a_callers_own(K, V, to):
    """o and all gradients, of packed views and of rows of their own."""
    H, HV, cu = 2, 6, offsets(N)
    row = torch.randn(1, sum(N), H * 2 * K + HV * V, device="cuda", dtype=torch.bfloat16)
    views = row.split([H * K, H * K, HV * V], -1)
    q, k, v = (t.unflatten(-1, (heads, -1)) for t, heads in zip(views, (H, H, HV)))
    g, beta = (t.detach() for t in make(sum(N), H, HV, K, V)[3:])
    options = dict(cu_seqlens=cu, use_qk_l2norm_in_kernel=True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, g, beta)]
    strided = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    own = [torch.nn.functional.pad(t, (0, to - t.shape[-1])) for t in leaves[:3]]
    o = gdn_kcp.chunk_gated_delta_rule(*own, *leaves[3:], scale=K**-0.5, **options)[0][..., :V]
    assert gdn_kcp.last_path().padding is None
    do = torch.randn_like(o)
    want = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    for inputs in (leaves, strided):
        o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, **options)
        assert gdn_kcp.last_path().padding == (K, V, to) and o.is_contiguous()
        assert_equal([o.detach(), *torch.autograd.grad(o, inputs, do)], want)


def test_a_padded_call_in_a_users_graph():
    """After its first call, as any; replayed with other inputs, bitwise the eager call."""
    cu = offsets([100, 200])
    inputs = [t.detach() for t in make(300, 1, 2, 128, 128)]
    inputs[:3] = [t[..., :60].clone() for t in inputs[:3]]

    def call(rows):
        with torch.no_grad():
            return gdn_kcp.chunk_gated_delta_rule(*rows, cu_seqlens=cu)[0]

    call(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(inputs)
    for t in inputs:
        t.mul_(0.5)
    graph.replay()
    assert torch.equal(o, call(inputs))


def test_a_stream_that_is_not_the_default():
    """The call comes after what its stream still has to write, and its results follow in it."""
    inputs, cu = fresh([500, 700])
    want = run(inputs, cu)
    late = [torch.zeros_like(t) for t in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for to, of in zip(late, inputs):
            to.detach().copy_(of)
        got = run(late, cu)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(got, want)


def test_a_convolution_follows_its_stream_and_its_capture():
    """After what its stream still has to write; captured with offsets from the host, which the graph keeps."""
    x, dy = torch.randn(2, 1, 700, 264, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(264, 4, device="cuda", requires_grad=True)
    leaf = x.clone().requires_grad_()

    def call():
        y = gdn_kcp.causal_conv1d(leaf, weight, cu_seqlens=offsets([3, 0, 397, 300]))
        return (y.detach(), *torch.autograd.grad(y, (leaf, weight), dy))

    want = call()
    stream = torch.cuda.Stream()
    with torch.no_grad():
        leaf.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        with torch.no_grad():
            leaf.copy_(x)
        got = call()
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        leaf.mul_(0.5)
    graph.replay()
    assert_equal(captured, call())


def test_two_streams_at_once():
    """Each with its own inputs, calls in turn and from two threads; bitwise as alone."""
    cases = [(make(sum(N), 2, 6, 128, 128), offsets(lengths)) for lengths in (N, [4000, sum(N) - 4000])]
    want = [run(*case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    got = [[] for _ in cases]

    def some(i):
        with torch.cuda.stream(streams[i]):
            for _ in range(10):
                got[i].append(run(*cases[i]))

    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(run(*cases[i]))
    threads = [threading.Thread(target=some, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for results, alone in zip(got, want):
        assert len(results) == 20
        for result in results:
            assert_equal(result, alone)


def test_tables_made_on_one_stream_serve_another():
    """The first call of a packing uploads its tables; a second stream must not read them before."""
    inputs, cu = fresh([500, 700])
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(SLEEP)
        a = run(inputs, cu)
    with torch.cuda.stream(second):
        b = run(inputs, cu)
    torch.cuda.synchronize()
    assert_equal(b, a)
    assert_equal(run(inputs, cu), a)


def test_packings_that_left_the_cache_do_not_disturb_calls_under_way():
    """Tables made on one stream, read late on another, and given up in between."""
    inputs = make(300, 1, 2, 128, 128)
    packings = [offsets([n, 300 - n]) for n in range(1, 140)]
    want = [run(inputs, cu) for cu in packings]
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        for cu in packings[:60]:
            run(inputs, cu)  # makes the tables again
    torch.cuda.synchronize()
    with torch.cuda.stream(second):
        torch.cuda._sleep(5 * SLEEP)
        late = [run(inputs, cu) for cu in packings[:60]]
    with torch.cuda.stream(first):
        others = [run(inputs, cu) for cu in packings[60:]]
    torch.cuda.synchronize()
    for a, b in zip([*late, *others], want):
        assert_equal(a, b)


@pytest.mark.parametrize("form", ["drop-in", "context"])
def test_calls_do_not_wait_for_the_gpu(form):
    """Forward and backward return while the GPU is busy with what came before."""
    inputs, cu = fresh([500, 700])
    ctx = context(cu)
    call = (lambda: run(inputs, cu)) if form == "drop-in" else (lambda: kcp(inputs, ctx))
    call()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(5 * SLEEP)
    done.record()
    call()
    assert not done.query()


def test_a_refill_does_not_wait_for_the_gpu():
    ctx = context([0, 40, 300], max_tokens=300, max_fragments=4)
    inputs = make(300, 1, 2, 128, 128)
    other = gdn_kcp.partition([0, 100, 170, 290], 1)
    want = kcp([t[:, :290] for t in inputs], context([0, 100, 170, 290]))
    kcp(inputs, ctx)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(5 * SLEEP)
    done.record()
    ctx.refill(other)
    got = kcp(inputs, ctx)
    assert not done.query()
    assert_equal([t[:, :290] for t in got], want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one():
    inputs, cu = make(300, 1, 2, 128, 128), offsets([100, 200])
    want = run(inputs, cu)
    there = [t.detach().to("cuda:1") for t in inputs]
    got = run(there, cu)
    assert torch.cuda.current_device() == 0 and got[0].get_device() == 1
    assert_equal([t.to("cuda:0") for t in got], want)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="k: expected .*cuda:1"):
        gdn_kcp.chunk_gated_delta_rule(there[0], inputs[1], *there[2:], cu_seqlens=cu)


PACKINGS = ([0, 500, 1200], [0, 1200], [0, 1, 2, 600], [0, 0, 64, 64, 1100], [0])


def captured(ctx, inputs):
    """A torch.cuda.graph of forward and backward: (inputs that it reads, results, graph)."""
    leaves = leaves_of(inputs)

    def call():
        o = gdn_kcp.chunk_gdn_kcp(*leaves, ctx)
        return [o.detach(), *torch.autograd.grad(o, leaves, torch.cos(o.detach()))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return leaves, results, graph


def test_a_users_graph_serves_other_packings():
    """Captured at one packing, replayed at others, bitwise the eager call of each alone."""
    ctx = context(PACKINGS[0], max_tokens=1200, max_fragments=5)
    leaves, results, graph = captured(ctx, make(1200, 2, 4, 128, 128))
    for cu in PACKINGS:
        ctx.refill(gdn_kcp.partition(cu, 1))
        inputs = make(1200, 2, 4, 128, 128)
        with torch.no_grad():
            for to, of in zip(leaves, inputs):
                to.copy_(of)
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        # A packing alone takes its own rows and gives zeros past them.
        assert_equal(results, kcp(inputs, context([*cu]) if cu[-1] == 1200 else roomy(cu)))


def roomy(cu):
    return context(cu, max_tokens=1200, max_fragments=5)


def test_replay_serves_other_packings():
    """graph="replay" without a stand-in, at several segments a document."""
    ctx = context(offsets(N), max_tokens=sum(N), max_fragments=6)
    nbytes = gdn_kcp.workspace_bytes(ctx, H_qk=2, HV=6)
    workspace = gdn_kcp.Workspace(nbytes, "cuda")
    for lengths in (N, [sum(N)], [1, 63, 64, 65, 4000], [100]):
        ctx.refill(gdn_kcp.partition(offsets(lengths), 1))
        inputs = make(sum(N), 2, 6, 128, 128)
        want = kcp(inputs, ctx)
        for _ in range(2):
            assert_equal(kcp(inputs, ctx, workspace=workspace, graph="replay"), want)
    assert len(workspace.replays) == 2


@pytest.mark.parametrize("form", ["drop-in", "context"])
def test_a_first_call_within_a_capture_says_what_to_do(form):
    inputs, cu = fresh([100, 200])
    inputs = [t.detach() for t in inputs]
    ctx = context(cu)
    torch.cuda.synchronize()
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="make its first call.* before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            if form == "drop-in":
                gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=cu)
            else:
                gdn_kcp.chunk_gdn_kcp(*inputs, ctx)
    torch.cuda.synchronize()
    assert torch.isfinite(run(inputs, cu)[0]).all()  # the next correct call works


def test_a_refill_within_a_capture_is_refused():
    ctx = context([0, 100], max_tokens=100, max_fragments=2)
    inputs = [t.detach() for t in make(100, 1, 2, 128, 128)]
    gdn_kcp.chunk_gdn_kcp(*inputs, ctx)
    torch.cuda.synchronize()
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="not being captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ctx.refill(gdn_kcp.partition([0, 50, 100], 1))
    torch.cuda.synchronize()
    assert ctx.partition.num_documents == 1


def requested(which):
    """Bytes asked of torch's allocator. What it hands out may be up to 1 MiB a block more: it does not
    split off a smaller rest of a large cached block, so that depends on what was freed before."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def peak(call):
    """Bytes above what is held before the call, at most; and what is held after it."""
    gc.collect()  # or what an earlier test left in a cycle may be freed by the call
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    return requested("peak") - before, requested("current") - before, kept


M = [12000, 9000, 6000, 3768, 2000]  # shape M


def shape_m():
    H, HV, T = 16, 48, sum(M)
    row = torch.randn(1, T, (2 * H + HV) * 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    g = torch.nn.functional.logsigmoid(torch.randn(1, T, HV, device="cuda"))
    return row, g, torch.rand(1, T, HV, device="cuda")


def test_packed_views_cost_no_copy_and_contiguous_gradients_one():
    """Forward peaks of views and of contiguous copies are equal; packed gradients are one row."""
    row, g, beta = shape_m()
    cu = offsets(M)
    norm = dict(use_qk_l2norm_in_kernel=True, cu_seqlens=cu)

    def forward(q, k, v):
        return gdn_kcp.chunk_gated_delta_rule(q, k, v, g, beta, **norm)[0]

    views = gdn_kcp.packed_qkv_views(row, H_qk=16, HV=48)
    copies = [t.detach().contiguous().requires_grad_() for t in views]
    with torch.no_grad():
        forward(*views)  # makes the tables
        on_views, _, o = peak(lambda: forward(*views))
        on_copies, _, other = peak(lambda: forward(*copies))
    assert torch.equal(o, other)
    assert on_views == on_copies
    do = torch.randn_like(o)
    del o, other

    def whole(make_views):
        def call():
            return torch.autograd.grad(forward(*make_views()), row, do)[0]

        return peak(call)

    packed, _, drow = whole(lambda: gdn_kcp.packed_qkv_views(row, H_qk=16, HV=48))
    sizes = [16 * 128, 16 * 128, 48 * 128]
    split, _, other = whole(
        lambda: [t.unflatten(-1, (-1, 128)) for t in row.split(sizes, -1)])
    assert torch.equal(drow, other)
    row_bytes = row.numel() * row.element_size()
    assert split >= packed and packed < 44 * 1024 * sum(M) + 2 * row_bytes
    print(f"forward {on_views >> 20} MiB, packed {packed >> 20}, split {split >> 20}, a row "
          f"{row_bytes >> 20}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_holds_nothing_but_its_inputs(reentrant):
    """Bytes after a checkpointed forward: o alone; gradients bitwise those without it."""
    row, g, beta = shape_m()
    cu = offsets(M)

    def block(row):
        q, k, v = gdn_kcp.packed_qkv_views(row, H_qk=16, HV=48)
        return gdn_kcp.chunk_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)[0]

    plain, kept, o = peak(lambda: block(row))
    saved = kept - o.numel() * o.element_size()
    do = torch.randn_like(o)
    want = torch.autograd.grad(o, row, do)[0]
    _, held, o = peak(lambda: checkpoint(block, row, use_reentrant=reentrant))
    assert held <= o.numel() * o.element_size() + (1 << 20)
    o.backward(do)
    assert torch.equal(row.grad, want)
    assert saved < 6.2 * 1024 * sum(M), saved
    print(f"forward peak {plain >> 20} MiB, saved {saved / sum(M) / 1024:.2f} KiB a token")


def test_what_is_elsewhere_is_named():
    inputs, cu = [t.detach() for t in make(100, 1, 2, 128, 128)], offsets([100])
    for i, name in enumerate(("k", "v", "g", "beta"), 1):
        mixed = list(inputs)
        mixed[i] = mixed[i].cpu()
        with pytest.raises(gdn_kcp.InvalidArgumentError, match=f"{name}: expected .*cuda"):
            gdn_kcp.chunk_gated_delta_rule(*mixed, cu_seqlens=cu)
    ctx = context(cu)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="workspace: expected on cuda"):
        gdn_kcp.chunk_gdn_kcp(*inputs, ctx, workspace=gdn_kcp.Workspace(1 << 24))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="workspace: expected a gdn_kcp.Workspace"):
        gdn_kcp.chunk_gdn_kcp(*inputs, ctx, graph="replay")
    with pytest.raises(gdn_kcp.UnsupportedError, match="q, k, v: expected bfloat16, got float32"):
        gdn_kcp.chunk_gated_delta_rule(*[t.float() for t in inputs], cu_seqlens=cu)
    dims = r"head dims: expected K = V = 64 or 128 \(pad smaller ones with zeros\), got K = "
    with pytest.raises(gdn_kcp.UnsupportedError, match=dims + "32"):
        gdn_kcp.chunk_gdn_kcp(*[t[..., :32].contiguous() for t in inputs[:3]], *inputs[3:], ctx)
    with pytest.raises(gdn_kcp.UnsupportedError, match=dims + "160"):
        gdn_kcp.chunk_gated_delta_rule(
            *[torch.nn.functional.pad(t, (0, 32)) for t in inputs[:3]], *inputs[3:], cu_seqlens=cu)
    odd = torch.randn(1, 100, 1, 132, device="cuda", dtype=torch.bfloat16)[..., :128]
    with pytest.raises(gdn_kcp.Error, match="q: expected a 16-byte aligned base and a token stride"):
        gdn_kcp.chunk_gated_delta_rule(odd, *inputs[1:], cu_seqlens=cu)
    run(inputs, cu)  # the next correct call works


def test_a_process_ends_cleanly():
    """Also where a context, whose tables lie on the GPU, went before the process's end."""
    code = """
import torch, gdn_kcp
q, k, v = (torch.randn(1, 70, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
g, beta = -torch.rand(1, 70, 1, device="cuda"), torch.rand(1, 70, 1, device="cuda")
ctx = gdn_kcp.build_context(gdn_kcp.partition([0, 70], 1), None, 0, "cuda")
gdn_kcp.chunk_gdn_kcp(q, k, v, g, beta, ctx, use_qk_l2norm_in_kernel=True)
print(gdn_kcp.last_path().backend)"""
    found = dict(os.environ, PYTHONPATH=str(Path(gdn_kcp.__file__).parents[1]))
    ended = subprocess.run(
        [sys.executable, "-c", code], env=found, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-500:])
    assert ended.stdout.startswith("cuda")


def test_offsets_on_the_gpu_are_taken():
    inputs, cu = fresh([100, 200])
    assert_equal(run(inputs, cu.cuda().int()), run(inputs, cu))


def test_offsets_past_32_bits():
    """T * HV * V above 2^31: a document at the end, bitwise as alone."""
    H, HV, T, last = 4, 32, 530_000, 1000
    bf16 = dict(device="cuda", dtype=torch.bfloat16)
    q, k = (torch.randn(1, T, H, 128, **bf16) for _ in range(2))
    v = torch.randn(1, T, HV, 128, **bf16)
    assert v.numel() > 2**31
    g, beta = -torch.rand(1, T, HV, device="cuda"), torch.rand(1, T, HV, device="cuda")
    options = dict(use_qk_l2norm_in_kernel=True)

    def both(inputs, lengths):
        leaves = [t.detach().requires_grad_() for t in inputs]
        o, _ = gdn_kcp.chunk_gated_delta_rule(*leaves, cu_seqlens=offsets(lengths), **options)
        return [t.detach()[:, -last:].clone() for t in (o, *torch.autograd.grad(o, leaves, o.detach()))]

    inputs = (q, k, v, g, beta)
    whole = both(inputs, [T - 2 * last, last, last])
    assert_equal(whole, both([t[:, -last:].clone() for t in inputs], [last]))
