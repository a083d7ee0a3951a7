"""Calls as CUDA graphs: the first call of a kind is captured, later ones are replayed.

A graph reads and writes memory at fixed addresses, so a captured call has its own copies of its
inputs and outputs: a replay copies the caller's inputs in and new results out, which moves their
bytes once more, and costs the host a handful of launches (docs/python.md says what that comes to, and
what has no copies). The graphs live in the caller's
:class:`Workspace`, whose memory they use. A kind is everything that a captured program depends on:
context, direction, shapes, dtypes, options, gradient layout. Documents are not among them: they lie
in the context's tables, and :meth:`Context.refill` changes them under a captured graph.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch

from .errors import InvalidArgumentError, UnsupportedError
from .in_process import ThreadMember
from .members import point
from .packed import columns_of, row_of

Tensors = tuple  # of torch.Tensor | None


class Captured(NamedTuple):
    ctx: Any  # keeps the tables on the device alive
    inputs: Tensors  # the graph's own
    outputs: Tensors
    replay: Callable[[], None]


def capture(run: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
    """``run`` as a graph: its outputs, which lie in the graph's memory, and what fills them."""
    graph = torch.cuda.CUDAGraph()
    # A collective's watchdog may query events on a thread of its own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run()
    return outputs, graph.replay


def why_not(ctx, workspace) -> Exception | None:
    """What keeps a call of this context from being captured."""
    if ctx.device.type != "cuda":
        return UnsupportedError(
            f"graph: expected 'off' on {ctx.device}, got 'replay': graphs are of CUDA devices"
        )
    if workspace is None:
        return InvalidArgumentError(
            "workspace: expected a gdn_kcp.Workspace with graph='replay', which keeps the graphs, "
            "got none"
        )
    if isinstance(ctx.member, ThreadMember):
        return UnsupportedError(
            "graph: expected 'off' over an InProcessGroup, got 'replay': its ranks meet on the host"
        )
    if torch.cuda.is_current_stream_capturing():
        return UnsupportedError(
            "graph: expected 'off' within a stream capture, got 'replay': the outer graph holds "
            "the call"
        )
    return None


def _kind(t: torch.Tensor | None):
    return None if t is None else (tuple(t.shape), t.dtype, t.device)


def _own(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _fill(own: Tensors, given: Tensors) -> None:
    pairs = [(to, of) for to, of in zip(own, given) if to is not None and to.numel() > 0]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))  # one launch for dense tensors of one dtype


def _copies(outputs: Tensors) -> Tensors:
    """The outputs in memory of the caller's; gradients of one row stay columns of one row."""
    row = row_of(*outputs[:3]) if len(outputs) > 3 else None
    if row is None:
        return tuple(t.clone() for t in outputs)
    q, v = outputs[0], outputs[2]
    packed = columns_of(row.clone(), q.shape[-2], v.shape[-2], q.shape[-1])
    return (*packed, *(t.clone() for t in outputs[3:]))


class Replays:
    """The graphs of one workspace."""

    def __init__(self):
        self._captured: dict[tuple, Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def call(
        self, call, name: str, options: tuple, inputs: Tensors, run: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Results of ``run(inputs)``, by the graph of its kind.

        ``name`` and ``options``: what tells apart calls whose inputs are of one kind.
        """
        ctx = call.ctx
        key = (
            name, ctx.handle, call.scale, call.flags, *options, *(_kind(t) for t in inputs)
        )
        known = self._captured.get(key)
        # A rank that captures meets the others in a call's checks, one that replays does not.
        ctx.member.agree(None, int(known is None), f"graph: {name} captured before", point(name, call.number))
        if known is None:
            known = self._captured[key] = self._capture(ctx, inputs, run)
        else:
            _fill(known.inputs, inputs)
        known.replay()
        return _copies(known.outputs)

    @staticmethod
    def _capture(ctx, inputs: Tensors, run: Callable[[Tensors], Tensors]) -> Captured:
        own = tuple(_own(t) for t in inputs)
        _fill(own, inputs)
        run(own)  # checks the arguments, uploads tables, loads kernels: nothing of it in the graph
        outputs, replay = capture(lambda: run(own))
        return Captured(ctx, own, outputs, replay)
