"""Trains a small byte-level GDN language model on packed documents over context-parallel ranks.

    python examples/train_lm.py                        # 2 ranks, then 1 rank, and compares them
    torchrun --nproc-per-node 2 examples/train_lm.py --ranks-only

Every step packs documents of real text (default: Markdown and source files of this repository; give
other files as arguments), cuts them over the ranks with zigzag_per_document, and runs forward and
backward with activation checkpointing. Writes a PNG with the loss curves and says how far the
2-rank run is from the 1-rank run of the same seed. gloo on a CPU machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lm_model import Config, LanguageModel
from torch.nn import functional as F
from tqdm import tqdm

import gdn_kcp

ROOT = Path(__file__).resolve().parents[1]


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("files", nargs="*", type=Path, help="text files, a document each")
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--tokens", type=int, default=1024, help="of a step, over all ranks")
    p.add_argument("--document", type=int, default=512, help="longest document in a step")
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--out", type=Path, default=ROOT / "out")
    p.add_argument("--ranks-only", action="store_true", help="one training run over this job's ranks")
    return p.parse_args()


def texts(files) -> list[bytes]:
    files = files or sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/*/*.cc"),
                             *ROOT.glob("python/gdn_kcp/*.py")])
    return [b for b in (f.read_bytes() for f in files) if len(b) > 64]


def packed_batch(documents, generator, tokens: int, longest: int):
    """bytes [T + 1 per document], cu_seqlens [N + 1] of inputs: documents cut at random places."""
    inputs, targets, cu = [], [], [0]
    while cu[-1] < tokens:
        text = documents[torch.randint(len(documents), (1,), generator=generator)]
        room = min(tokens - cu[-1], longest, len(text) - 1)
        n = min(room, int(torch.randint(longest // 8, longest + 1, (1,), generator=generator)))
        at = int(torch.randint(len(text) - n, (1,), generator=generator))
        piece = torch.frombuffer(bytearray(text[at : at + n + 1]), dtype=torch.uint8).long()
        inputs.append(piece[:-1])
        targets.append(piece[1:])
        cu.append(cu[-1] + n)
    return torch.cat(inputs)[None], torch.cat(targets)[None], cu


def train(args, rank: int, ranks: int, group) -> list[float]:
    """The loss of every step; the same numbers, to rounding, for every number of ranks."""
    torch.manual_seed(args.seed)
    model = LanguageModel(Config(layers=args.layers, width=args.width))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 10, 1.0) * (1 - 0.9 * s / args.steps))
    documents = texts(args.files)
    generator = torch.Generator().manual_seed(args.seed)
    bar = tqdm(total=args.steps, desc=f"{ranks} rank{'s' * (ranks > 1)}", dynamic_ncols=True,
               mininterval=0.5, disable=True if rank != 0 else None)  # None: in a terminal alone
    losses, began = [], time.time()
    for step in range(args.steps):
        inputs, targets, cu = packed_batch(documents, generator, args.tokens, args.document)
        partition = gdn_kcp.partition(cu, ranks, "zigzag_per_document")
        ctx = gdn_kcp.build_context(partition, group, rank, "cpu")
        rows = ctx.token_indices()
        logits = model(inputs[:, rows], ctx=ctx)
        # A sum over all tokens of all ranks: each rank adds its share, gradients add up too.
        loss = F.cross_entropy(logits[0], targets[0, rows], reduction="sum") / cu[-1]
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if ranks > 1:
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()] + [total[None]])
            dist.all_reduce(flat, group=group)
            pieces = flat.split([p.numel() for p in model.parameters()] + [1])
            for p, piece in zip(model.parameters(), pieces):
                p.grad.copy_(piece.view_as(p))
            total = pieces[-1][0]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(total))
        rate = (step + 1) * args.tokens / (time.time() - began)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s")
        bar.update()
    bar.close()
    return losses


def run_ranks(args, ranks: int) -> list[float]:
    """Trains over `ranks` processes of this machine and returns their losses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    command = [sys.executable, __file__, *sys.argv[1:], "--ranks-only"]
    workers = []
    for rank in range(ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
               "OMP_NUM_THREADS": str(threads), "GDN_NUM_THREADS": str(threads)}
        workers.append(subprocess.Popen(command, env=env))
    codes = [worker.wait() for worker in workers]
    if any(codes):
        sys.exit(f"training over {ranks} ranks failed: exit codes {codes}")
    return json.loads(curve_file(args, ranks).read_text())


def curve_file(args, ranks: int) -> Path:
    return args.out / f"train_lm.{ranks}.json"


def plot(path: Path, curves: dict[int, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=120)
    for ranks, losses in sorted(curves.items()):
        name = f"{ranks} rank" + ("s" if ranks > 1 else "")
        axes.plot(range(1, len(losses) + 1), losses, label=name,
                  linestyle="-" if ranks == 1 else "--", linewidth=2.2 if ranks == 1 else 1.3)
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy, nats per byte")
    axes.set_title("Byte-level GDN language model, packed documents")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.ranks_only:
        group = None
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if ranks > 1:
            dist.init_process_group("gloo")
            group = dist.group.WORLD
        losses = train(args, rank, ranks, group)
        if rank == 0:
            curve_file(args, ranks).write_text(json.dumps(losses))
        if ranks > 1:
            dist.destroy_process_group()
        return
    curves = {ranks: run_ranks(args, ranks) for ranks in dict.fromkeys((args.ranks, 1))}
    picture = args.out / "train_lm.png"
    plot(picture, curves)
    one, many = curves[1], curves[args.ranks]
    apart = max(abs(a - b) for a, b in zip(one, many))
    print(f"loss {many[0]:.3f} -> {many[-1]:.3f} over {len(many)} steps; curves in {picture}")
    print(f"{args.ranks} ranks against 1 rank, same seed: largest difference of a loss {apart:.1e}"
          f" ({apart / max(one):.1e} of it)")


if __name__ == "__main__":
    main()
