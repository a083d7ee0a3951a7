"""Packed q, k, v: which form gets which gradient layout, hooks, missing and replaced gradients.

All forms give bitwise the same values.
"""

import pytest
import torch
from reference import assert_close, dims, placed, states
from torch.utils.checkpoint import checkpoint

import gdn_kcp
from gdn_kcp import packed as packed_module

H, HV, T = 2, 4, 90
CU = torch.tensor([0, 40, 90])
pytestmark = pytest.mark.usefixtures("device")


def dim(row):
    return row.shape[-1] // (2 * H + HV)


def rows(*shape):
    """Random operands: fp64, or bf16 on a GPU."""
    state = states(1, 1, 1, 1)
    return placed(torch.randn(*shape), dtype=torch.bfloat16 if state.is_cuda else state.dtype)


def row_and_gates(*lead):
    """A packed row [1, T, ..] and its g, beta."""
    lead, like = lead or (1, T), states(1, 1, 16, 16)
    row = rows(*lead, (2 * H + HV) * dims(16, 16)[0])
    g = torch.nn.functional.logsigmoid(torch.randn(*lead, HV))
    return row.requires_grad_(), *placed(g, torch.rand(*lead, HV), dtype=like.dtype)


def gradient(row):
    return rows(1, T, HV, dim(row))


def split_views(row):
    D = dim(row)
    q, k, v = row.split([H * D, H * D, HV * D], -1)
    return q.unflatten(-1, (H, D)), k.unflatten(-1, (H, D)), v.unflatten(-1, (HV, D))


def slices(row):
    D = dim(row)
    return (row[..., : H * D].view(1, T, H, D), row[..., H * D : 2 * H * D].view(1, T, H, D),
            row[..., 2 * H * D :].view(1, T, HV, D))


def views(row):
    return gdn_kcp.packed_qkv_views(row, H_qk=H, HV=HV)


def call(q, k, v, g, beta):
    return gdn_kcp.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=CU,
                                          use_qk_l2norm_in_kernel=True)[0]


class Layouts:
    """Watches how the op's backward hands over its gradients, and what becomes of them."""

    def __init__(self, monkeypatch):
        self.packed, self.concatenated = [], []
        run, row_of = gdn_kcp.autograd.run_backward, packed_module.row_of

        def run_backward(call, inputs, do, dfinal, saved, packed):
            out = run(call, inputs, do, dfinal, saved, packed)
            assert packed == (row_of(*out[:3]) is not None)
            assert packed or all(d.is_contiguous() for d in out[:3])
            self.packed.append(packed)
            return out

        def watched(*gradients):
            row = row_of(*gradients)
            self.concatenated.append(row is None)
            return row

        monkeypatch.setattr(gdn_kcp.autograd, "run_backward", run_backward)
        monkeypatch.setattr(packed_module, "row_of", watched)


@pytest.fixture
def layouts(monkeypatch):
    return Layouts(monkeypatch)


def test_views_are_views_of_one_node():
    row, _, _ = row_and_gates()
    q, k, v = views(row)
    D, size = dim(row), row.element_size()
    assert q.shape == (1, T, H, D) and k.shape == (1, T, H, D) and v.shape == (1, T, HV, D)
    assert [t.data_ptr() - row.data_ptr() for t in (q, k, v)] == [0, H * D * size, 2 * H * D * size]
    assert q.grad_fn is k.grad_fn is v.grad_fn
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), split_views(row)))


@pytest.mark.parametrize("form,packed", [
    (views, True),
    (split_views, False),
    (slices, False),
    (lambda row: tuple(t.contiguous() for t in views(row)), False),
    (lambda row: (views(row)[0], *views(row)[1:]), False),  # outputs of two nodes
    (lambda row: tuple(t[:] for t in views(row)), False),
])
def test_each_form_has_its_layout_and_the_same_values(layouts, form, packed):
    row, g, beta = row_and_gates()
    do = gradient(row)
    (want,) = torch.autograd.grad(call(*split_views(row), g, beta), row, do)
    layouts.packed.clear()
    (got,) = torch.autograd.grad(call(*form(row), g, beta), row, do)
    assert layouts.packed == [packed] and torch.equal(got, want)
    assert got.is_contiguous() and got.shape == row.shape


def test_leaves_are_separate(layouts):
    row, g, beta = row_and_gates()
    q, k, v = (t.detach().clone().requires_grad_() for t in split_views(row))
    call(q, k, v, g, beta).sum().backward()
    assert layouts.packed == [False] and q.grad.is_contiguous()


def test_order_of_the_three_matters(layouts):
    row, g, beta = row_and_gates()
    q, k, v = views(row)
    call(k, q, v, g, beta).sum().backward()
    assert layouts.packed == [False]


def test_a_row_with_gaps_is_separate(layouts):
    like, g, beta = row_and_gates()
    wide = rows(1, T, like.shape[-1] + 8).requires_grad_()
    row = wide[..., :-8]
    q, k, v = views(row)
    call(q, k, v, g, beta).sum().backward()
    assert layouts.packed == [False]
    assert (wide.grad[..., -8:] == 0).all()


def test_the_packed_row_is_the_gradient_without_a_copy(layouts):
    row, g, beta = row_and_gates()
    q, k, v = views(row)
    seen = []
    q.register_hook(lambda d: seen.append(d.data_ptr()))
    call(q, k, v, g, beta).sum().backward()
    assert layouts.packed == [True] and layouts.concatenated == [False]
    assert row.grad.data_ptr() == seen[0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint_layouts(layouts, reentrant, inside):
    """Non-reentrant keeps the original forward's choice; a reentrant re-run makes its own."""
    row, g, beta = row_and_gates()
    do = gradient(row)
    (want,) = torch.autograd.grad(call(*split_views(row), g, beta), row, do)
    layouts.packed.clear()
    if inside:
        o = checkpoint(lambda r: call(*views(r), g, beta), row, use_reentrant=reentrant)
    else:
        o = checkpoint(call, *views(row), g, beta, use_reentrant=reentrant)
    o.backward(do)
    assert torch.equal(row.grad, want)
    # Inside a reentrant re-run, q, k and v of an outer node are detached leaves.
    assert layouts.packed == [inside or not reentrant]


def test_hooks_and_retain_grad_fire_once_with_the_gradient(layouts):
    row, g, beta = row_and_gates()
    other = row.detach().clone().requires_grad_()
    want = [t for t in split_views(other)]
    for t in want:
        t.retain_grad()
    call(*want, g, beta).square().sum().backward()
    got = list(views(row))
    calls = []
    for i, t in enumerate(got):
        t.retain_grad()
        t.register_hook(lambda d, i=i: calls.append(i))
    call(*got, g, beta).square().sum().backward()
    assert sorted(calls) == [0, 1, 2]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(got, want))
    assert torch.equal(row.grad, other.grad)


def test_a_replaced_gradient_is_concatenated(layouts):
    row, g, beta = row_and_gates()
    (want,) = torch.autograd.grad(call(*split_views(row), g, beta).square().sum(), row)
    q, k, v = views(row)
    k.register_hook(lambda d: 2 * d)
    call(q, k, v, g, beta).square().sum().backward()
    want, D = want.clone(), dim(row)
    want[..., H * D : 2 * H * D] *= 2
    assert layouts.concatenated == [True] and torch.equal(row.grad, want)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_missing_gradients_are_zeros(used):
    row, _, _ = row_and_gates()
    q, k, v = views(row)
    sum((q, k, v)[i].square().sum() for i in used).backward()
    want, D = torch.zeros_like(row), dim(row)
    for i in used:
        part = [slice(0, H * D), slice(H * D, 2 * H * D), slice(2 * H * D, None)][i]
        want[..., part] = 2 * row.detach()[..., part]
    assert torch.equal(row.grad, want)


def test_a_view_used_twice_adds_up():
    row, g, beta = row_and_gates()
    (want,) = torch.autograd.grad(
        call(*split_views(row), g, beta).sum() + split_views(row)[1].square().sum(), row)
    q, k, v = views(row)
    (call(q, k, v, g, beta).sum() + k.square().sum()).backward()
    assert_close("row", row.grad, want, 1e-14)


def test_in_place_changes_of_a_view_are_refused():
    row, _, _ = row_and_gates()
    for t in views(row * 1):
        with pytest.raises(RuntimeError, match="in-?place"):
            t.mul_(2)
    q, _, _ = views(row.detach())
    q.mul_(2)  # nothing requires grad


def test_explicit_backward_decides_from_pointers_and_strides(device):
    row, g, beta = row_and_gates()
    row = row.detach()
    ctx = gdn_kcp.build_context(gdn_kcp.partition(CU, 1), None, 0, device)
    do = gradient(row)

    def backward(*qkv):
        return gdn_kcp.chunk_gdn_kcp_backward(
            *qkv, g, beta, ctx, do, use_qk_l2norm_in_kernel=True)

    results = []
    for form in (views, split_views, slices):
        out = backward(*form(row))
        assert packed_module.row_of(*out[:3]).shape == row.shape
        results.append(out)
    out = backward(*(t.contiguous() for t in views(row)))
    assert packed_module.row_of(*out[:3]) is None and all(d.is_contiguous() for d in out)
    assert all(torch.isfinite(d).all() for d in out)
    for other in results:
        assert all(torch.equal(a, b) for a, b in zip(out, other))


@pytest.mark.cpu_only(reason="nothing runs")
def test_bad_arguments_are_named():
    row = torch.randn(1, T, (2 * H + HV) * 16)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match=r"qkv: expected stride\(-1\) 1, got"):
        gdn_kcp.packed_qkv_views(row.transpose(1, 2).contiguous().transpose(1, 2), H_qk=H, HV=HV)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="HV: expected a multiple of H_qk = 2"):
        gdn_kcp.packed_qkv_views(row, H_qk=2, HV=3)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="qkv: expected"):
        gdn_kcp.packed_qkv_views(row[..., :-1], H_qk=H, HV=HV)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="H_qk: expected an int"):
        gdn_kcp.packed_qkv_views(row, H_qk=0, HV=HV)


@pytest.mark.parametrize("lead", [(T,), (3, 30), (1, 1), (2, 0)])
def test_leading_dimensions(lead):
    row, g, beta = row_and_gates(*lead)
    D = dim(row)
    q, k, v = views(row)
    assert q.shape == (*lead, H, D) and v.shape == (*lead, HV, D)
    norm = dict(use_qk_l2norm_in_kernel=True)
    o, _ = gdn_kcp.chunk_gated_delta_rule(q, k, v, g, beta, **norm)
    o.sum().backward()
    copies = (t.contiguous() for t in views(row))
    (want,) = torch.autograd.grad(
        gdn_kcp.chunk_gated_delta_rule(*copies, g, beta, **norm)[0].sum(), row)
    assert torch.equal(row.grad, want)


def test_a_second_derivative_of_the_row(device):
    """Through views that another function takes it is right; through the operator it is refused."""
    qkv = torch.randn(1, 30, (2 * 1 + 2) * 16, dtype=torch.float64, device=device)
    qkv.requires_grad_()

    def cubes(views):
        return sum((t**3).sum() for t in views)

    def second(views):
        first = torch.autograd.grad(cubes(views), qkv, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), qkv)[0]

    views = gdn_kcp.packed_qkv_views(qkv, H_qk=1, HV=2)
    plain = [t.unflatten(-1, (-1, 16)) for t in qkv.split([16, 16, 32], -1)]
    assert torch.allclose(second(views), second(plain), rtol=1e-12)
