"""opcheck of the functional ops, and torch.compile of a block without a graph break."""

import pytest
import torch
from reference import assert_close, dims, make, on_gpu

import gdn_kcp

CU = torch.tensor([0, 40, 90])
pytestmark = pytest.mark.usefixtures("device")
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.cpu_only(reason="its inputs are fp64")
@pytest.mark.parametrize("case", ["plain", "documents", "all"])
def test_opcheck_chunk(case):
    inputs = make(90, 1, 2, 16, 32)
    h0 = torch.randn(2, 2, 32, 16, dtype=torch.float64).requires_grad_()
    parameters = [torch.randn(2, dtype=torch.float64).requires_grad_() for _ in range(2)]
    args = {
        "plain": (*inputs, None, None, None, None, None, 0, False),
        "documents": (*inputs, None, None, None, CU, 0.3, 1, True),
        "all": (*inputs, *parameters, h0, CU, None, 2 | 4 | 8 | 16, True),
    }[case]
    torch.library.opcheck(torch.ops.gdn_kcp.chunk.default, args, test_utils=TESTS)


def test_opcheck_chunk_in_bf16():
    inputs = make(90, 1, 2, 16, 16, dtype=torch.bfloat16)
    args = (*inputs, None, None, None, CU, None, 1, True)
    torch.library.opcheck(torch.ops.gdn_kcp.chunk.default, args, test_utils=TESTS)


@pytest.mark.cpu_only(reason="its inputs are fp64")
def test_opcheck_backward_and_conv():
    inputs = [t.detach() for t in make(90, 1, 2, 16, 16)]
    do = torch.randn(1, 90, 2, 16, dtype=torch.float64)
    torch.library.opcheck(torch.ops.gdn_kcp.chunk_backward.default,
                          (*inputs, None, None, None, CU, do, None, None, 0), test_utils=TESTS)
    x = torch.randn(1, 90, 5).requires_grad_()
    weight, bias = torch.randn(5, 4).requires_grad_(), torch.randn(5).requires_grad_()
    for b, cu in ((bias, CU), (None, None)):
        torch.library.opcheck(torch.ops.gdn_kcp.conv.default, (x, weight, b, None, cu, True),
                              test_utils=TESTS)
    torch.library.opcheck(torch.ops.gdn_kcp.conv_backward.default,
                          (x.detach(), weight.detach(), bias.detach(), None, CU, True,
                           torch.randn(1, 90, 5)), test_utils=TESTS)


class Block(torch.nn.Module):
    """Packed projection, convolution, operator, projection."""

    def __init__(self, width=24, H=1, HV=2, D=16):
        super().__init__()
        self.H, self.HV, self.D = H, HV, D
        self.qkv = torch.nn.Linear(width, (2 * H + HV) * D, bias=False)
        self.gates = torch.nn.Linear(width, 2 * HV)
        self.conv = torch.nn.Parameter(0.3 * torch.randn((2 * H + HV) * D, 4))
        self.A_log = torch.nn.Parameter(torch.zeros(HV))
        self.out = torch.nn.Linear(HV * D, width, bias=False)

    def forward(self, x, cu, ctx=None):
        row = gdn_kcp.causal_conv1d(self.qkv(x), self.conv, cu_seqlens=cu)
        q, k, v = gdn_kcp.packed_qkv_views(row, H_qk=self.H, HV=self.HV)
        a, b = self.gates(x).chunk(2, -1)
        if ctx is not None:
            o = gdn_kcp.chunk_gdn_kcp(q, k, v, -torch.nn.functional.softplus(a), b.sigmoid(), ctx,
                                      use_qk_l2norm_in_kernel=True)
        else:
            o, _ = gdn_kcp.chunk_gated_delta_rule(
                q, k, v, a, b, cu_seqlens=cu, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, A_log=self.A_log, use_beta_sigmoid_in_kernel=True)
        return x + self.out(o.flatten(-2))


def block_and_rows():
    """A block and its x [1, T, width]; on a GPU in bf16 but for A_log."""
    block, x = Block(D=dims(16, 16)[0]), torch.randn(1, 90, 24)
    if on_gpu():
        block, x = block.to("cuda", torch.bfloat16), x.to("cuda", torch.bfloat16)
        block.A_log.data = block.A_log.data.float()
    return block, x


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_block_has_no_graph_break(dynamic, context, device):
    block, x = block_and_rows()
    ctx = gdn_kcp.build_context(gdn_kcp.partition(CU, 1), None, 0, device) if context else None
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = []
    for f in (block, compiled):
        block.zero_grad()
        y = f(x, CU, ctx)
        y.square().sum().backward()
        used = [p for p in block.parameters() if p.grad is not None]
        results.append([y.detach(), *(p.grad.clone() for p in used)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results):
        assert_close("of the block", a, b, 1e-5)


def test_other_packings_do_not_recompile():
    block, x = block_and_rows()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        compiled(x, CU)
        torch._dynamo.utils.counters.clear()
        other = torch.tensor([0, 10, 85])
        y = compiled(x, other)
        assert not torch._dynamo.utils.counters["stats"].get("unique_graphs")
        assert_close("y", y, block(x, other), 1e-5)


def test_a_call_over_a_context_breaks_the_graph(device):
    """Where it is not traced: as eager, forward and backward."""
    q, k, v, g, beta = make(90, 1, 2, 16, 16, dtype=torch.float32)
    explicit = gdn_kcp.partition(CU, 1, "explicit", fragments=[[(1, 0, 50), (0, 0, 40)]])
    explicit = gdn_kcp.build_context(explicit, None, 0, q.device)
    ctx, tiled = (
        gdn_kcp.build_context(gdn_kcp.partition(CU, 1), None, 0, q.device, tile=t) for t in (0, 64)
    )
    weight = torch.randn(v.shape[2] * v.shape[3], 4, device=q.device)

    def drop_in(v):
        return gdn_kcp.chunk_gated_delta_rule(q, k, v * 2, g, beta, cp_context=ctx)[0] * 2

    def kcp(v):
        return gdn_kcp.chunk_gdn_kcp(q, k, v * 2, g, beta, explicit) * 2

    def tiles(v):
        return gdn_kcp.chunk_gdn_kcp(q, k, v * 2, g, beta, tiled) * 2

    def half(v):
        return gdn_kcp.chunk_gdn_kcp_forward(q, k, v * 2, g, beta, ctx)[0] * 2

    def conv(v):
        return gdn_kcp.causal_conv1d(v.flatten(2) * 2, weight, cp_context=ctx) * 2

    for f in (drop_in, kcp, tiles, half, conv):
        torch._dynamo.reset()
        got = torch.compile(f, backend="aot_eager")(v)
        assert torch.equal(got, f(v)), f.__name__
        if f is not half:
            want = torch.autograd.grad(f(v).sum(), v)[0]
            assert torch.equal(torch.autograd.grad(got.sum(), v)[0], want), f.__name__
