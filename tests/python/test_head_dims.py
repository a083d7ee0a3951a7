"""Head dims that the CUDA kernels lack, padded with zeros: the rule, and on CPU tensors that nothing
changes by it."""

from types import SimpleNamespace

import pytest
import torch
from reference import BARS, assert_within, make, states
from test_chunk import check

import gdn_kcp
from gdn_kcp import head_dims
from gdn_kcp.head_dims import Padding, padded_dim, padding_of

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
CU = [0, 3, 3, 70, 140]
ROWS = 150  # slack past the last document


@pytest.mark.parametrize("dims,to", [
    ((64, 64), None), ((128, 128), None),  # taken as they are
    ((60, 60), 64), ((1, 64), 64), ((64, 1), 64), ((100, 100), 128), ((65, 64), 128),
    ((64, 100), 128), ((128, 64), 128), ((127, 1), 128),
    ((129, 64), None), ((64, 129), None), ((256, 256), None),  # refused by the kernels
    ((0, 64), None), ((64, 0), None),
])
def test_the_rule(dims, to):
    assert padded_dim(*dims) == to


def test_only_bf16_on_a_gpu_is_padded():
    def rows(dim, dtype=torch.bfloat16, is_cuda=True, heads=(1, 70, 2)):
        return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=torch.Size((*heads, dim)))

    assert padding_of(rows(60), rows(100)) == Padding(60, 100, 128)
    assert padding_of(rows(60, heads=(70, 2)), rows(60, heads=(70, 2))) == Padding(60, 60, 64)
    assert padding_of(rows(128), rows(128)) is None
    assert padding_of(rows(160), rows(160)) is None
    assert padding_of(rows(60, torch.float32), rows(60, torch.float32)) is None
    assert padding_of(rows(60, is_cuda=False), rows(60, is_cuda=False)) is None
    assert padding_of(SimpleNamespace(is_cuda=True, shape=torch.Size()), rows(60)) is None
    assert padding_of(torch.empty(1, 2, 1, 60), torch.empty(1, 2, 1, 60)) is None


@pytest.fixture
def padded(monkeypatch):
    """Has calls on CPU tensors padded as on a GPU, of any dtype, while it is on."""

    def of(q, v):
        to = padded_dim(q.shape[-1], v.shape[-1])
        return None if to is None else Padding(q.shape[-1], v.shape[-1], to)

    def run(call, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(head_dims, "padding_of", of)
            return call(*args, **options)

    return run


def results(inputs, h0, **options):
    """o, final states and all gradients."""
    torch.manual_seed(1)
    o, final = gdn_kcp.chunk_gated_delta_rule(
        *inputs, initial_state=h0, output_final_state=True, **options)
    seeds = torch.randn_like(o), torch.randn_like(final)
    return [t.detach() for t in (o, final)] + list(
        torch.autograd.grad((o, final), (*inputs, h0), seeds))


def assert_same(got, want):
    for name, a, b in zip(NAMES, got, want):
        assert a.is_contiguous() and a.dtype == b.dtype
        assert_within(name, a, b, 1e-12)


def leaf_states(N, HV, K, V, state_v_first=False):
    return states(N, HV, *((V, K) if state_v_first else (K, V))).requires_grad_()


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 3)])
@pytest.mark.parametrize("K,V,to", [(60, 60, 64), (64, 100, 128), (100, 30, 128)])
def test_padding_changes_nothing(K, V, to, heads, norm, state_v_first, padded):
    H, HV = heads
    inputs = make(ROWS, H, HV, K, V)
    h0 = leaf_states(len(CU) - 1, HV, K, V, state_v_first)
    options = dict(cu_seqlens=torch.tensor(CU), use_qk_l2norm_in_kernel=norm,
                   state_v_first=state_v_first)
    want = results(inputs, h0, **options)
    assert gdn_kcp.last_path().padding is None
    assert_same(padded(results, inputs, h0, **options), want)
    assert gdn_kcp.last_path().padding == Padding(K, V, to)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("form", ["dense", "no batch", "no tokens", "strided"])
def test_padding_of_other_forms(form, scale, padded):
    B, T = {"dense": (3, 25), "no tokens": (1, 0)}.get(form, (1, 75))
    inputs = [t.detach().reshape(B, T, *t.shape[2:]) for t in make(B * T, 2, 4, 60, 20)]
    if form == "no batch":
        inputs = [t[0] for t in inputs]
    inputs = [t.requires_grad_() for t in inputs]
    h0 = leaf_states(B, 4, 60, 20)
    if form == "strided":
        row = torch.randn(1, T, 2 * 120 + 80, dtype=torch.float64).requires_grad_()
        views = row.split([120, 120, 80], -1)
        inputs[:3] = [t.unflatten(-1, (h, -1)) for t, h in zip(views, (2, 2, 4))]
    want = results(inputs, h0, scale=scale)
    assert_same(padded(results, inputs, h0, scale=scale), want)


def test_padding_of_activations_in_the_kernel(padded):
    HV = 4
    inputs = make(ROWS, 2, HV, 60, 50)
    h0 = leaf_states(len(CU) - 1, HV, 60, 50)
    A_log, dt_bias = (torch.randn(HV, dtype=torch.float64) for _ in range(2))
    options = dict(
        cu_seqlens=torch.tensor(CU), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    assert_same(padded(results, inputs, h0, **options), results(inputs, h0, **options))


def test_rows_past_the_last_document_are_not_read(padded):
    inputs = make(ROWS, 1, 2, 60, 50)
    h0 = leaf_states(len(CU) - 1, 2, 60, 50)
    with torch.no_grad():
        for t in inputs:
            t[:, CU[-1]:] = float("nan")
    cu = torch.tensor(CU)
    assert_same(padded(results, inputs, h0, cu_seqlens=cu), results(inputs, h0, cu_seqlens=cu))


def test_without_states_and_without_gradients(padded):
    inputs = [t.detach() for t in make(ROWS, 2, 4, 60, 50)]
    want, _ = gdn_kcp.chunk_gated_delta_rule(*inputs)
    got, none = padded(gdn_kcp.chunk_gated_delta_rule, *inputs)
    assert none is None and got.is_contiguous()
    assert_within("o", got, want, 1e-12)


def test_the_output_is_of_bf16_as_v(padded):
    inputs = make(ROWS, 2, 4, 60, 50, dtype=torch.bfloat16)
    o, final = padded(gdn_kcp.chunk_gated_delta_rule, *inputs, output_final_state=True)
    assert o.dtype == torch.bfloat16 and o.shape == inputs[2].shape
    assert final.dtype == torch.float32 and final.shape == (1, 4, 60, 50)


def test_the_last_path_tells_of_padding(padded):
    inputs, plain = make(70, 1, 2, 60, 60), make(70, 1, 2, 16, 16)
    call = gdn_kcp.chunk_gated_delta_rule
    o, _ = padded(call, *inputs)
    padding = gdn_kcp.last_path().padding
    assert padding == Padding(60, 60, 64) and f"{padding}" == "K = 60, V = 60 padded with zeros to 64"
    call(*plain)
    assert gdn_kcp.last_path().padding is None
    o.sum().backward()  # of the padded forward
    assert gdn_kcp.last_path().padding == padding
    gdn_kcp.chunk_gdn_kcp(*plain, gdn_kcp.build_context(gdn_kcp.partition([0, 70], 1), None, 0, "cpu"))
    assert gdn_kcp.last_path().padding is None


@pytest.mark.parametrize("change,message", [
    (dict(k=torch.zeros(1, 70, 2, 64)), r"k: expected q's head dim 60, got shape \[1, 70, 2, 64\]"),
    (dict(k=torch.zeros(())), r"k: expected q's head dim 60, got shape \[\]"),
    (dict(k=torch.zeros(1, 70, 1, 60)),
     r"k: expected .*, got .* \(K = 60, V = 30 padded with zeros to 64\)"),
    (dict(initial_state=torch.zeros(1, 4, 64, 64)),
     r"initial_state: expected last two dimensions \[60, 30\], got shape \[1, 4, 64, 64\]"),
    (dict(initial_state=torch.zeros(1, 4, 60, 30), state_v_first=True),
     r"initial_state: expected last two dimensions \[30, 60\], got shape \[1, 4, 60, 30\]"),
    (dict(initial_state=torch.zeros(60, 30)), r"initial_state: expected \[N, HV, K, V\]"),
])
def test_what_padding_would_hide_is_refused(change, message, padded):
    names = ("q", "k", "v", "g", "beta")
    given = dict(zip(names, (t.detach() for t in make(70, 2, 4, 60, 30, dtype=torch.float32))))
    with pytest.raises(gdn_kcp.InvalidArgumentError, match=message):
        padded(gdn_kcp.chunk_gated_delta_rule, **{**given, **change})
    padded(gdn_kcp.chunk_gated_delta_rule, **given)  # the next correct call works


def test_padding_over_ranks(padded):
    """Each rank pads its rows; with states of documents, as one rank without padding."""
    cu, HV = [0, 40, 64, 150], 2
    inputs = [t.detach() for t in make(cu[-1], 1, HV, 60, 50)]
    h0 = states(len(cu) - 1, HV, 60, 50)
    options = dict(initial_state=h0, output_final_state=True)
    want, want_final = gdn_kcp.chunk_gated_delta_rule(
        *inputs, cu_seqlens=torch.tensor(cu), **options)
    partition, group = gdn_kcp.partition(cu, 2), gdn_kcp.InProcessGroup(2)

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, "cpu")
        rows = partition.token_indices(rank)
        o, final = gdn_kcp.chunk_gated_delta_rule(
            *(t[:, rows] for t in inputs), cp_context=ctx, **options)
        return rows, o, final

    parts = padded(group.run, main)
    o = torch.zeros_like(want)
    for rows, part, _ in parts:
        o[:, rows] = part
    assert_within("o", o, want, 1e-11)
    whole = [0, 2]  # documents that one rank holds alone or ends
    assert parts[0][2].shape == want_final.shape
    assert_within("final_state", sum(final for *_, final in parts)[whole], want_final[whole], 1e-11)


def test_a_traced_call_is_padded(padded):
    inputs = make(90, 1, 2, 60, 50)
    cu = torch.tensor([0, 40, 90])

    def call(*rows):
        return gdn_kcp.chunk_gated_delta_rule(
            *rows, cu_seqlens=cu, output_final_state=True, use_qk_l2norm_in_kernel=True)

    graphs = []

    def eager(graph, _):
        graphs.append(graph.code)
        return graph

    want = [t.detach() for t in call(*inputs)]
    got = padded(torch.compile(call, backend=eager, fullgraph=True, dynamic=False), *inputs)
    assert len(graphs) == 1 and "pad(" in graphs[0]
    for name, a, b in zip(NAMES, got, want):
        assert_within(name, a.detach(), b, 1e-12)
    grads = torch.autograd.grad(got[0].sum(), inputs)
    for name, d, r in zip(NAMES[2:], grads, torch.autograd.grad(call(*inputs)[0].sum(), inputs)):
        assert_within(name, d, r, 1e-12)


@pytest.mark.parametrize("options", [{}, dict(use_qk_l2norm_in_kernel=True, scale=0.2)],
                         ids=["pre-norm", "norm"])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("K,V,to", [
    (60, 60, 64), (100, 100, 128), (64, 100, 128), (128, 64, 128), (30, 64, 64)])
def test_against_the_recurrence(K, V, to, state_v_first, options, device):
    """On a GPU by padding, on a CPU as it is."""
    wide = make(ROWS, 2, 4, 128, 128)  # the GPU's dtypes
    inputs = [t.detach()[..., :dim].clone().requires_grad_()
              for t, dim in zip(wide, (K, K, V, 4, 4))]
    h0 = states(len(CU) - 1, 4, 128, 128, 0.1)[..., :K, :V].clone().requires_grad_()
    check(inputs, CU, BARS[torch.float64], h0=h0, state_v_first=state_v_first, **options)
    padding = gdn_kcp.last_path().padding
    assert padding == (Padding(K, V, to) if device == "cuda" else None)
