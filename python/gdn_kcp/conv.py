"""Depthwise causal convolution before the operator, over packed documents and ranks."""

from __future__ import annotations

from typing import Any

import torch

from . import traced  # noqa: F401: registers what torch.compile needs
from ._library import ops
from .autograd import NoSecond, forward_mode, of_saved, refuse
from .chunk import host_cu_seqlens
from .context import Context
from .errors import InvalidArgumentError, typed
from .members import in_step, point
from .untraced import untraced


class Halo:
    """Which rows travel before a convolution of ``width`` taps, on one rank of a context.

    Row ``i`` before a fragment f lies at ``prefix[f, width - 1 - i]``. Made once per context.
    """

    def __init__(self, ctx: Context, width: int):
        self.member, self.world_size = ctx.member, ctx.world_size
        self.digest = ctx.partition.digest + width
        self.shape = (ctx.local_cu_seqlens.numel() - 1, width - 1)
        send: list[list[int]] = [[] for _ in range(self.world_size)]  # my rows, for each rank
        receive: list[list[int]] = [[] for _ in range(self.world_size)]  # flat prefix rows, by owner
        runs: list[slice] = []  # of my rows, in the order they are sent
        for rank in range(self.world_size):
            for fragment, before, length, owner, row in ctx.partition.halo(rank, width).tolist():
                if owner == ctx.rank:
                    send[rank] += range(row, row + length)
                    runs.append(slice(row, row + length))
                if rank == ctx.rank:
                    first = fragment * (width - 1) + width - 1 - before
                    receive[owner] += range(first, first + length)
        self.send_runs = runs
        self.send_rows = torch.tensor(sum(send, []), dtype=torch.int64, device=ctx.device)
        self.receive_rows = torch.tensor(sum(receive, []), dtype=torch.int64, device=ctx.device)
        self.send_counts = [len(rows) for rows in send]
        self.receive_counts = [len(rows) for rows in receive]

    def _exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Rows [n, C] for each rank in turn, against those of each rank."""
        if self.world_size == 1:
            return rows
        row_bytes = rows.shape[1] * rows.element_size()
        taken = rows.new_empty((sum(receive), rows.shape[1]))
        self.member.all_to_all(
            rows.contiguous().view(torch.uint8).reshape(-1), [n * row_bytes for n in send],
            taken.view(torch.uint8).reshape(-1), [n * row_bytes for n in receive],
        )
        return taken

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, C] -> prefix [F, width - 1, C]; zeros before a document."""
        rows = self._exchange(x[self.send_rows], self.send_counts, self.receive_counts)
        prefix = x.new_zeros((self.shape[0] * self.shape[1], x.shape[1]))
        prefix[self.receive_rows] = rows
        return prefix.view(*self.shape, x.shape[1])

    def scatter(self, dprefix: torch.Tensor, rows: int) -> torch.Tensor:
        """dprefix [F, width - 1, C] -> dx [rows, C] at the owners, added rank by rank in order."""
        got = dprefix.reshape(-1, dprefix.shape[-1])[self.receive_rows]
        got = self._exchange(got, self.receive_counts, self.send_counts)
        dx = dprefix.new_zeros((rows, dprefix.shape[-1]))
        # A row may serve two fragments of one rank, so every run of rows is added by itself.
        at = 0
        for run in self.send_runs:
            dx[run] += got[at : at + run.stop - run.start]
            at += run.stop - run.start
        return dx


class Convolution(torch.autograd.Function):
    """x [T, C] with the rows before its fragments from whoever holds them; without a halo, of one rank."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, offsets, silu: bool, halo: Halo | None):
        ctx.offsets, ctx.silu, ctx.halo = offsets, silu, halo
        prefix = None
        if halo is None:
            y = ops.conv(x, weight, bias, prefix, offsets, silu)
        else:
            ctx.number = halo.member.agreements
            with in_step(halo):
                prefix = halo.gather(x)
                y = ops.conv(x, weight, bias, prefix, offsets, silu)
        ctx.save_for_backward(x, weight, bias, prefix)
        return y

    @staticmethod
    def backward(ctx: Any, dy):
        with torch.no_grad():
            if ctx.halo is None:
                gradients, saved = _own_gradients(ctx, dy)
            else:
                with in_step(ctx.halo):
                    gradients, saved = _gradients_over_ranks(ctx, dy, ctx.halo)
        needed = ctx.needs_input_grad
        gradients = tuple(d if needed[i] else None for i, d in enumerate(gradients[:3]))
        if torch.is_grad_enabled():  # create_graph
            gradients = NoSecond.apply(3, *gradients, *saved, dy)
        return (*gradients, None, None, None)


def _own_gradients(ctx: Any, dy) -> tuple[tuple, tuple]:
    """dx, dweight, dbias, dprefix, and what they were made of."""
    x, weight, bias, prefix = saved = ctx.saved_tensors
    dy = dy.contiguous()
    return ops.conv_backward(x, weight, bias, prefix, ctx.offsets, ctx.silu, dy), saved


def _gradients_over_ranks(ctx: Any, dy, halo: Halo) -> tuple[tuple, tuple]:
    error, own, saved = None, (), ()
    try:
        own, saved = _own_gradients(ctx, dy)
    except Exception as raised:  # noqa: BLE001: the other ranks wait to hear of any
        error = of_saved(typed(raised))
    what = "causal_conv1d: backward"
    halo.member.agree(error, halo.digest, what, point(what, ctx.number))
    dx, dweight, dbias, dprefix = own
    return (dx + halo.scatter(dprefix, dx.shape[0]), dweight, dbias), saved


_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    cp_context: Context | None = None,
) -> torch.Tensor:
    """``y[t, c] = act(bias[c] + sum_j weight[c, j] x[t - (W - 1) + j, c])`` inside each document.

    Args:
        x: ``[B, T, C]`` or ``[T, C]``, bf16, fp32 or fp64, unit innermost stride; copied where entries
            of the batch lie apart. With ``cu_seqlens`` B = 1.
        weight: ``[C, W]`` or ``[C, 1, W]``, W = 1 to 8 taps. bias: ``[C]`` or None.
        activation: ``"silu"``, ``"swish"`` (the same) or None.
        cu_seqlens: ``[N + 1]`` int32 or int64, in tokens.
        cp_context: a :class:`Context`: the last W - 1 rows before each local fragment come from
            their owners. Gradients of weight and bias are sums over this rank's rows.

    Returns:
        y like x; bitwise independent of threads and of a document's neighbours. On CUDA it may be
        captured in a graph, with ``cu_seqlens`` on the CPU, which the graph keeps.

    Raises:
        InvalidArgumentError, UnsupportedError: naming the argument.

    Source: src/conv/causal_conv.h.
    """
    if cp_context is not None and torch.compiler.is_compiling():
        return _untraced(x, weight, bias, activation, cu_seqlens, cp_context)
    try:
        for name, value in (("x", x), ("weight", weight), ("bias", bias)):
            if not isinstance(value, torch.Tensor) and (name != "bias" or value is not None):
                raise InvalidArgumentError(
                    f"{name}: expected a tensor, got {type(value).__name__}"
                )
        if activation not in ("silu", "swish", None):
            raise InvalidArgumentError(
                f"activation: expected 'silu', 'swish' or None, got {activation!r}"
            )
        if cp_context is not None and not isinstance(cp_context, Context):
            raise InvalidArgumentError(
                f"cp_context: expected a gdn_kcp.Context, got {type(cp_context).__name__}"
            )
    except BaseException as error:  # the other ranks wait to hear of any
        refuse(cp_context, error, "causal_conv1d")
    if weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight.squeeze(1)
    silu = activation is not None
    try:
        if cp_context is not None:
            return _over_ranks(x, weight, bias, silu, cp_context)
        if cu_seqlens is not None and x.dim() == 3 and x.shape[0] != 1:
            raise InvalidArgumentError(
                f"x: expected batch size 1 with cu_seqlens, got {x.shape[0]}"
            )
        x = _uniform(x)
        if torch.compiler.is_compiling():
            return ops.conv(x, weight, bias, None, cu_seqlens, silu)
        offsets = host_cu_seqlens(cu_seqlens, None)
        if offsets is not None and offsets is cu_seqlens:  # a buffer may be refilled before the backward
            offsets = offsets.clone()
        if forward_mode():  # which the op would ignore, and torch refuses of a function
            return Convolution.apply(x, weight, bias, offsets, silu, None)
        return ops.conv(x, weight, bias, None, offsets, silu)
    except RuntimeError as error:
        raise typed(error) from None


_untraced = untraced(causal_conv1d)


def _uniform(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, C] as rows of one stride, which takes a copy where entries of the batch lie apart."""
    if x.dim() != 3 or min(x.shape[:2]) <= 1 or x.stride(0) == x.shape[1] * x.stride(1):
        return x
    return x.contiguous()


def _check_over_ranks(x, weight, bias, ctx: Context) -> int:
    """What all ranks must have in common, once nothing but the exchange can fail on this one."""
    width = weight.shape[-1] if weight.dim() == 2 else 0
    if not 1 <= width <= ctx.conv_kernel_size:
        raise InvalidArgumentError(
            f"weight: expected [C, W] with W of 1 to the context's conv_kernel_size "
            f"{ctx.conv_kernel_size}, got {list(weight.shape)}"
        )
    if x.dim() not in (2, 3) or x.shape[:-1].numel() != ctx.rows:
        raise InvalidArgumentError(
            f"x: expected {ctx.rows} rows, as the partition gives rank {ctx.rank}, got "
            f"{list(x.shape)}"
        )
    channels = x.shape[-1]
    if weight.shape[0] != channels:
        raise InvalidArgumentError(f"weight: expected [{channels}, W], got {list(weight.shape)}")
    if bias is not None and bias.shape != (channels,):
        raise InvalidArgumentError(f"bias: expected [{channels}], got {list(bias.shape)}")
    if x.stride(-1) != 1 and channels > 1:
        raise InvalidArgumentError(
            f"x: expected unit innermost stride, got strides {list(x.stride())}"
        )
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is None:
            continue
        if value.layout is not torch.strided:
            raise InvalidArgumentError(f"{name}: expected a dense tensor, got {value.layout}")
        if value.dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"{name}: expected bfloat16, float32 or float64, got "
                f"{str(value.dtype).removeprefix('torch.')}"
            )
        where = ctx.device if ctx.device.index is not None else x.device
        if value.device != where or where.type != ctx.device.type:
            raise InvalidArgumentError(
                f"{name}: expected on {ctx.device}, as the context, got {value.device}"
            )
    return ctx.partition.digest + (channels * 16 + width) * 4 + _DTYPES.index(x.dtype)


def _over_ranks(x, weight, bias, silu: bool, ctx: Context) -> torch.Tensor:
    error, digest = None, 0
    try:
        digest = _check_over_ranks(x, weight, bias, ctx)
    except Exception as raised:  # noqa: BLE001: the other ranks wait to hear of any
        error = raised
    with in_step(ctx):
        what = "causal_conv1d: partition, channels, width or dtype"
        ctx.member.agree(error, digest, what, point("causal_conv1d"))
        width = weight.shape[-1]
        if width not in ctx.halos:
            ctx.halos[width] = Halo(ctx, width)
    rows = x.reshape(-1, x.shape[-1])
    y = Convolution.apply(rows, weight, bias, ctx.local_cu_seqlens, silu, ctx.halos[width])
    return y.view(x.shape)
