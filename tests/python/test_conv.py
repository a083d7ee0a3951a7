"""causal_conv1d against torch's own convolution, its gradients, documents and ranks."""

import pytest
import torch
from ranks import LAYOUTS, joined
from torch.nn import functional as F

import gdn_kcp

CU = [0, 1, 3, 3, 40, 97]


def reference(x, weight, bias, activation, cu):
    """x [1, T, C]: one torch convolution per document."""
    outs = []
    for a, b in zip(cu[:-1], cu[1:]):
        if a == b:
            continue
        rows = F.pad(x[0, a:b].T[None], (weight.shape[1] - 1, 0))
        y = F.conv1d(rows, weight[:, None], bias, groups=x.shape[-1])[0].T
        outs.append(F.silu(y) if activation else y)
    outs.append(x.new_zeros(x.shape[1] - cu[-1], x.shape[-1]))
    return torch.cat(outs)[None]


def operands(T, C, W, bias=True, dtype=torch.float64):
    x = torch.randn(1, T, C, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(C, W, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(C, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return x, weight, b


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("W", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_documents(W, bias, activation):
    x, weight, b = operands(100, 70, W, bias)
    leaves = [t for t in (x, weight, b) if t is not None]
    y = gdn_kcp.causal_conv1d(x, weight, b, activation, torch.tensor(CU))
    want = reference(x, weight, b, activation, CU)
    assert torch.allclose(y, want, rtol=1e-12, atol=1e-13)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, dy)
    for d, r in zip(got, torch.autograd.grad(want, leaves, dy)):
        assert torch.allclose(d, r, rtol=1e-10, atol=1e-11)
    assert (got[0][:, 97:] == 0).all()


@pytest.mark.parametrize("dtype,bar", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_rounded(dtype, bar):
    x, weight, b = operands(97, 33, 4, dtype=dtype)
    y = gdn_kcp.causal_conv1d(x, weight[:, None], b, "silu", torch.tensor(CU, dtype=torch.int32))
    want = reference(x.double(), weight.double(), b.double(), "silu", CU)
    assert y.dtype == dtype and (y - want).norm() / want.norm() < bar


def test_dense_batches_and_gradcheck():
    x, weight, b = operands(14, 3, 4)
    dense = x.detach().reshape(2, 7, 3).requires_grad_()
    y = gdn_kcp.causal_conv1d(dense, weight, b)
    assert torch.equal(y.flatten(), gdn_kcp.causal_conv1d(
        x, weight, b, cu_seqlens=torch.tensor([0, 7, 14])).flatten())
    assert torch.autograd.gradcheck(lambda *a: gdn_kcp.causal_conv1d(*a), (dense, weight, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("W", [2, 4])
def test_ranks(layout, ranks, W):
    """Bitwise the one-rank outputs; gradients of rows to rounding, of parameters as sums."""
    T = CU[-1]
    x, weight, b = operands(T, 5, W)
    dy = torch.randn(1, T, 5, dtype=torch.float64)
    want = gdn_kcp.causal_conv1d(x, weight, b, "silu", torch.tensor(CU))
    wanted = torch.autograd.grad(want, (x, weight, b), dy)
    partition = gdn_kcp.partition(CU, ranks, layout)
    group = gdn_kcp.InProcessGroup(ranks, timeout=60) if ranks > 1 else None

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, "cpu")
        rows = partition.token_indices(rank)
        leaves = [t.detach().clone().requires_grad_() for t in (x[:, rows], weight, b)]
        y = gdn_kcp.causal_conv1d(*leaves, "silu", cp_context=ctx)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy[:, rows]))

    parts = group.run(main) if group else [main(0)]
    y, dx, dweight, dbias = zip(*parts)
    assert torch.equal(joined(partition, y, T), want)
    assert torch.allclose(joined(partition, dx, T), wanted[0], rtol=1e-12, atol=1e-13)
    assert torch.allclose(sum(dweight), wanted[1], rtol=1e-11, atol=1e-12)
    assert torch.allclose(sum(dbias), wanted[2], rtol=1e-11, atol=1e-12)


def test_one_document_does_not_see_the_others():
    x, weight, b = operands(97, 4, 4)
    y = gdn_kcp.causal_conv1d(x, weight, b, "silu", torch.tensor(CU))
    with torch.no_grad():
        x[:, 40:] = float("nan")
    again = gdn_kcp.causal_conv1d(x, weight, b, "silu", torch.tensor(CU))
    assert torch.equal(y[:, :40], again[:, :40])


@pytest.mark.parametrize("W", [2, 4, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_the_place(device, dtype, W):
    """Of one document: alone, and behind and before others, so with other rows in its runs of rows."""
    weight, b = (t.detach().to(device) for t in operands(1, 24, W, dtype=dtype)[1:])
    row, dy = torch.randn(2, 1, 300, 24).to(device, dtype)
    seen = []
    for ahead, behind in ((0, 0), (1, 0), (30, 5), (67, 200)):
        T = ahead + 300 + behind
        x, d = torch.randn(2, 1, T, 24).to(device, dtype)
        x[:, ahead : ahead + 300], d[:, ahead : ahead + 300] = row, dy
        x.requires_grad_()
        y = gdn_kcp.causal_conv1d(x, weight, b, "silu", torch.tensor([0, ahead, ahead + 300, T]))
        dx = torch.autograd.grad(y, x, d)[0]
        seen.append([t.detach()[:, ahead : ahead + 300] for t in (y, dx)])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


def test_errors_name_the_argument_on_every_rank():
    x, weight, b = operands(20, 4, 4)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="activation: expected"):
        gdn_kcp.causal_conv1d(x, weight, b, "relu")
    with pytest.raises(gdn_kcp.InvalidArgumentError, match=r"weight: expected \[4, W\]"):
        gdn_kcp.causal_conv1d(x, weight[:3], b)
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="cu_seqlens: expected to start at 0"):
        gdn_kcp.causal_conv1d(x, weight, b, "silu", torch.tensor([0, 21]))
    partition = gdn_kcp.partition([0, 20], 2)
    group = gdn_kcp.InProcessGroup(2, timeout=60)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, "cpu", 4 if rank else 3)
        with pytest.raises(gdn_kcp.InvalidArgumentError, match="rank 0: weight: expected"):
            gdn_kcp.causal_conv1d(x[:, :10], weight, b, cp_context=ctx)

    group.run(main)


@pytest.mark.parametrize("dtype,bar", [(torch.float64, 1e-12), (torch.float32, 1e-5),
                                       (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_where_it_runs(device, documents, W, dtype, bar):
    """Rows on the device under test: values and gradients of the fp64 convolution, bitwise twice."""
    on_host = operands(97, 33, W, dtype=dtype)
    cu = CU if documents else [0, 97]
    want = reference(*(t.double() for t in on_host), "silu", cu)
    dy = torch.randn(1, 97, 33).to(dtype)
    wanted = torch.autograd.grad(want, on_host, dy.double())
    offsets = torch.tensor(cu) if documents else None
    runs = []
    for _ in range(2):
        leaves = [t.detach().to(device).requires_grad_() for t in on_host]
        y = gdn_kcp.causal_conv1d(*leaves, "silu", offsets)
        assert y.dtype == dtype and y.device.type == device
        runs.append((y.detach(), *torch.autograd.grad(y, leaves, dy.to(device))))
    for got, again, exact in zip(*runs, (want, *wanted)):
        assert torch.equal(got, again)
        assert (got.cpu().double() - exact).norm() <= bar * exact.norm()


@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("form", ["documents", "prefix", "batch", "rows", "strided"])
def test_forms_where_they_run(device, W, silu, form):
    """The op on the device under test and the one on the CPU, in fp64."""

    def strided(rows):
        return torch.cat([rows, torch.full_like(rows, float("nan"))], -1)[..., :6]

    x, weight, b = (t.detach() for t in operands(100, 6, W))
    cu = torch.tensor(CU) if form in ("documents", "prefix") else None
    x = {"batch": x.view(4, 25, 6), "rows": x[0], "strided": strided(x)}.get(form, x)
    prefix = torch.randn(len(CU) - 1, W - 1, 6).double() if form == "prefix" else None
    args = (x, weight, None if form == "rows" else b, prefix)
    there = [None if t is None else t.to(device) for t in args]
    if form == "strided":
        there[0] = strided(there[0])
    dy = torch.randn(x.shape, dtype=torch.float64)
    got = (torch.ops.gdn_kcp.conv(*there, cu, silu),
           *torch.ops.gdn_kcp.conv_backward(*there, cu, silu, dy.to(device)))
    want = (torch.ops.gdn_kcp.conv(*args, cu, silu),
            *torch.ops.gdn_kcp.conv_backward(*args, cu, silu, dy))
    for d, r in zip(got, want):
        assert d.shape == r.shape and torch.allclose(d.cpu(), r, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cut", [lambda x: x[:, :5], lambda x: x[:, 5:6], lambda x: x[:1, :5]])
def test_batches_that_lie_apart(device, cut):
    x, weight, b = (t.detach().to(device) for t in operands(54, 4, 4))
    part = cut(x.view(6, 9, 4))
    whole = part.contiguous().requires_grad_()
    part = part.requires_grad_()
    got, want = (gdn_kcp.causal_conv1d(t, weight, b) for t in (part, whole))
    assert torch.equal(got, want)
    dy = torch.randn_like(want)
    assert torch.equal(torch.autograd.grad(got, part, dy)[0], torch.autograd.grad(want, whole, dy)[0])


def test_one_token_in_each_entry(device):
    """Contiguous whatever the stride of T: of a transposed [B, C, 1], and of dy in the backward."""
    x = torch.randn(3, 4, 1, device=device).transpose(1, 2).requires_grad_()
    weight = torch.randn(4, 4, device=device)
    y = gdn_kcp.causal_conv1d(x, weight)
    assert torch.allclose(y, torch.nn.functional.silu(x * weight[:, 3]))
    (y.transpose(0, 1) * torch.ones(1, 3, 4, device=device)).sum().backward()
    assert x.grad.shape == x.shape


def test_errors_of_operands_and_of_the_backward(device):
    x, weight, b = (t.detach().to(device) for t in operands(20, 4, 4))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match=r"bias: expected \[4\] of bfloat16"):
        gdn_kcp.causal_conv1d(x, weight, torch.arange(4, device=device))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match="cu_seqlens: expected .*got none"):
        gdn_kcp.causal_conv1d(x, weight, b, cu_seqlens=torch.empty(0, dtype=torch.int64))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match=r"x: expected 3 dimensions \[B, T"):
        gdn_kcp.causal_conv1d(x[0, 0, 0], weight, b)
    with pytest.raises(RuntimeError, match=r"prefix: expected float64 \[1, 3, 4\], got"):
        torch.ops.gdn_kcp.conv(x, weight, b, x.new_zeros(2, 3, 4), torch.tensor([0, 20]), True)
    leaf = x.clone().requires_grad_()
    y = gdn_kcp.causal_conv1d(leaf, weight, b)
    first = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)[0]
    with pytest.raises(gdn_kcp.UnsupportedError, match="causal_conv1d: expected one backward"):
        torch.autograd.grad(first.square().sum(), leaf)


def test_forward_mode_is_refused(device):
    x, weight, b = (t.detach().to(device) for t in operands(20, 4, 4))
    with torch.autograd.forward_ad.dual_level():
        gdn_kcp.causal_conv1d(x, weight, b)
        with pytest.raises(NotImplementedError, match="jvp"):
            gdn_kcp.causal_conv1d(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), weight, b)


def test_a_second_derivative_over_a_context_is_refused(device):
    x, weight, b = (t.detach().to(device) for t in operands(20, 4, 4))
    ctx = gdn_kcp.build_context(gdn_kcp.partition([0, 20], 1), None, 0, device)
    leaf, weight = x.clone().requires_grad_(), weight.requires_grad_()
    y = gdn_kcp.causal_conv1d(leaf, weight, b, cp_context=ctx)
    first = torch.autograd.grad(y.sum(), leaf, create_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(gdn_kcp.causal_conv1d(leaf, weight, b).sum(), leaf)[0])
    with pytest.raises(gdn_kcp.UnsupportedError, match="backward: expected one of the outputs"):
        torch.autograd.grad(first.square().sum(), weight)
