"""The recurrence token by token in fp64 torch operations, inputs by recipe, and the error metric.

On a GPU (conftest's `device`) the recipes give what its kernels take: bf16 rows, fp32 gates and
states, one head dim; and the bars are those of bf16.
"""

import torch

DEVICE = "cpu"  # where the recipes put their tensors; set by conftest's `device`
HEAD_DIM = 128  # on a GPU: 64 or 128


def on_gpu() -> bool:
    return DEVICE != "cpu"


def dims(K, V):
    """The head dims that a test for (K, V) has here."""
    return (HEAD_DIM, HEAD_DIM) if on_gpu() else (K, V)


def states(N, HV, K, V, scale=1.0):
    """Random states [N, HV, K, V]: fp64, or fp32 on a GPU."""
    dtype = torch.float32 if on_gpu() else torch.float64
    return (scale * torch.randn(N, HV, *dims(K, V))).to(DEVICE, dtype)


def gates(*shape):
    """Random raw gates, or per-head parameters: fp64, or fp32 on a GPU."""
    return torch.randn(*shape).to(DEVICE, torch.float32 if on_gpu() else torch.float64)


def placed(*tensors, dtype=None):
    """Copies on the device under test, floating ones in `dtype`."""
    moved = [t.detach().to(DEVICE, dtype if t.is_floating_point() else None) for t in tensors]
    return moved if len(moved) > 1 else moved[0]


def recurrence(q, k, v, g, beta, cu, *, scale=None, norm=False, h0=None, A_log=None, dt_bias=None,
               sigmoid=False, neg=False):
    """(o, final states) of [T, H, K] and [T, HV, V] rows; differentiable."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    if norm:
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    if A_log is not None:
        bias = 0 if dt_bias is None else dt_bias.double()
        g = -A_log.double().exp() * torch.nn.functional.softplus(g + bias)
    if sigmoid:
        beta = torch.sigmoid(beta) * (2 if neg else 1)
    repeat = v.shape[1] // q.shape[1]
    q, k = (t.repeat_interleave(repeat, 1) for t in (q, k))
    dim_k = q.shape[-1]
    scale = dim_k ** -0.5 if scale is None else scale
    # Rows apart before the loop: indexing inside it would make T gradients of all T rows.
    q, k, v_rows, decay, beta = (t.unbind(0) for t in (q, k, v, g.exp(), beta))
    outs, states = [], []
    for i in range(len(cu) - 1):
        s = v.new_zeros(v.shape[1], dim_k, v.shape[-1]) if h0 is None else h0[i].double()
        for t in range(int(cu[i]), int(cu[i + 1])):
            s = s * decay[t][:, None, None]
            u = beta[t][:, None] * (v_rows[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t][:, :, None] * u[:, None, :]
            outs.append(scale * torch.einsum("hkv,hk->hv", s, q[t]))
        states.append(s)
    outs += [v.new_zeros(v.shape[1:])] * (v.shape[0] - int(cu[-1]))
    o = torch.stack(outs) if outs else v.new_zeros(v.shape)
    final = torch.stack(states) if states else None
    return o, final


def make(T, H, HV, K, V, *, dtype=torch.float64, gates=None, decay=1.0):
    """Leaves q, k, v, g, beta of [1, T, ..]; k has unit rows."""
    K, V = dims(K, V)
    if on_gpu():
        dtype = torch.bfloat16
    gates = gates or (torch.float64 if dtype == torch.float64 else torch.float32)
    rows = dict(dtype=torch.float64)
    q = torch.randn(1, T, H, K, **rows)
    k = torch.nn.functional.normalize(torch.randn(1, T, H, K, **rows), dim=-1)
    v = torch.randn(1, T, HV, V, **rows)
    g = decay * torch.nn.functional.logsigmoid(torch.randn(1, T, HV, **rows))
    beta = torch.rand(1, T, HV, **rows)
    leaves = [t.to(DEVICE, dtype) for t in (q, k, v)] + [t.to(DEVICE, gates) for t in (g, beta)]
    return [t.requires_grad_() for t in leaves]


def error(x, ref, least=0.0) -> float:
    """||x - ref|| / max(||ref||, least); inf where x is not finite. What of ref lies under 1,000 times
    the smallest normal number of x's dtype counts as 0: a decay that is no normal number is 0 there,
    also where operands of up to 1,000 multiply it."""
    tiny = 1000 * torch.finfo(x.dtype).tiny
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    if not torch.isfinite(x).all():
        return float("inf")
    ref = torch.where(ref.abs() < tiny, 0.0, ref)
    norm = max(float(ref.norm()), least)
    return float((x - ref).norm()) / (norm or 1.0)


HEAD_AXIS = {
    "o": -2, "dq": -2, "dk": -2, "dv": -2, "dg": -1, "dbeta": -1, "final_state": -3,
    "dinitial_state": -3,
}


def bar_on_gpu(name, ordinary) -> float:
    """Of bf16 operands (docs/accuracy.md). What is no result of the operator, and what inputs that are
    not ordinary give: the contract's 1e-2."""
    of = name.split()[-1]
    if not ordinary:
        return 1e-2
    return {"o": 5e-3, "final_state": 5e-3}.get(of, 6e-3 if of in GRADIENTS else 1e-2)


MAX_BAR_ON_GPU = 2e-2  # of the largest error, as a share of the largest value
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dinitial_state")


def assert_within(name, x, ref, bar):
    """Over the whole tensor, and for the heads one by one, at four times the bar, where the name's last
    word has them. On a GPU also the largest error, and a head of little is judged as one that has a
    tenth of the tensor's root mean square (docs/accuracy.md, Parts)."""
    assert x.shape == ref.shape, (name, x.shape, ref.shape)
    worst = error(x, ref)
    assert worst <= bar, f"{name}: relative error {worst:.2e} above {bar:.0e}"
    least = 0.0  # of a head's norm
    if x.is_cuda and ref.numel() > 0:
        exact = ref.detach().double().cpu()
        most = float((x.detach().double().cpu() - exact).abs().max())
        limit = max(MAX_BAR_ON_GPU * float(exact.abs().max()), 1000 * torch.finfo(x.dtype).tiny)
        assert most <= limit, f"{name}: largest error {most:.2e} above {limit:.2e}"
        least = 0.1 * float(exact.norm())
    axis = HEAD_AXIS.get(name.split()[-1])
    if axis is not None:
        for h in range(ref.shape[axis]):
            one = error(x.select(axis, h), ref.select(axis, h), least / ref.shape[axis] ** 0.5)
            assert one <= 4 * bar, f"{name}, head {h}: relative error {one:.2e} above {4 * bar:.0e}"


def assert_close(name, x, ref, bar, ordinary=True):
    """`assert_within`, on a GPU at its bars if those are above `bar`."""
    assert_within(name, x, ref, max(bar, bar_on_gpu(name, ordinary)) if x.is_cuda else bar)


BARS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 6e-3}
