"""A training step of transformers' Qwen3-Next on the CPU, with its own fallback and with this
package's operator and convolution in its place, steps alternating.

Usage: python bench/transformers_step.py [--tokens 2048] [--steps 3]
Needs transformers. Both arms first agree on the loss.
"""

import argparse
import statistics
import time

import torch
import transformers

from gdn_kcp.compat import transformers as compat


def make_model():
    """One GDN layer and one of attention at 4/12 heads of 128; the experts are small."""
    config = transformers.Qwen3NextConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=64, linear_num_key_heads=4,
        linear_num_value_heads=12, linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"], num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=256, shared_expert_intermediate_size=256, decoder_sparse_step=1)
    torch.manual_seed(0)
    return transformers.Qwen3NextForCausalLM(config).train()


def step(model, optimizer, tokens):
    """(seconds, loss)"""
    begun = time.perf_counter()
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return time.perf_counter() - begun, loss.item()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--steps", type=int, default=3)
    args = p.parse_args()
    tokens = torch.randint(0, 512, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    times = {"fallback": [], "gdn_kcp": []}
    models = {name: make_model() for name in times}
    optimizers = {n: torch.optim.AdamW(m.parameters(), 1e-3) for n, m in models.items()}
    for i in range(args.steps + 1):  # the first one warms up
        losses = {}
        for name, model in models.items():
            (compat.enable if name == "gdn_kcp" else compat.disable)()
            seconds, losses[name] = step(model, optimizers[name], tokens)
            times[name].append(seconds)
        compat.disable()
        if i == 0:
            a, b = losses.values()
            assert abs(a - b) <= 1e-4 * abs(a), losses
    medians = {name: statistics.median(t[1:]) for name, t in times.items()}
    print(f"{args.tokens} tokens, {torch.get_num_threads()} threads, fp32, median of {args.steps}")
    for name, seconds in medians.items():
        print(f"{name:<10}{seconds * 1e3:10.1f} ms a step")
    print(f"{medians['fallback'] / medians['gdn_kcp']:.2f} times as fast")


if __name__ == "__main__":
    main()
