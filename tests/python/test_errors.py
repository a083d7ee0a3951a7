"""Bad input: a typed error that names the argument, what was expected and what came."""

import inspect
import os
import subprocess
import sys

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
    (broken({"q": lambda t: t.half()}), "q: expected bfloat16, float32 or float64, got float16"),
    (broken({"k": lambda t: t[:, :, :1]}), r"k: expected \[T=70, H=2, K=16\], got \[70, 1, 16\]"),
    (broken({"k": lambda t: t.double()}), "k: expected float32, as q, got float64"),
    (broken({"k": lambda t: t[..., ::2].repeat(1, 1, 1, 1)}), "k: expected"),
    (broken({"v": lambda t: t[:, :, :3]}),
     r"v: expected HV to be a multiple of H=2 \(of q and k\), got HV=3"),
    (broken({"v": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)}),
     "v: expected unit innermost stride"),
    (broken({"v": lambda t: t[:, :60]}), r"v: expected q's \[B, T\] = \[1, 70\], got \[1, 60\]"),
    (broken({"g": lambda t: t[..., :2]}), r"g: expected \[T=70, HV=4\], got \[70, 2\]"),
    (broken({"g": lambda t: t.half()}), "g: expected"),
    (broken({"g": lambda t: t[0]}), "g: expected 3 dimensions"),
    (broken({"beta": lambda t: t.long()}), "beta: expected"),
    (broken({"beta": lambda t: t.bool()}), "beta: expected bfloat16, .*, got bool"),
    (broken({"beta": lambda t: t.to("meta")}), "beta: expected a CPU or CUDA"),
    (broken({}, cu_seqlens=torch.tensor([0, 71])), "cu_seqlens: expected a last entry of at most T"),
    (broken({}, cu_seqlens=torch.tensor([0, 50, 40])), "cu_seqlens"),
    (broken({}, cu_seqlens=torch.tensor([1, 50])), "cu_seqlens"),
    (broken({}, cu_seqlens=torch.tensor([0.0, 50])), "cu_seqlens: expected one dimension of int"),
    *((broken({}, cu_seqlens=torch.tensor([0, 1]).to(dtype)),
       rf"cu_seqlens: expected one dimension of int32 or int64, got {name} \[2\]$")
      for dtype, name in ((torch.bool, "bool"), (torch.int16, "int16"), (torch.float32, "float32"))),
    (broken({}, cu_seqlens=torch.zeros(1, 1, 1, 1, 2).long()),
     r"cu_seqlens: expected one dimension of int32 or int64, got int64 \[1, 1, 1, 1, 2\]$"),
    (broken({}, cu_seqlens=[0, 50]), "cu_seqlens: expected a tensor, got list"),
    (broken({}, initial_state=torch.zeros(2, 4, 16, 16)),
     r"initial_state: expected \[N=1, HV=4, K=16, V=16\], got \[2, 4"),
    (broken({}, initial_state=torch.zeros(4, 16, 16)), r"initial_state: expected \[N, HV, K, V\]"),
    (broken({}, initial_state=torch.zeros(1, 4, 16, 16).double()), "initial_state: expected float32"),
    (broken({}, use_gate_in_kernel=True), "A_log: expected"),
    (broken({}, A_log=torch.zeros(4)), "A_log, dt_bias: expected only with"),
    (broken({}, use_gate_in_kernel=True, A_log=torch.zeros(3)),
     r"A_log: expected \[HV=4\], got \[3\]"),
    (broken({}, use_gate_in_kernel=True, A_log=torch.zeros(4), dt_bias=torch.zeros(1)),
     r"dt_bias: expected \[HV=4\], got \[1\]"),
    (broken({}, allow_neg_eigval=True), "allow_neg_eigval: expected only with"),
    (broken({}, cp_context="ranks"), "cp_context: expected a gdn_kcp.Context, got str"),
    (broken({}, scale=float("nan")), "scale: expected a finite number"),
    (broken({"q": lambda t: t.tolist()}), "q: expected a tensor, got list"),
    (broken({}, scale="a"), "scale: expected float or None, got str"),
    (broken({}, output_final_state="x"), "output_final_state: expected bool, got str"),
    (broken({}, deterministic="yes"), "deterministic: expected None, True or False, got 'yes'"),
    *((broken({}, chunk_size=size), f"chunk_size: expected 16, 32 or 64, got {size!r}")
      for size in (0, 48, 128, None, "64")),
    (broken({}, initial_state=[1]), "initial_state: expected a tensor, got list"),
    (broken({}, use_gate_in_kernel=True, A_log=3), "A_log: expected a tensor, got int"),
    (broken({}, cu_seqlens_cpu=[0, 70]), "cu_seqlens_cpu: expected a tensor, got list"),
    (broken({}, cu_seqlens=torch.tensor([0, 70]), cu_seqlens_cpu=torch.tensor([0, 30, 70])),
     "cu_seqlens_cpu: expected a copy of cu_seqlens"),
    (broken({}, cu_seqlens=torch.tensor([0, 70]), cu_seqlens_cpu=torch.tensor([0, 60])),
     "cu_seqlens_cpu: expected a copy of cu_seqlens"),
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
        "use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "deterministic"]


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


def context(T=70):
    return gdn_kcp.build_context(gdn_kcp.partition([0, T], 1), None, 0, "cpu")


def operands():
    return [t.detach() for t in make(70, 2, 4, 16, 16, dtype=torch.float32)]


OTHERS = [
    (lambda x: gdn_kcp.chunk_gdn_kcp(x[0].tolist(), *x[1:], context()), "q: expected a tensor"),
    (lambda x: gdn_kcp.chunk_gdn_kcp(*x, 3), "ctx: expected a gdn_kcp.Context, got int"),
    (lambda x: gdn_kcp.chunk_gdn_kcp(*x, context(), scale="a"), "scale: expected"),
    (lambda x: gdn_kcp.chunk_gdn_kcp(*x, context(), workspace=3), "workspace: expected a gdn_kcp"),
    (lambda x: gdn_kcp.chunk_gdn_kcp(*x, context(), recompute_handle=3), "recompute_handle: expec"),
    (lambda x: gdn_kcp.chunk_gdn_kcp(*x, context(), deterministic=1), "deterministic: expected"),
    (lambda x: gdn_kcp.chunk_gdn_kcp(*x, context(), save_mode="all"), "save_mode: expected"),
    (lambda x: gdn_kcp.chunk_gdn_kcp(*x, context(), exchange="mail"), "exchange: expected one of"),
    (lambda x: gdn_kcp.chunk_gdn_kcp_backward(*x, context(), 3), "do: expected"),
    (lambda x: gdn_kcp.chunk_gdn_kcp_backward(*x, context(), x[2], saved=3), "saved: expected what"),
    (lambda x: gdn_kcp.chunk_gated_delta_rule(
        *x, cp_context=context(), cu_seqlens=torch.tensor([0, 10, 70])),
     "cu_seqlens: expected none beside cp_context, or its own"),
    (lambda x: gdn_kcp.causal_conv1d([0], torch.zeros(3, 4)), "x: expected a tensor, got list"),
    (lambda x: gdn_kcp.causal_conv1d(torch.zeros(1, 4, 3), None), "weight: expected a tensor"),
    (lambda x: gdn_kcp.causal_conv1d(torch.zeros(1, 4, 3), torch.zeros(3, 4), cp_context=1),
     "cp_context: expected a gdn_kcp.Context, got int"),
    (lambda x: gdn_kcp.packed_qkv_views([1], H_qk=1, HV=1), "qkv: expected a tensor, got list"),
    (lambda x: gdn_kcp.build_context(gdn_kcp.partition([0, 70], 1), None, 0, "moon"),
     "device: expected cpu or cuda, got 'moon'"),
    (lambda x: gdn_kcp.build_context(gdn_kcp.partition([0, 70], 1), None, 3, "cpu"),
     "rank: expected 0"),
    *((lambda x, rank=rank: gdn_kcp.build_context(
        gdn_kcp.partition([0, 70], 2), gdn_kcp.InProcessGroup(2), rank, "cpu"),
       f"rank: expected 0 to 1, got {rank!r}$") for rank in (2, -1, "a", 0.5, None)),
    (lambda x: gdn_kcp.build_context(gdn_kcp.partition([0, 70], 1), None, "0", "cpu"),
     "rank: expected 0, as in the group, got '0'"),
    *((lambda x, nbytes=nbytes: gdn_kcp.Workspace(nbytes),
       f"nbytes: expected an integer of 64 bits, got {nbytes!r}$") for nbytes in (1.5, "a", 1 << 63)),
    (lambda x: gdn_kcp.Workspace(-1), "nbytes: expected at least 0, got -1"),
    (lambda x: gdn_kcp.backends("moon"), "device: expected cpu or cuda, got 'moon'"),
]


@pytest.mark.parametrize("call,message", OTHERS, ids=[m for _, m in OTHERS])
def test_other_calls_name_the_argument_too(call, message):
    with pytest.raises(gdn_kcp.Error, match=message):
        call(operands())


def test_offsets_of_the_context_may_come_beside_it():
    x, ctx = operands(), context()
    own = gdn_kcp.chunk_gated_delta_rule(*x, cp_context=ctx, cu_seqlens=torch.tensor([0, 70]))[0]
    assert torch.equal(own, gdn_kcp.chunk_gated_delta_rule(*x, cp_context=ctx)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is asked")
def test_a_missing_gpu_is_said():
    assert not gdn_kcp.is_supported("cuda")
    with pytest.raises(gdn_kcp.UnsupportedError, match="device: expected cpu, or a GPU"):
        gdn_kcp.build_context(gdn_kcp.partition([0, 70], 1), None, 0, "cuda")


def test_a_bad_thread_count_is_an_error():
    code = """
import torch, gdn_kcp
x = torch.randn(1, 4, 1, 16)
try:
    gdn_kcp.chunk_gated_delta_rule(x, x, x, -torch.rand(1, 4, 1), torch.rand(1, 4, 1))
except gdn_kcp.InvalidArgumentError as error:
    print(error)
"""
    env = {**os.environ, "GDN_NUM_THREADS": "many", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "GDN_NUM_THREADS: expected a number from 1 to 1024, got 'many'\n", done


def test_errors_found_before_a_call_reach_all_ranks():
    """Wrong types and options, on one rank alone; the next correct call works."""
    partition = gdn_kcp.partition([0, 70], 2)
    group = gdn_kcp.InProcessGroup(2, timeout=60)
    wrong = [
        ("q", {}), (None, {"save_mode": "all"}), (None, {"deterministic": 2}),
        (None, {"workspace": 7}), (None, {"recompute_handle": "used"}),
    ]

    def main(rank):
        ctx = gdn_kcp.build_context(partition, group, rank, "cpu")
        rows = partition.token_indices(rank)
        x = [t[:, rows] for t in operands()]
        used = gdn_kcp.RecomputeHandle()
        for _ in range(2):
            gdn_kcp.chunk_gdn_kcp(*x, ctx, recompute_handle=used)
        messages = []
        for name, options in wrong:
            bad, options = list(x), dict(options) if rank == 1 else {}
            if rank == 1 and name:
                bad[0] = 3
            if "recompute_handle" in options:
                options["recompute_handle"] = used
            with pytest.raises(InvalidArgument) as raised:
                gdn_kcp.chunk_gdn_kcp(*bad, ctx, **options)
            messages.append(str(raised.value))
        gdn_kcp.chunk_gdn_kcp(*x, ctx)
        return messages

    first, second = group.run(main)
    assert first == second and all(message.startswith("rank 1: ") for message in first)
