"""Bad input: a typed error that names the argument, what was expected and what came."""

import inspect

import pytest
import torch
from reference import make

import gdn_kcp

InvalidArgument = gdn_kcp.InvalidArgumentError


def broken(change, **options):
    """A call with one of q, k, v, g, beta replaced."""
    inputs = dict(zip(("q", "k", "v", "g", "beta"), make(70, 2, 4, 16, 16, dtype=torch.float32)))
    inputs = {n: t.detach() for n, t in inputs.items()}
    for name, f in change.items():
        inputs[name] = f(inputs[name])
    return lambda: gdn_kcp.chunk_gated_delta_rule(**inputs, **options)


CASES = [
    (broken({"q": lambda t: t[0, 0]}), "q: expected 4 dimensions"),
    (broken({"q": lambda t: t.half()}), "q: expected bfloat16, float32 or float64, got Half"),
    (broken({"k": lambda t: t[:, :, :1]}), r"k: expected \[70, 2, 16\], got \[70, 1, 16\]"),
    (broken({"k": lambda t: t.double()}), "k: expected float32, got float64"),
    (broken({"k": lambda t: t[..., ::2].repeat(1, 1, 1, 1)}), "k: expected"),
    (broken({"v": lambda t: t[:, :, :3]}), "v: expected a multiple of q's 2 heads, got 3"),
    (broken({"v": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)}),
     "v: expected unit innermost stride"),
    (broken({"v": lambda t: t[:, :60]}), r"v: expected q's \[B, T\] = \[1, 70\], got \[1, 60\]"),
    (broken({"g": lambda t: t[..., :2]}), r"g: expected \[70, 4\], got \[70, 2\]"),
    (broken({"g": lambda t: t.half()}), "g: expected"),
    (broken({"g": lambda t: t[0]}), "g: expected 3 dimensions"),
    (broken({"beta": lambda t: t.long()}), "beta: expected"),
    (broken({"beta": lambda t: t.to("meta")}), "beta: expected a CPU or CUDA"),
    (broken({}, cu_seqlens=torch.tensor([0, 71])), "cu_seqlens: expected a last entry of at most T"),
    (broken({}, cu_seqlens=torch.tensor([0, 50, 40])), "cu_seqlens"),
    (broken({}, cu_seqlens=torch.tensor([1, 50])), "cu_seqlens"),
    (broken({}, cu_seqlens=torch.tensor([0.0, 50])), "cu_seqlens: expected one dimension of int"),
    (broken({}, cu_seqlens=[0, 50]), "cu_seqlens: expected a tensor, got list"),
    (broken({}, initial_state=torch.zeros(2, 4, 16, 16)), r"initial_state: expected \[1, 4, 16, 16\]"),
    (broken({}, initial_state=torch.zeros(4, 16, 16)), r"initial_state: expected \[N, HV, K, V\]"),
    (broken({}, initial_state=torch.zeros(1, 4, 16, 16).bfloat16()), "initial_state: expected float32"),
    (broken({}, use_gate_in_kernel=True), "A_log: expected"),
    (broken({}, A_log=torch.zeros(4)), "A_log, dt_bias: expected only with"),
    (broken({}, use_gate_in_kernel=True, A_log=torch.zeros(3)), r"A_log: expected \[4\], got \[3\]"),
    (broken({}, use_gate_in_kernel=True, A_log=torch.zeros(4), dt_bias=torch.zeros(1)),
     r"dt_bias: expected \[4\]"),
    (broken({}, allow_neg_eigval=True), "allow_neg_eigval: expected only with"),
    (broken({}, cp_context="ranks"), "cp_context: expected a gdn_kcp.Context, got str"),
    (broken({}, scale=float("nan")), "scale: expected a finite number"),
    (broken({"q": lambda t: t.tolist()}), "q: expected a tensor, got list"),
]


@pytest.mark.parametrize("call,message", CASES, ids=[m for _, m in CASES])
def test_the_argument_is_named(call, message):
    with pytest.raises(gdn_kcp.Error, match=message):
        call()
    broken({})()  # the next correct call works


def test_a_batch_with_offsets():
    inputs = [t.detach().reshape(2, 35, *t.shape[2:]) for t in make(70, 1, 2, 16, 16)]
    with pytest.raises(InvalidArgument, match="q: expected batch size 1 with cu_seqlens, got 2"):
        gdn_kcp.chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor([0, 35]))
    swapped = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs]
    with pytest.raises(InvalidArgument, match="q: expected the batch stride to be T = 35 times"):
        gdn_kcp.chunk_gated_delta_rule(*swapped)


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="head_first"):
        broken({}, head_first=True)()


def test_the_signature_is_the_fields():
    names = list(inspect.signature(gdn_kcp.chunk_gated_delta_rule).parameters)
    assert names == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
        "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context",
        "use_gate_in_kernel", "A_log", "dt_bias", "deterministic"]


def test_errors_have_types(monkeypatch):
    assert issubclass(InvalidArgument, ValueError) and issubclass(InvalidArgument, RuntimeError)
    assert issubclass(gdn_kcp.UnsupportedError, NotImplementedError)
    monkeypatch.setenv("GDN_BACKEND", "no-such-backend")
    with pytest.raises(InvalidArgument, match="backend: expected one of .*, got 'no-such-backend'"):
        gdn_kcp.chunk_gated_delta_rule(*make(11, 1, 1, 16, 16))
    monkeypatch.setenv("GDN_BACKEND", "cpu")
    with pytest.raises(gdn_kcp.UnsupportedError, match="cpu: takes head dims"):
        gdn_kcp.chunk_gated_delta_rule(*make(13, 1, 1, 6, 6))


def test_what_ran_is_told():
    names = [b.name for b in gdn_kcp.backends("cpu")]
    assert "reference" in names and gdn_kcp.is_supported("cpu")
    gdn_kcp.chunk_gated_delta_rule(*make(12, 1, 1, 16, 16))
    path = gdn_kcp.last_path()
    assert path.backend in names and path.description
