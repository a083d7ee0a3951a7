"""What rounding single operands of the chunk form to bf16 costs where all keys point one way.

The form of docs/math.md in fp64, with the operands named rounded, on the inputs of test_dense whose
gates are all 0 (tests/python/test_matrix.py: uniform q, k and v, norm inside, scale 1, 2 documents of
256 tokens, 2/8 heads): max_error, rel_rms against the same form without rounding. docs/accuracy.md.

Usage: python lab/bf16_operands.py [--draws 8] [--scale X]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
from reference import recurrence  # noqa: E402: of this repository

B, T, H, HV, C = 2, 256, 2, 8, 64
EACH = HV // H
KERNELS = frozenset({"S", "dS", "beta Y", "beta E", "W", "P", "beta dVd", "dY", "N and dP"})
ROWS = {
    "all that the kernels round": KERNELS,
    "beta dVd alone": {"beta dVd"},
    "W alone": {"W"},
    "P alone": {"P"},
    "all but beta dVd": KERNELS - {"beta dVd"},
    "all but beta dVd, beta Y and W": KERNELS - {"beta dVd", "beta Y", "W"},
}
SHOWN = ("dv", "dk", "dbeta", "o")


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def draw(dim: int) -> dict[str, torch.Tensor]:
    rows = dict(dtype=torch.float64)
    q, k = (bf16(torch.rand(B, T, H, dim, **rows)) for _ in range(2))
    h0, dfinal = torch.randn(2, B, HV, dim, dim, **rows)
    return dict(q=q, k=k, v=bf16(torch.rand(B, T, HV, dim, **rows)),
                beta=torch.rand(B, T, HV, **rows).sigmoid(), h0=h0, dfinal=dfinal,
                do=bf16(torch.randn(B, T, HV, dim, **rows)))


def chunk_form(inputs, rounded=frozenset(), scale=1.0) -> dict[str, torch.Tensor]:
    """o, dk, dv and dbeta without gates, chunks of 64 tokens."""

    def operand(name, x):
        return bf16(x) if name in rounded else x

    def chunks(x):  # [B, T, heads, D] -> T / C of [B, HV, C, D]
        return x.repeat_interleave(HV // x.shape[2], 2).transpose(1, 2).split(C, 2)

    def norm(x):
        return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    rk = norm(inputs["k"])
    kn = inputs["k"] * rk
    q, k = chunks(inputs["q"] * norm(inputs["q"])), chunks(kn)
    v, do, beta = chunks(inputs["v"]), chunks(inputs["do"]), chunks(inputs["beta"][..., None])
    eye = torch.eye(C, dtype=torch.float64)
    S, kept, o = inputs["h0"], [], []
    for Q, K, V, b in zip(q, k, v, beta):
        kk = (K @ K.mT).tril(-1)
        W = operand("W", -kk @ torch.linalg.solve_triangular(eye + b * kk, eye, upper=False))
        P = operand("P", scale * (Q @ K.mT).tril())
        Y = V - K @ operand("S", S)
        E = Y + W @ operand("beta Y", b * Y)
        Vd = operand("beta E", b * E)
        o.append(scale * Q @ operand("S", S) + P @ Vd)
        kept.append((operand("S", S), W, P, E, Vd))
        S = S + K.mT @ Vd
    dS, dk, dv, dbeta = inputs["dfinal"], [], [], []
    for Q, K, b, dO, (S, W, P, E, Vd) in reversed(list(zip(q, k, beta, do, kept))):
        leaving = operand("dS", dS)
        dVd = P.mT @ dO + K @ leaving
        U = dVd + W.mT @ operand("beta dVd", b * dVd)
        dY = operand("dY", b * U)
        N = operand("N and dP", -(dY @ Vd.mT).tril(-1))
        dP = operand("N and dP", scale * (dO @ Vd.mT).tril())
        dv.append(b * U)
        dbeta.append((U * E).sum(-1, keepdim=True))
        dk.append(Vd @ leaving.mT - dY @ S.mT + dP.mT @ Q + (N + N.mT) @ K)
        dS = dS + scale * Q.mT @ dO - K.mT @ dY

    def whole(parts):
        return torch.cat(parts, 2).transpose(1, 2)

    dkn = whole(dk[::-1]).unflatten(2, (H, EACH)).sum(3)
    return dict(o=whole(o), dv=whole(dv[::-1]), dbeta=whole(dbeta[::-1])[..., 0],
                dk=rk * (dkn - kn * (kn * dkn).sum(-1, keepdim=True)))


def check() -> None:
    """The form without rounding against the recurrence token by token and its autograd."""
    inputs = draw(16)
    q, k, v, beta = (inputs[n].flatten(0, 1).requires_grad_() for n in ("q", "k", "v", "beta"))
    o, final = recurrence(q, k, v, torch.zeros(B * T, HV), beta, [0, T, 2 * T], scale=1.0,
                          norm=True, h0=inputs["h0"])
    grads = torch.autograd.grad((o, final), (k, v, beta),
                                (inputs["do"].flatten(0, 1), inputs["dfinal"]))
    got = chunk_form({n: t.detach() for n, t in inputs.items()})
    for name, want in zip(("o", "dk", "dv", "dbeta"), (o, *grads)):
        torch.testing.assert_close(got[name].flatten(0, 1), want, rtol=1e-9, atol=1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    check()
    most = {row: dict.fromkeys(SHOWN, (0.0, 0.0)) for row in ROWS}
    for inputs in (draw(dim) for dim in (128, 64) for _ in range(args.draws)):
        want = chunk_form(inputs, scale=args.scale)
        for row, rounded in ROWS.items():
            got = chunk_form(inputs, rounded, args.scale)
            for name in SHOWN:
                error = got[name] - want[name]
                now = (float(error.abs().max() / want[name].abs().max()),
                       float(error.norm() / want[name].norm()))
                most[row][name] = tuple(map(max, most[row][name], now))
    print("| rounded to bf16 |", " | ".join(SHOWN), "|\n|---|---|---|---|---|")
    for row, errors in most.items():
        print(f"| {row} |", " | ".join(f"{errors[n][0]:.1e}, {errors[n][1]:.1e}" for n in SHOWN), "|")


if __name__ == "__main__":
    main()
