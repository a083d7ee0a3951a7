"""Forward + backward on the CPU: `gdn bench` beside transformers' PyTorch fallback
(torch_chunk_gated_delta_rule, fp32, autograd, heads repeated) on the same cores, arms alternating.

Usage: python bench/cpu_vs_transformers.py [--gdn build/cpu/cli/gdn] [--tokens 4096] [--heads 16,48]
                                           [--groups 3]
Needs torch (a CPU build will do) and transformers. Both arms first agree on the outputs.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule


def operands(tokens, heads_qk, heads_v, dim=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator)
    q, k = (torch.nn.functional.normalize(rand(1, tokens, heads_qk, dim), dim=-1) for _ in "qk")
    v, d_o = rand(1, tokens, heads_v, dim), rand(1, tokens, heads_v, dim)
    beta = torch.sigmoid(rand(1, tokens, heads_v))
    g = torch.nn.functional.logsigmoid(rand(1, tokens, heads_v)) / 16
    return dict(q=q, k=k, v=v, g=g, beta=beta), d_o


def fallback(x, d_o):
    """Seconds of the forward and of the backward, and the output."""
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    repeat = x["v"].shape[2] // x["q"].shape[2]
    start = time.perf_counter()
    wide = {n: leaves[n].repeat_interleave(repeat, 2) for n in "qk"}
    o, _ = torch_chunk_gated_delta_rule(
        wide["q"], wide["k"], leaves["v"], g=leaves["g"], beta=leaves["beta"],
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False)
    middle = time.perf_counter()
    grads = torch.autograd.grad(o, list(leaves.values()), d_o)
    return middle - start, time.perf_counter() - middle, o.detach(), grads


def ours(gdn, tokens, heads):
    """Per operation the figures of the first arm, from the command's JSON."""
    text = subprocess.run([gdn, "bench", "--docs", str(tokens), "--heads", heads, "--dtype", "fp32",
                           "--backend", "cpu", "--ops", "fwd,fwd+bwd", "--no-check", "--json"],
                          check=True, capture_output=True, text=True).stdout
    figures = {}
    for row in json.loads(text)["rows"]:
        arm = row["arms"][0]
        figures[row["operation"]] = {"ms": arm["ms"], "drift": arm["drift"],
                                     "gflops": arm["flop"] / arm["ms"] / 1e6}
    return figures


def check_outputs(gdn, x, d_o, reference_o, reference_grads):
    """rel-RMS of our results against the fallback's, on the fallback's inputs."""
    from safetensors.torch import load_file, save_file
    with tempfile.TemporaryDirectory() as folder:
        tensors = {n: t[0].contiguous() for n, t in x.items()}
        tensors["do"] = d_o[0].contiguous()
        tensors["cu_seqlens"] = torch.tensor([0, d_o.shape[1]])
        save_file(tensors, f"{folder}/in.safetensors")
        subprocess.run([gdn, "run", f"{folder}/in.safetensors", "-o", f"{folder}/out.safetensors"],
                       check=True, capture_output=True)
        got = load_file(f"{folder}/out.safetensors")
    errors = {}
    for name, want in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), (reference_o, *reference_grads)):
        difference = got[name].double() - want[0].double()
        errors[name] = (difference.norm() / want.double().norm()).item()
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gdn", default="build/cpu/cli/gdn")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", default="16,48")
    parser.add_argument("--groups", type=int, default=3)
    args = parser.parse_args()
    heads_qk, heads_v = map(int, args.heads.split(","))
    x, d_o = operands(args.tokens, heads_qk, heads_v)

    a = torch.randn(2048, 2048)
    a @ a
    start = time.perf_counter()
    for _ in range(5):
        a @ a
    gemm = 5 * 2 * 2048**3 / (time.perf_counter() - start) / 1e9

    forward, backward, o, grads = fallback(x, d_o)
    print("rel-RMS between the two:",
          {n: f"{e:.1e}" for n, e in check_outputs(args.gdn, x, d_o, o, grads).items()})
    theirs, mine = [], []
    for _ in range(args.groups):
        forward, backward, *_ = fallback(x, d_o)
        theirs.append(forward + backward)
        mine.append(ours(args.gdn, args.tokens, args.heads))
        forward, backward, *_ = fallback(x, d_o)
        theirs.append(forward + backward)
    print(json.dumps(mine[-1], indent=1))
    print(f"torch sgemm on {torch.get_num_threads()} threads: {gemm:.0f} GFLOP/s")
    print(f"transformers forward+backward: median {statistics.median(theirs):.3f} s")


if __name__ == "__main__":
    main()
