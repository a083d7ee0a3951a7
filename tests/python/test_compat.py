"""gdn_kcp.compat: transformers' models, FLA's dispatch, the names of the Blackwell package."""

import importlib
import os
import subprocess
import sys
import types

import pytest
import torch
from reference import make

import gdn_kcp
from gdn_kcp.compat import fla, flashinfer


def tiny_model(dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention"], num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=1)
    torch.manual_seed(0)
    return transformers.Qwen3NextForCausalLM(config).to(dtype).train()


def losses_and_gradients(model, tokens):
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    mixer = model.model.layers[0].linear_attn
    return loss.detach().double(), [p.grad.double() for p in mixer.parameters()]


@pytest.mark.parametrize("dtype,bar", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_transformers_model_has_the_same_loss_and_gradients(dtype, bar):
    pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from gdn_kcp.compat import transformers as compat

    model = tiny_model(dtype)
    tokens = torch.randint(0, 64, (2, 100))
    want, want_grads = losses_and_gradients(model, tokens)
    module = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]
    own = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn
    try:
        assert "qwen3_next" in compat.enable()
        assert module.torch_chunk_gated_delta_rule is not own[0]
        got, grads = losses_and_gradients(model, tokens)
        assert gdn_kcp.last_path().backend == "cpu"
    finally:
        compat.disable()
    assert (module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn) == own
    assert abs(got - want) / want < bar
    # Sums that nearly cancel (A_log's) carry the rounding of the model's largest gradient.
    largest = max(b.norm() for b in want_grads)
    for a, b in zip(grads, want_grads):
        assert (a - b).norm() <= bar * b.norm() + 1e-6 * largest


def stand_in_for_fla():
    """The part of fla.backends that compat.fla uses, by its documented names."""

    class BaseBackend:
        backend_type, priority = "base", 5

    class Registry:
        def __init__(self):
            self._backends = {}

    registry = Registry()

    def register(operation):
        assert operation == "gated_delta_rule"

        def add(cls):
            registry._backends[cls.backend_type] = cls()
            return cls

        return add

    module = types.ModuleType("fla.backends")
    module.BaseBackend, module.register = BaseBackend, register
    module._get_operation_registry = lambda operation: registry
    return module, registry


def test_fla_dispatch(monkeypatch):
    try:
        dispatch = importlib.import_module("fla.backends")
        registry = dispatch._get_operation_registry("gated_delta_rule")
    except Exception:  # not installed, or without what it needs on this machine
        dispatch, registry = stand_in_for_fla()
        monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
        monkeypatch.setitem(sys.modules, "fla.backends", dispatch)
        sys.modules["fla"].backends = dispatch
    fla.enable()
    backend = registry._backends["gdn_kcp"]
    assert backend.priority < 3
    inputs = make(50, 1, 2, 16, 16, dtype=torch.float32)
    assert backend.chunk_gated_delta_rule_verifier(*inputs) == (True, None)
    want, _ = gdn_kcp.chunk_gated_delta_rule(*inputs)
    for chunk_size in (16, 32, 64):
        assert backend.chunk_gated_delta_rule_verifier(*inputs, chunk_size=chunk_size) == (True, None)
        o, _ = backend.chunk_gated_delta_rule(*inputs, None, chunk_size=chunk_size)
        assert torch.equal(o, want)
    half = [t.half() for t in inputs]
    accepted, reason = backend.chunk_gated_delta_rule_verifier(*half)
    assert not accepted and reason.startswith("q: expected bfloat16, float32 or float64")
    accepted, reason = backend.chunk_gated_delta_rule_verifier(*inputs, chunk_size=128)
    assert not accepted and reason == "chunk_size: expected 16, 32 or 64, got 128"
    accepted, reason = backend.chunk_gated_delta_rule_verifier(*inputs, head_first=True)
    assert not accepted and "head_first" in reason
    fla.disable()
    assert "gdn_kcp" not in registry._backends


def test_fla_keeps_dtypes_that_a_gpu_does_not_take():
    assert fla.refused_dtype("cuda", torch.bfloat16) is None
    assert fla.refused_dtype("cpu", torch.float64) is None
    for dtype in (torch.float32, torch.float64):
        assert fla.refused_dtype("cuda", dtype) == f"q: expected bfloat16 on a GPU, got {dtype}"
    if torch.cuda.is_available():  # else there is no autocast for it
        with torch.autocast("cuda", torch.bfloat16):
            assert fla.refused_dtype("cuda", torch.float32) is None
            assert fla.refused_dtype("cuda", torch.float64) is not None


def test_fla_keeps_head_dims_that_no_padding_helps():
    for dims in ((60, 60), (64, 100), (128, 128), (1, 1)):
        assert fla.refused_dims("cuda", *dims) is None
    for dims in ((129, 64), (64, 256)):
        assert fla.refused_dims("cuda", *dims) == (
            "head dims: expected at most 128 on a GPU, got K = {}, V = {}".format(*dims))
        assert fla.refused_dims("cpu", *dims) is None


def test_fla_dispatch_of_other_head_dims(device):
    """The verifier takes what the operator does, on a GPU by padding."""
    wide = make(50, 1, 2, 128, 128, dtype=torch.float32)
    inputs = [t.detach()[..., :60].clone() for t in wide[:3]] + [t.detach() for t in wide[3:]]
    assert fla.refusal(*inputs) is None
    o, _ = gdn_kcp.chunk_gated_delta_rule(*inputs)
    assert o.shape == inputs[2].shape and torch.isfinite(o).all()
    large = [torch.nn.functional.pad(t, (0, 100)) for t in inputs[:3]] + inputs[3:]
    assert (fla.refusal(*large) is None) == (device == "cpu")


def test_a_missing_fla_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    for call in (fla.enable, fla.disable):
        with pytest.raises(gdn_kcp.MissingPackageError, match="fla: expected fla-core 0.6") as raised:
            call()
        assert all(isinstance(raised.value, kind) for kind in (gdn_kcp.Error, ImportError))


def test_what_an_installed_fla_misses_is_said(monkeypatch, tmp_path):
    (tmp_path / "fla" / "backends").mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    for code, message in (
        ("import no_such_module.language",
         "no_such_module: expected as fla-core needs (pip install no_such_module), got: No module named"),
        ("from fla import no_such_name", "fla: expected fla-core 0.6 (pip install fla-core), got: cannot"),
    ):
        (tmp_path / "fla" / "backends" / "__init__.py").write_text(code)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        with pytest.raises(gdn_kcp.MissingPackageError) as raised:
            fla.enable()
        assert str(raised.value).startswith(message)
        sys.modules.pop("fla", None)


def test_the_submodules_load_on_first_use():
    code = """
import sys, gdn_kcp
assert not [name for name in sys.modules if name.startswith("gdn_kcp.compat")]
for name in ("fla", "flashinfer", "transformers"):
    assert getattr(gdn_kcp.compat, name).__name__ == "gdn_kcp.compat." + name
assert not {"fla", "flashinfer", "transformers"} & set(sys.modules)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for module in (gdn_kcp, gdn_kcp.compat):
        with pytest.raises(AttributeError, match="no attribute 'no_such'"):
            module.no_such


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cu", [[0, 24], [0, 5, 24], [0, 6, 12, 13, 24], [0, 1, 23, 24]])
def test_fla_boundaries_become_whole_documents(layout, cu):
    W, T = 3, 24
    part = T // (W if layout == "contiguous" else 2 * W)

    def interval(place):
        a, b = place * part, (place + 1) * part
        inside = [c for c in cu if a < c < b]
        return place, a in cu, [0, *(c - a for c in inside), part]

    places = [[r] if layout == "contiguous" else [r, 2 * W - 1 - r] for r in range(W)]
    gathered = [[interval(p) for p in rank] for rank in places]
    assert fla.global_cu_seqlens(gathered) == cu


@pytest.mark.parametrize("X", ["det", "nondet"])
def test_the_blackwell_names(X):
    def f(name):
        return getattr(flashinfer, name.replace("X", X))

    partition = f("cake_gdn_X_train_kcp_partition")([0, 30, 70], 1)
    ctx = f("cake_gdn_X_train_kcp_build_context")(partition, None, 0, "cpu", sm_count=None)
    inputs = make(70, 2, 4, 16, 16)
    want = gdn_kcp.chunk_gdn_kcp(*inputs, ctx, scale=0.5)
    assert torch.equal(f("cake_gdn_X_kcp")(*inputs, ctx, scale=0.5, layout="tma"), want)
    plain = [t.detach() for t in inputs]
    o, saved = f("cake_gdn_X_train_kcp_forward")(*plain, ctx, scale=0.5)
    grads = f("cake_gdn_X_train_kcp_backward")(
        *plain, ctx, torch.ones_like(o), saved=saved, scale=0.5)
    wanted = torch.autograd.grad(want.sum(), inputs)
    assert torch.equal(o, want) and all(torch.equal(a, b) for a, b in zip(grads, wanted))
    row = torch.randn(1, 70, 8 * 16)
    q, _, v = f("cake_gdn_X_train_kcp_packed_qkv_views")(row, H_qk=2, HV=4)
    assert q.shape[2] == 2 and v.shape[2] == 4
    sizes = dict(H_qk=2, HV=4)
    assert f("cake_gdn_X_train_kcp_workspace_bytes")(ctx, save_mode="light", **sizes) > 0
    assert f("cake_gdn_X_train_kcp_saved_bytes")(ctx, **sizes) >= 0
    assert f("cake_gdn_X_train_kcp_comm_bytes")(ctx, **sizes) == 0
    assert f("is_cake_gdn_X_train_kcp_supported")("cpu")
    with pytest.raises(gdn_kcp.UnsupportedError, match="transfer_walk: expected its default"):
        f("cake_gdn_X_kcp")(*inputs, ctx, transfer_walk="fp32")
    with pytest.raises(gdn_kcp.UnsupportedError, match="save_mode: expected 'light' or 'light_akk'"):
        f("cake_gdn_X_kcp")(*inputs, ctx, save_mode="full")
    with pytest.raises(TypeError, match="no_such"):
        f("cake_gdn_X_kcp")(*inputs, ctx, no_such=1)


@pytest.mark.parametrize("X", ["det", "nondet"])
def test_the_blackwell_save_modes(X):
    def f(name):
        return getattr(flashinfer, name.replace("X", X))

    ctx = gdn_kcp.build_context(gdn_kcp.partition([0, 30, 70], 1), None, 0, "cpu")
    inputs = make(70, 2, 4, 16, 16)
    want = gdn_kcp.chunk_gdn_kcp(*inputs, ctx)
    assert torch.equal(f("cake_gdn_X_kcp")(*inputs, ctx, save_mode="light_akk"), want)
    sizes = dict(H_qk=2, HV=4)
    for query in ("saved", "workspace"):
        query = f(f"cake_gdn_X_train_kcp_{query}_bytes")
        assert query(ctx, save_mode="light_akk", **sizes) != query(ctx, **sizes)
    plain = [t.detach() for t in inputs]
    o, saved = f("cake_gdn_X_train_kcp_forward")(*plain, ctx, save_mode="light_akk")
    wanted = torch.autograd.grad(want.sum(), inputs)
    backward = f("cake_gdn_X_train_kcp_backward")
    for given in ({}, {"save_mode": "light_akk"}):
        grads = backward(*plain, ctx, torch.ones_like(o), saved=saved, **given)
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted))
    with pytest.raises(gdn_kcp.UnsupportedError, match="save_mode: expected 'light_akk', as in"):
        backward(*plain, ctx, torch.ones_like(o), saved=saved, save_mode="light")


def test_earlier_names():
    assert flashinfer.chunk_gdn_kcp is flashinfer.cake_gdn_nondet_kcp
    assert flashinfer.packed_qkv_views_det_kcp is (
        flashinfer.cake_gdn_det_train_kcp_packed_qkv_views)
