"""chunk_gated_delta_rule against the fp64 recurrence and its autograd: values, every gradient."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from reference import BARS, assert_close, gates, make, recurrence, states

import gdn_kcp

NAMES = ("q", "k", "v", "g", "beta")
pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.every_head_dim]


def check(inputs, cu, bar, *, h0=None, state_v_first=False, gate=None, **options):
    """One call and its gradients against the recurrence."""
    A_log, dt_bias = gate or (None, None)
    extra = {}
    if gate:
        extra = dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    given = h0
    if h0 is not None and state_v_first:
        given = h0.detach().transpose(-1, -2).contiguous().requires_grad_()
    o, final = gdn_kcp.chunk_gated_delta_rule(
        *inputs, initial_state=given, output_final_state=True, state_v_first=state_v_first,
        cu_seqlens=torch.tensor(cu), **options, **extra,
    )
    exact = [t.detach().double()[0].requires_grad_() for t in inputs]
    more = [t for t in (h0, A_log, dt_bias) if t is not None]
    exact_more = [t.detach().double().requires_grad_() for t in more]
    it = iter(exact_more)
    ref_h0 = next(it) if h0 is not None else None
    ref_gate = [next(it) if t is not None else None for t in (A_log, dt_bias)]
    ro, rfinal = recurrence(
        *exact, cu, scale=options.get("scale"), norm=options.get("use_qk_l2norm_in_kernel", False),
        h0=ref_h0, A_log=ref_gate[0], dt_bias=ref_gate[1],
        sigmoid=options.get("use_beta_sigmoid_in_kernel", False),
        neg=options.get("allow_neg_eigval", False),
    )
    end = cu[-1]
    do = torch.randn_like(o)
    dfinal = torch.randn_like(final)
    rdfinal = dfinal.transpose(-1, -2) if state_v_first else dfinal
    tensors = list(inputs) + [t for t in (given, A_log, dt_bias) if t is not None]
    grads = torch.autograd.grad((o, final), tensors, (do, dfinal))
    rgrads = torch.autograd.grad(
        (ro[:end], rfinal), exact + exact_more, (do[0, :end].double(), rdfinal.double())
    )
    assert o.dtype == inputs[2].dtype and o.shape == inputs[2].shape
    assert_close("o", o[0], ro, bar)
    assert_close("final_state", final.transpose(-1, -2) if state_v_first else final, rfinal, bar)
    for name, t, d, r in zip(NAMES, inputs, grads, rgrads):
        assert d.dtype == t.dtype and d.shape == t.shape
        assert (d[0, end:] == 0).all(), name
        assert_close("d" + name, d[0, :end], r[:end], bar)
    rest = [n for n, t in (("initial_state", h0), ("A_log", A_log), ("dt_bias", dt_bias))
            if t is not None]
    for name, d, r in zip(rest, grads[5:], rgrads[5:]):
        if name == "initial_state" and state_v_first:
            d = d.transpose(-1, -2)
        assert_close("d" + name, d, r, bar)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 3)])
def test_packed_documents(dtype, heads):
    H, HV = heads
    inputs = make(150, H, HV, 64, 64, dtype=dtype)
    state = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    h0 = states(5, HV, 64, 64, 0.1).to(state).requires_grad_()
    check(inputs, [0, 65, 65, 66, 130, 150], BARS[dtype], h0=h0)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 129])
def test_lengths_around_a_chunk(T):
    check(make(T, 1, 2, 16, 32), [0, T], 1e-11)


@pytest.mark.cpu_only(reason="the CUDA backends take 64 and 128")
def test_head_dims_that_only_the_reference_takes():
    check(make(20, 1, 2, 6, 10), [0, 20], 1e-11)
    assert gdn_kcp.last_path().backend == "reference"


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_size_is_a_hint_without_effect(chunk_size):
    inputs = make(150, 2, 4, 16, 16)
    want, _ = gdn_kcp.chunk_gated_delta_rule(*inputs)
    got, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, chunk_size=chunk_size)
    assert torch.equal(got, want)


@pytest.mark.parametrize("sigmoid,neg", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("gate", [None, "A_log", "dt_bias"])
@pytest.mark.parametrize("norm", [False, True])
def test_activations_in_the_kernel(sigmoid, neg, gate, norm):
    HV = 16  # dA_log has no other numbers
    inputs = make(70, 4, HV, 32, 16)
    parameters = None
    if gate:
        inputs[3] = gates(1, 70, HV).requires_grad_()
        A_log = gates(HV).requires_grad_()
        dt = gates(HV).requires_grad_() if gate == "dt_bias" else None
        parameters = (A_log, dt)
    if sigmoid:
        inputs[4] = gates(1, 70, HV).requires_grad_()
    check(
        inputs, [0, 30, 70], 1e-10, gate=parameters, scale=0.3, use_qk_l2norm_in_kernel=norm,
        use_beta_sigmoid_in_kernel=sigmoid, allow_neg_eigval=neg,
    )


def test_state_v_first():
    h0 = states(2, 2, 16, 32).requires_grad_()
    check(make(40, 1, 2, 16, 32), [0, 10, 40], 1e-11, h0=h0, state_v_first=True)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_past_the_last_document_are_not_read(index):
    inputs = make(50, 2, 2, 16, 16)
    with torch.no_grad():
        for t in inputs:
            t[:, 40:] = float("nan")
    check(inputs, [0, 17, 40], 1e-11)
    cu = torch.tensor([0, 17, 40], dtype=index)
    o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=cu)
    assert (o[:, 40:] == 0).all()


def test_dense_batch_equals_packed_documents():
    B, T = 3, 37
    rows = make(B * T, 2, 4, 16, 16)
    dense = [t.detach().reshape(B, T, *t.shape[2:]).requires_grad_() for t in rows]
    cu = torch.arange(B + 1) * T
    h0 = states(B, 4, 16, 16)
    a, fa = gdn_kcp.chunk_gated_delta_rule(
        *rows, cu_seqlens=cu, initial_state=h0, output_final_state=True)
    b, fb = gdn_kcp.chunk_gated_delta_rule(*dense, initial_state=h0, output_final_state=True)
    assert torch.equal(a.flatten(), b.flatten()) and torch.equal(fa, fb)
    a.square().sum().backward()
    b.square().sum().backward()
    for x, y in zip(rows, dense):
        assert torch.equal(x.grad.flatten(), y.grad.flatten()) and y.grad.shape == y.shape


def test_rows_without_a_batch_dimension():
    inputs = make(40, 1, 2, 16, 16)
    flat = [t[0].detach() for t in inputs]
    a, _ = gdn_kcp.chunk_gated_delta_rule(*inputs)
    b, none = gdn_kcp.chunk_gated_delta_rule(*flat)
    assert torch.equal(a[0], b) and none is None


@pytest.mark.parametrize("T,cu", [(0, [0]), (0, [0, 0]), (5, [0]), (5, [0, 0, 0])])
def test_no_tokens(T, cu):
    inputs = make(T, 1, 2, 16, 16)
    h0 = states(len(cu) - 1, 2, 16, 16).requires_grad_()
    o, final = gdn_kcp.chunk_gated_delta_rule(
        *inputs, initial_state=h0, output_final_state=True, cu_seqlens=torch.tensor(cu))
    assert o.shape == inputs[2].shape and torch.equal(final, h0)
    (o.sum() + final.square().sum()).backward()
    assert torch.equal(h0.grad, 2 * h0)
    assert all((t.grad == 0).all() for t in inputs)


@pytest.mark.cpu_only(reason="needs fp64")
@pytest.mark.parametrize("heads", [(1, 2)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_gradcheck(heads, norm, gate):
    """Finite differences through every option, also with a final state and an initial state."""
    H, HV = heads
    inputs = make(9, H, HV, 4, 3)
    h0 = torch.randn(2, HV, 4, 3, dtype=torch.float64).requires_grad_()
    cu = torch.tensor([0, 5, 9])
    extra = []
    if gate:
        extra = [torch.randn(HV, dtype=torch.float64).requires_grad_() for _ in range(2)]

    def f(q, k, v, g, beta, h0, *more):
        options = {}
        if more:
            options = dict(use_gate_in_kernel=True, A_log=more[0], dt_bias=more[1],
                           use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
        return gdn_kcp.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=h0, output_final_state=True, cu_seqlens=cu,
            use_qk_l2norm_in_kernel=norm, **options)

    assert torch.autograd.gradcheck(f, (*inputs, h0, *extra), atol=1e-6, rtol=1e-5)


@pytest.mark.cpu_only(reason="needs fp64")
@pytest.mark.parametrize("options", [
    dict(scale=0.7), dict(state_v_first=True), dict(use_beta_sigmoid_in_kernel=True),
    dict(use_gate_in_kernel=True, A_log=torch.tensor([0.3, -0.2], dtype=torch.float64)),
], ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("dense", [False, True])
def test_gradcheck_of_the_other_options(options, dense):
    """H == HV, slack rows, dense batches."""
    B, T, HV = (2, 4, 2) if dense else (1, 9, 2)
    inputs = [t.detach().reshape(B, T, *t.shape[2:]).requires_grad_()
              for t in make(B * T, HV, HV, 4, 3)]
    state = (3, 4) if options.get("state_v_first") else (4, 3)
    h0 = torch.randn(2, HV, *state, dtype=torch.float64).requires_grad_()
    cu = None if dense else torch.tensor([0, 5, 8])

    def f(q, k, v, g, beta, h0):
        return gdn_kcp.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=h0, output_final_state=True, cu_seqlens=cu, **options)

    assert torch.autograd.gradcheck(f, (*inputs, h0), atol=1e-6, rtol=1e-5)


def test_gates_that_forget_everything():
    """-inf and very strong decays: the tokens after them as if a new document began."""
    inputs = make(90, 1, 1, 16, 16)
    with torch.no_grad():
        inputs[3][:, 40] = float("-inf")
        inputs[3][:, 70] = -1e4
    o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs)
    cut, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor([0, 40, 70, 90]))
    assert_close("o", o, cut, 1e-12)
    grads = torch.autograd.grad(o.sum(), inputs)
    assert all(torch.isfinite(d).all() for d in grads)


def test_one_document_does_not_see_the_others():
    inputs = make(150, 2, 4, 32, 32, dtype=torch.float32, decay=1e-3)
    cu = torch.tensor([0, 70, 71, 150])
    do = torch.randn_like(inputs[2].detach())

    def run():
        o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=cu)
        return o, torch.autograd.grad(o, inputs, do)

    o, grads = run()
    with torch.no_grad():
        for t in inputs:
            t[:, 71:] *= 0.5
    changed, changed_grads = run()
    assert torch.equal(o[:, :71], changed[:, :71])
    assert not torch.equal(o[:, 71:], changed[:, 71:])
    assert all(torch.equal(a[:, :71], b[:, :71]) for a, b in zip(grads, changed_grads))


@pytest.mark.cpu_only(reason="fp64")
def test_narrow_initial_state_beside_fp64():
    inputs = make(20, 1, 2, 16, 16)
    h0 = torch.randn(1, 2, 16, 16).bfloat16()
    wide = gdn_kcp.chunk_gated_delta_rule(*inputs, initial_state=h0.double())[0]
    assert torch.equal(gdn_kcp.chunk_gated_delta_rule(*inputs, initial_state=h0)[0], wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_initial_state_is_widened(dtype):
    inputs = make(70, 1, 2, 16, 16, dtype=torch.float32)
    wide = states(1, 2, 16, 16).to(dtype).float().requires_grad_()
    h0 = wide.detach().to(dtype).requires_grad_()
    o, final = gdn_kcp.chunk_gated_delta_rule(*inputs, initial_state=h0, output_final_state=True)
    want, exact = gdn_kcp.chunk_gated_delta_rule(
        *inputs, initial_state=wide, output_final_state=True)
    assert final.dtype == torch.float32
    assert torch.equal(o, want) and torch.equal(final, exact)
    (d,) = torch.autograd.grad(o.sum() + final.sum(), h0)
    (d_wide,) = torch.autograd.grad(want.sum() + exact.sum(), wide)
    assert d.dtype == dtype and torch.equal(d, d_wide.to(dtype))


def digest_of_a_run() -> str:
    """Of the outputs and gradients of one fixed call."""
    torch.manual_seed(3)
    inputs = make(130, 2, 4, 64, 64, dtype=torch.bfloat16)
    o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor([0, 66, 130]))
    results = (o, *torch.autograd.grad(o, inputs, torch.ones_like(o)))
    data = b"".join(t.detach().cpu().view(torch.uint8).numpy().tobytes() for t in results)
    return hashlib.sha256(data).hexdigest()


def test_bitwise_repeatable(device):
    """100 runs, and a process of its own with another number of threads."""
    assert len({digest_of_a_run() for _ in range(100)}) == 1
    here = Path(__file__).resolve().parent
    code = (f"import reference as r; r.DEVICE, r.HEAD_DIM = {device!r}, {reference.HEAD_DIM}\n"
            "from test_chunk import digest_of_a_run; print(digest_of_a_run())")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path]),
           "GDN_NUM_THREADS": "3"}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert other.stdout.strip() == digest_of_a_run(), other.stderr


def test_offsets_refilled_in_place_are_seen():
    """Two packings in one buffer: each call, and each backward, uses what it was called with."""
    inputs = make(60, 1, 2, 16, 16)
    buffer = torch.tensor([0, 20, 60])
    first, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=buffer)
    buffer[1] = 50
    second, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=buffer)
    again, _ = gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor([0, 20, 60]))
    assert torch.equal(first, again) and not torch.equal(first, second)
    a = torch.autograd.grad(first.square().sum(), inputs)
    b = torch.autograd.grad(again.square().sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(a, b))
