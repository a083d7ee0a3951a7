"""What it costs to begin the backward's walk of the states in every block of chunks from a copy in bf16.

One head in the chunk form of docs/math.md in fp64, with the kernels' operands rounded (bf16_operands.py) and
constant gates; random q, k (normalised), v, d_o. A row for each way to keep the states: rel-RMS x 1e-3 of
the gradients against the form without rounding. docs/notes/sm90.md has what this is for.

Usage: python lab/state_checkpoints.py [--chunks 48]
"""

from __future__ import annotations

import argparse

import torch
from bf16_operands import KERNELS, bf16
from torch.nn.functional import normalize

C, D = 64, 128
GATES = (0.0, -1e-4, -1e-3, -1e-2, -1e-1)
WAYS = {"walked from the beginning": None, "bf16, 8 chunks": (8, 1), "bf16, 16 chunks": (16, 1),
        "bf16 and its remainder, 8 chunks": (8, 2)}


def kept(S: torch.Tensor, words: int) -> torch.Tensor:
    """S as a sum of ``words`` bf16 numbers."""
    high = bf16(S)
    return high if words == 1 else high + bf16(S - high)


def gradients(rows, gate: float, rounded=frozenset(), way=None) -> dict[str, torch.Tensor]:
    """dq, dk, dv, dbeta [T, ..] of q, k, v, d_o [T, D] and beta [T, 1]."""

    def operand(name, x):
        return bf16(x) if name in rounded else x

    q, k, v, do, beta = (x.split(C) for x in rows)
    at = torch.arange(1, C + 1, dtype=torch.float64)
    eye = torch.eye(C, dtype=torch.float64)
    decay = torch.exp(gate * at)[:, None]  # of what enters, at each token
    to_end = torch.exp(gate * (C - at))[:, None]
    whole = float(torch.exp(torch.tensor(gate * C)))
    between = torch.exp(gate * (at[:, None] - at)).tril()

    def chunk(S, K, V, b):
        kk = (K @ K.mT * between).tril(-1)
        W = operand("W", -kk @ torch.linalg.solve_triangular(eye + b * kk, eye, upper=False))
        image = operand("S", S)
        Y = V - decay * (K @ image)
        E = Y + W @ operand("beta Y", b * Y)
        Vd = operand("beta E", b * E)
        return (image, W, E, Vd), whole * S + K.mT @ (to_end * Vd)

    S = torch.zeros(D, D, dtype=torch.float64)
    states, chunks = [], []
    for K, V, b in zip(k, v, beta):
        states.append(S)
        made, S = chunk(S, K, V, b)
        chunks.append(made)
    if way is not None:
        every, words = way
        for i, (K, V, b) in enumerate(zip(k, v, beta)):
            S = kept(states[i], words) if i % every == 0 else S
            chunks[i], S = chunk(S, K, V, b)

    dS = torch.zeros(D, D, dtype=torch.float64)
    out: dict[str, list[torch.Tensor]] = {name: [] for name in ("dq", "dk", "dv", "dbeta")}
    for Q, K, dO, b, (S, W, E, Vd) in reversed(list(zip(q, k, do, beta, chunks))):
        P = operand("P", (Q @ K.mT * between).tril())
        leaving = operand("dS", dS)
        dVd = P.mT @ dO + to_end * (K @ leaving)
        U = dVd + W.mT @ operand("beta dVd", b * dVd)
        dY = operand("dY", b * U)
        N = operand("N and dP", -(dY @ Vd.mT * between).tril(-1))
        dP = operand("N and dP", (dO @ Vd.mT * between).tril())
        out["dq"].append(decay * (dO @ S.mT) + dP @ K)
        out["dk"].append(to_end * (Vd @ leaving.mT) - decay * (dY @ S.mT) + dP.mT @ Q + (N + N.mT) @ K)
        out["dv"].append(b * U)
        out["dbeta"].append((U * E).sum(-1, keepdim=True))
        dS = whole * dS + Q.mT @ (decay * dO) - K.mT @ (decay * dY)
    return {name: torch.cat(parts[::-1]) for name, parts in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=48)
    tokens = C * parser.parse_args().chunks
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(tokens, *shape, dtype=torch.float64)

    rows = [bf16(normalize(normal(D), dim=-1)), bf16(normalize(normal(D), dim=-1)), bf16(normal(D)),
            bf16(normal(D)), normal(1).sigmoid()]
    print("| gate | states of the backward | dq | dk | dv | dbeta |\n|---|---|---|---|---|---|")
    for gate in GATES:
        want = gradients(rows, gate)
        for name, way in WAYS.items():
            got = gradients(rows, gate, KERNELS, way)
            errors = ((got[n] - want[n]).norm() / want[n].norm() for n in want)
            print(f"| {gate:g} | {name} |", " | ".join(f"{1e3 * float(e):.2f}" for e in errors), "|")


if __name__ == "__main__":
    main()
