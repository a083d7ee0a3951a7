"""Checkpoints, what is saved, strided operands and gradients, partial losses, autocast, hooks."""

import gc
import weakref

import pytest
import torch
from ranks import local_rows
from reference import assert_close, dims, gates, make, placed
from torch.utils.checkpoint import checkpoint

import gdn_kcp

CU = torch.tensor([0, 70, 71, 130])
pytestmark = pytest.mark.usefixtures("device")


def run(*inputs, **options):
    return gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=CU, **options)[0]


def grads(o, inputs, do):
    return torch.autograd.grad(o, inputs, do)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_bitwise(reentrant, dtype):
    inputs = make(130, 2, 4, 32, 32, dtype=dtype)
    do = torch.randn_like(inputs[2].detach())
    run(*inputs).backward(do)
    want = [t.grad for t in inputs]
    for t in inputs:
        t.grad = None
    checkpoint(run, *inputs, use_reentrant=reentrant).backward(do)
    assert all(torch.equal(t.grad, w) for t, w in zip(inputs, want))


class Collectives:
    """Counts the collectives of a context's member."""

    def __init__(self, ctx):
        self.count = 0
        for name in ("all_to_all", "all_gather"):
            setattr(ctx.member, name, self._counted(getattr(ctx.member, name)))

    def _counted(self, inner):
        def call(*args):
            self.count += 1
            return inner(*args)

        return call


@pytest.mark.parametrize("exchange", ["a2a", "allgather"])
@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant", "handle", "handle-re"])
def test_checkpoint_over_ranks(device, mode, exchange):
    """Bitwise the plain gradients; with a RecomputeHandle no collective in the recompute."""
    W = 3
    inputs = make(130, 2, 4, 16, 16)
    do = torch.randn_like(inputs[2].detach())
    partition = gdn_kcp.partition(CU, W, "zigzag_per_document")
    group = gdn_kcp.InProcessGroup(W, timeout=60)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, device)
        counter = Collectives(ctx)
        rows = partition.token_indices(rank)

        def plain(*x, handle=None):
            return gdn_kcp.chunk_gdn_kcp(*x, ctx, exchange=exchange, recompute_handle=handle)

        want_leaves = local_rows(partition, rank, inputs)
        plain(*want_leaves).backward(do[:, rows])
        alone = counter.count
        leaves = local_rows(partition, rank, inputs)
        counter.count = 0
        if mode == "plain":
            o = plain(*leaves)
        else:
            handle = gdn_kcp.RecomputeHandle() if "handle" in mode else None
            reentrant = mode in ("reentrant", "handle-re")
            o = checkpoint(lambda *x: plain(*x, handle=handle), *leaves, use_reentrant=reentrant)
        o.backward(do[:, rows])
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, want_leaves))
        return alone, counter.count

    per_pass = {"a2a": 2, "allgather": 1}[exchange]
    recomputed = per_pass if mode in ("reentrant", "non-reentrant") else 0
    assert group.run(main) == [(2 * per_pass, 2 * per_pass + recomputed)] * W


def test_a_recompute_handle_serves_one_checkpoint(device):
    inputs = make(130, 1, 2, 16, 16)
    ctx = gdn_kcp.build_context(gdn_kcp.partition(CU, 1), None, 0, device)
    handle = gdn_kcp.RecomputeHandle()
    first = gdn_kcp.chunk_gdn_kcp(*inputs, ctx, recompute_handle=handle)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="recompute_handle: expected the shapes"):
        gdn_kcp.chunk_gdn_kcp(*inputs, ctx, scale=2.0, recompute_handle=handle)
    second = gdn_kcp.chunk_gdn_kcp(*inputs, ctx, recompute_handle=handle)
    assert torch.equal(first, second)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="recompute_handle: expected a new one"):
        gdn_kcp.chunk_gdn_kcp(*inputs, ctx, recompute_handle=handle)
    handle.reset()
    gdn_kcp.chunk_gdn_kcp(*inputs, ctx, recompute_handle=handle)


@pytest.mark.parametrize("save_mode", ["light", "light_akk"])
def test_what_is_kept_serves_two_backwards_and_a_recompute(device, save_mode):
    inputs = make(130, 1, 2, 16, 16)
    ctx = gdn_kcp.build_context(gdn_kcp.partition(CU, 1), None, 0, device)
    want = torch.autograd.grad(gdn_kcp.chunk_gdn_kcp(*inputs, ctx, save_mode="none").sum(), inputs)
    o = gdn_kcp.chunk_gdn_kcp(*inputs, ctx, save_mode=save_mode)
    for keep in (True, False):
        grads = torch.autograd.grad(o.sum(), inputs, retain_graph=keep)
        assert all(torch.equal(a, b) for a, b in zip(grads, want))
    handle = gdn_kcp.RecomputeHandle()
    o = checkpoint(
        lambda *x: gdn_kcp.chunk_gdn_kcp(*x, ctx, save_mode=save_mode, recompute_handle=handle),
        *inputs, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), inputs), want))


def test_all_that_is_saved_goes_through_saved_tensors():
    """A hook that takes every saved tensor away leaves nothing alive but inputs and output."""
    inputs = make(130, 2, 4, 32, 32, dtype=torch.float32)
    packed = []

    def pack(t):
        packed.append(t.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        o = run(*inputs)
    do = torch.randn_like(o)
    want = grads(run(*inputs), inputs, do)
    alive = [weakref.ref(t) for t in (o,)]
    assert [tuple(t.shape) for t in packed[:5]] == [tuple(t.shape) for t in inputs]
    assert len(packed) == 6  # the five operands and the block of boundary states
    got = grads(o, inputs, do)  # the moved block need not be aligned
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    del o, got
    gc.collect()
    assert alive[0]() is None


@pytest.mark.every_head_dim
def test_the_drop_in_keeps_prepared_data_where_they_are_light(device):
    """In bytes of its saved set: on cuda-sm90a those of "light_akk", elsewhere of "light"."""
    T, H, HV = 200, 2, 6
    inputs, blocks = make(T, H, HV, 64, 64), []
    D = inputs[0].shape[-1]

    def pack(t):
        blocks.append(t.numel() if t.dtype == torch.uint8 else 0)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gdn_kcp.chunk_gated_delta_rule(*inputs)
    light = gdn_kcp.last_path().backend == "cuda-sm90a"
    ctx = gdn_kcp.build_context(gdn_kcp.partition(torch.tensor([0, T]), 1), None, 0, device)
    assert sum(blocks) == gdn_kcp.saved_bytes(
        ctx, H_qk=H, HV=HV, head_dim=D, dtype=inputs[0].dtype,
        save_mode="light_akk" if light else "light")


def test_saved_tensors_changed_in_place_are_detected():
    inputs = make(130, 1, 2, 16, 16)
    inputs[2] = (inputs[2] * 1).detach().requires_grad_()
    o = run(*inputs)
    with torch.no_grad():
        inputs[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2, 4)])
def test_some_inputs_require_grad(needed):
    inputs = make(130, 1, 2, 16, 16)
    do = torch.randn_like(inputs[2].detach())
    want = grads(run(*inputs), inputs, do)
    partial = [t.detach().requires_grad_(i in needed) for i, t in enumerate(inputs)]
    run(*partial).backward(do)
    for i, t in enumerate(partial):
        assert (t.grad is not None) == (i in needed)
        assert t.grad is None or torch.equal(t.grad, want[i])


@pytest.mark.parametrize("loss", ["o", "final", "both"])
def test_loss_on_o_only_on_the_final_state_only_on_both(loss):
    inputs = make(130, 1, 2, 16, 16)

    def losses(**options):
        o, final = gdn_kcp.chunk_gated_delta_rule(
            *inputs, cu_seqlens=CU, output_final_state=True)
        return o.square().sum(), final.square().sum()

    parts = {name: torch.autograd.grad(losses()[i], inputs, allow_unused=True)
             for i, name in enumerate(("o", "final"))}
    got = torch.autograd.grad(
        {"o": losses()[0], "final": losses()[1], "both": sum(losses())}[loss], inputs)
    for i, d in enumerate(got):
        want = parts["o"][i] + parts["final"][i] if loss == "both" else parts[loss][i]
        assert_close("d" + "qkvg"[i] if i < 4 else "dbeta", d, want, 1e-10)


def test_one_leaf_used_twice():
    inputs = make(130, 2, 2, 16, 16)
    k = inputs[1]
    run(k, k, *inputs[2:]).sum().backward()
    a, b = (k.detach().clone().requires_grad_() for _ in range(2))
    run(a, b, *inputs[2:]).sum().backward()
    assert_close("dk", k.grad, a.grad + b.grad, 1e-14)


@pytest.mark.parametrize("kind", ["slice", "expanded", "transposed", "batch"])
def test_do_of_any_strides(kind):
    B, T = 2, 65
    inputs = [t.detach().reshape(B, T, *t.shape[2:]).requires_grad_()
              for t in make(B * T, 1, 2, 16, 16)]
    o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs)
    D = o.shape[-1]
    wide, turned, batch = placed(torch.randn(B, T, 2, 3 * D), torch.randn(B, T, D, 2),
                                 torch.randn(T, B, 2, D), dtype=o.dtype)
    do = {
        "slice": wide[..., D : 2 * D],
        "expanded": placed(torch.tensor(0.5), dtype=o.dtype).expand(B, T, 2, D),
        "transposed": turned.transpose(2, 3),
        "batch": batch.transpose(0, 1),
    }[kind]
    got = torch.autograd.grad(o, inputs, do, retain_graph=True)
    want = torch.autograd.grad(o, inputs, do.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slices_of_rows_are_taken_as_they_are(dtype, device):
    """q, k, v of one row and g, beta of another: bitwise as contiguous, gradients in place."""
    H, HV, D, T = 2, 4, dims(32, 32)[0], 130
    dtype = torch.bfloat16 if device == "cuda" else dtype
    row = placed(torch.randn(1, T, (2 * H + HV) * D + 24), dtype=dtype).requires_grad_()
    gates = placed(-torch.rand(1, T, 2 * HV + 3), dtype=torch.float32).requires_grad_()

    def parts(row, gates):
        q = row[..., 8 : 8 + H * D].view(1, T, H, D)  # 16-byte aligned, not 128
        k = row[..., 8 + H * D : 8 + 2 * H * D].view(1, T, H, D)
        v = row[..., 16 + 2 * H * D : -8].view(1, T, HV, D)
        return q, k, v, gates[..., :HV], gates[..., HV : 2 * HV].neg()

    do = placed(torch.randn(1, T, HV, D), dtype=dtype)
    views = parts(row, gates)
    assert views[0].storage_offset() == 8
    o = run(*views, use_qk_l2norm_in_kernel=True)
    copies = [t.detach().contiguous().requires_grad_() for t in views]
    other = run(*copies, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o, other)
    o.backward(do)
    other.backward(do)
    wanted = parts(row.grad, gates.grad)
    for got, copy in zip(wanted[:4], copies):
        assert torch.equal(got, copy.grad)
    assert (row.grad[..., :8] == 0).all() and (gates.grad[..., 2 * HV :] == 0).all()


@pytest.mark.parametrize("gate", [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtype_of_their_input(gate):
    inputs = make(130, 1, 2, 16, 16, dtype=torch.bfloat16, gates=gate)
    o = run(*inputs)
    o.backward(torch.ones_like(o))
    assert all(t.grad.dtype == t.dtype for t in inputs)


def test_autocast_casts_q_k_v(device):
    inputs = [t.detach().float().requires_grad_() for t in make(130, 1, 2, 16, 16)]
    with torch.autocast(device, torch.bfloat16):
        o = run(*inputs)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs)
    rounded = [t.detach().bfloat16() for t in inputs[:3]] + [t.detach() for t in inputs[3:]]
    assert torch.equal(o, run(*rounded))


def test_parameters_of_a_bf16_model():
    inputs = make(130, 1, 2, 16, 16, dtype=torch.bfloat16)
    A_log, dt_bias = (gates(2).bfloat16().requires_grad_() for _ in range(2))
    run(*inputs, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias).sum().backward()
    assert A_log.grad.dtype == torch.bfloat16 and dt_bias.grad.abs().sum() > 0


def test_two_backwards_of_one_graph():
    inputs = make(130, 1, 2, 16, 16)
    o = run(*inputs)
    a = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    b = torch.autograd.grad(o.sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), inputs)


def test_no_graph_keeps_nothing():
    inputs = make(130, 1, 2, 16, 16)
    with torch.no_grad():
        assert run(*inputs).grad_fn is None
    assert run(*[t.detach() for t in inputs]).grad_fn is None


def test_forward_mode_is_refused():
    q, *rest = (t.detach() for t in make(30, 1, 2, 16, 16))
    with pytest.raises((NotImplementedError, RuntimeError), match="jvp|setup_context|forward"):
        torch.func.jvp(
            lambda q: gdn_kcp.chunk_gated_delta_rule(q, *rest)[0], (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="jvp"):
            gdn_kcp.chunk_gated_delta_rule(dual, *rest)
    gdn_kcp.chunk_gated_delta_rule(q, *rest)


def test_a_second_derivative_is_refused():
    inputs = make(130, 1, 2, 16, 16)
    o = run(*inputs)
    first = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
    want = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, want))
    with pytest.raises(gdn_kcp.UnsupportedError, match="backward: expected one of the outputs"):
        first[0].sum().backward()
    # Also of a `do` without a gradient, asked of one input.
    first = torch.autograd.grad(run(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(gdn_kcp.UnsupportedError, match="backward: expected one of the outputs"):
        torch.autograd.grad(first[0].square().sum(), inputs[2])


class Allocations:
    """Bytes that torch allocated within the block, freed ones included."""

    def __init__(self, device):
        self.cuda = device == "cuda"

    @staticmethod
    def _on_gpu() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["allocated_bytes.all.allocated"]

    def __enter__(self):
        if self.cuda:
            self.bytes = -self._on_gpu()
            return self
        activity = torch.profiler.ProfilerActivity.CPU
        self.profile = torch.profiler.profile(activities=[activity], profile_memory=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *error):
        if self.cuda:
            self.bytes += self._on_gpu()
            return
        self.profile.__exit__(*error)
        events = self.profile.profiler.kineto_results.events()
        self.bytes = sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")


def test_views_are_not_copied(device):
    """Slices of rows cost the forward and the operator's backward no byte more than leaves do."""
    H, HV, D, T = 2, 4, dims(32, 32)[0], 1000
    row = placed(torch.randn(1, T, (2 * H + HV) * D + 16), dtype=torch.bfloat16)
    gates = placed(-torch.rand(1, T, 2 * HV), dtype=torch.float32)
    q, k, v = (part.unflatten(-1, (-1, D))
               for part in row[..., 8:-8].split([H * D, H * D, HV * D], -1))
    views = [t.detach().requires_grad_() for t in (q, k, v, gates[..., :HV], gates[..., HV:])]
    copies = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
              for t in views]
    assert not any(t.is_contiguous() for t in views)
    do = placed(torch.randn(1, T, HV, 2 * D), dtype=torch.bfloat16)[..., D:]
    spent = []
    gdn_kcp.chunk_gated_delta_rule(*views, use_qk_l2norm_in_kernel=True)  # makes the tables
    for inputs in (views, copies):
        with Allocations(device) as forward:
            o = gdn_kcp.chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]
        with Allocations(device) as backward:
            torch.autograd.grad(o, inputs, do)
        spent.append((forward.bytes, backward.bytes))
    assert spent[0] == spent[1] and spent[0][0] >= v.numel() * 2
