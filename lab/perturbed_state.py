"""How far apart two walks stay whose first states differ by a millionth, with bf16 operands.

The forward of docs/math.md in fp32 with S, E, P and T rounded to bf16 where they are operands, one head
of 128 with constant gates, on the same random rows from two first states: relative distance of the
states and of the outputs after some chunks of 64 tokens. docs/accuracy.md, Between runs.

Usage: python lab/perturbed_state.py
"""

import torch

D, C, SHOWN = 128, 64, (0, 1, 5, 20, 50, 100, 199)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm())


def chunk(S, q, k, v, beta, g):
    """(state after the chunk, outputs); g [C]: sums of the log-decays."""
    gates = torch.exp(g[:, None] - g)
    T = torch.linalg.inv(torch.eye(C) + beta[:, None] * (k @ k.T * gates).tril(-1))
    P = bf16((q @ k.T * gates).tril())
    Y = beta[:, None] * (v - torch.exp(g)[:, None] * (k @ bf16(S)))
    E = bf16(bf16(T) @ bf16(Y))
    o = bf16(torch.exp(g)[:, None] * (q @ bf16(S)) + P @ E)
    return torch.exp(g[-1]) * S + (k * torch.exp(g[-1] - g)[:, None]).T @ E, o


def walk(gate: float):
    """(distance of the states, of the outputs) after every chunk."""
    draws = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draws)

    first = normal(D, D)
    states = [first, first * (1 + 1e-6 * normal(D, D))]
    g = torch.full((C,), gate).cumsum(0)
    for _ in range(SHOWN[-1] + 1):
        q, k = (bf16(torch.nn.functional.normalize(normal(C, D), dim=-1)) for _ in range(2))
        v, beta = bf16(normal(C, D)), torch.rand(C, generator=draws)
        (a, o), (b, p) = (chunk(S, q, k, v, beta, g) for S in states)
        states = [a, b]
        yield distance(a, b), distance(o, p)


def main():
    torch.set_num_threads(1)
    for gate in (-1e-3, -1e-2, -1e-1):
        rows = [row for n, row in enumerate(walk(gate)) if n in SHOWN]
        for name, column in zip(("states", "outputs"), zip(*rows)):
            values = "  ".join(f"{x:.1e}" for x in column)
            print(f"g {gate:<6} {name:<8} after chunks {SHOWN}: {values}")


if __name__ == "__main__":
    main()
