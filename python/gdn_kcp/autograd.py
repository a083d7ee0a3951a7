"""The operator as an autograd function, over one rank or several. Used by chunk.py and kcp.py."""

from __future__ import annotations

import copy
from typing import Any

import torch

from . import head_dims
from ._library import ops
from .context import CallKey
from .errors import Error, InvalidArgumentError, UnsupportedError, typed
from .members import Settle, interrupted, out_of_step, point

_TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


class Call:
    """What a call needs beside its tensors."""

    __slots__ = (
        "ctx", "cu_seqlens", "scale", "flags", "want_final", "workspace", "save", "again", "packed",
        "handle", "key", "replays", "refills", "padding", "number",
    )

    def __init__(self, ctx, cu_seqlens, scale, flags, want_final=False, workspace=None, save=True):
        self.ctx = ctx  # Context, or None: one rank holding cu_seqlens
        self.cu_seqlens = cu_seqlens  # a CPU tensor, or None
        self.scale = scale
        self.flags = flags
        self.want_final = want_final
        self.workspace = workspace  # uint8 tensor or None
        self.save = save  # whether the forward keeps a saved set
        self.again = None  # a saved set of an earlier forward of the same inputs
        self.packed = False  # gradient layout of q, k, v
        self.handle = None  # RecomputeHandle
        self.key = None
        self.replays = None  # replay.Replays, or None: run as it is
        self.refills = 0 if ctx is None else ctx.refills
        self.number = 0  # of its forward, by which a backward finds its like on other ranks
        self.padding = None  # head_dims.Padding of q, k, v and the states, for last_path()

    def eager(self) -> Call:
        """The same call without graphs."""
        call = copy.copy(self)
        call.replays = None
        return call


def check_packing(ctx, refills: int) -> None:
    """Refuses the backward of a forward of another packing."""
    if ctx is not None and ctx.refills != refills:
        raise InvalidArgumentError(
            "context: expected the packing of the forward, got one that was refilled since: run the "
            "backward before refill()"
        )


def check_tensors(*inputs) -> None:
    """Refuses what is no tensor, and the absence of the first five."""
    for i, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            if i < 5 or value is not None:
                raise InvalidArgumentError(
                    f"{_TENSORS[i]}: expected a tensor, got {type(value).__name__}"
                )
        elif value.layout is not torch.strided:
            raise InvalidArgumentError(f"{_TENSORS[i]}: expected a dense tensor, got {value.layout}")


def check_deterministic(value) -> None:
    if value is not None and value is not True and value is not False:
        raise InvalidArgumentError(f"deterministic: expected None, True or False, got {value!r}")


def refuse(ctx, error: BaseException, what: str, number: int = 0):
    """Raises an error that was found before a call began, on the other ranks of ``ctx`` too."""
    interrupted(ctx, error)
    if isinstance(error, Exception) and getattr(ctx, "world_size", 1) > 1:
        ctx.member.agree(error, 0, what, point(what, number))
    raise error


def _advance(ctx, handle: int, settle: Settle) -> None:
    """Runs a paused call to its end, with the context's collectives in between; before the first of
    them ``settle`` ends the agreement to run it."""
    member, size = ctx.member, ctx.world_size
    try:
        if member.communicator:  # started in _begin
            settle()
            ops.call_complete(handle, member.communicator)
            return
        message = ops.call_advance(handle)  # beside the agreement
        settle()
        while True:
            table, send, receive = message
            kind, *sizes = table.tolist()
            if kind == 0:
                return
            if kind == 1:
                member.all_to_all(send, sizes[:size], receive, sizes[size:])
            else:
                member.all_gather(send, receive, sizes[-size:])
            message = ops.call_advance(handle)
    except BaseException:
        ops.call_free(handle)
        raise


def _begin(call: Call, op, args: tuple, q, v, what: str, recomputes: bool = False):
    """The outputs of a paused call, its handle, and what ends the agreement that all could begin it.

    ``what`` must be the same on all ranks, a point of members.py first; ``recomputes``: a backward
    whose collectives are a forward's too.
    """
    ctx = call.ctx
    error, results, digest = None, None, 0
    at = point(what.split(":")[0], call.number)
    try:
        try:
            results = op(ctx.handle, *args)
            digest = ctx.digest(q, v, call.scale, call.flags) + recomputes
            if ctx.member.communicator:
                ops.call_start(results[-1])
        except Exception as raised:  # noqa: BLE001: the other ranks wait to hear of any
            error = typed(raised)
        settle = ctx.member.begin_agreement(error, digest, what, at)
        if error is not None:
            settle()
    except BaseException:
        if results is not None:
            ops.call_free(results[-1])
        raise
    return results[:-1], results[-1], settle


def _of_call(call: Call, error: BaseException) -> BaseException:
    """What a call raises. One that all ranks take part in ends the agreements if they did not hear of
    it; one that makes a forward again from what an earlier one kept asks no other rank."""
    error = typed(error)
    if call.again is None:
        out_of_step(call.ctx, error)
    return error


def run_forward(call: Call, inputs: tuple, save: bool):
    """(o, final_state, saved) of ``inputs`` = q, k, v, g, beta, A_log, dt_bias, initial_state."""
    ctx = call.ctx
    head_dims.last_padding = call.padding
    try:
        if call.replays is not None and call.again is None:
            eager = call.eager()
            return call.replays.call(
                call, "forward", (save, call.want_final), inputs,
                lambda own: run_forward(eager, own, save),
            )
        if ctx is None or ctx.world_size == 1 or call.again is not None:
            return ops.forward(
                0 if ctx is None else ctx.handle, call.cu_seqlens, *inputs, call.scale, call.flags,
                call.workspace, call.again, save, call.want_final,
            )
        args = (*inputs, call.scale, call.flags, call.workspace, None, save, call.want_final)
        results, handle, settle = _begin(
            call, ops.forward_begin, args, inputs[0], inputs[2],
            "forward: backend, heads, dims, dtype or options",
        )
        call.number = ctx.member.agreements
        _advance(ctx, handle, settle)
        return results
    except BaseException as error:
        raise _of_call(call, error) from None


def run_backward(call: Call, inputs: tuple, do, dfinal_state, saved, packed: bool):
    """Gradients of ``inputs``, in their order; those of absent operands have no elements."""
    ctx = call.ctx
    head_dims.last_padding = call.padding
    try:
        if call.replays is not None:
            eager = call.eager()
            return call.replays.call(
                call, "backward", (packed,), (*inputs, do, dfinal_state, saved),
                lambda own: run_backward(eager, own[:-3], *own[-3:], packed),
            )
        if ctx is None or ctx.world_size == 1:
            return ops.backward(
                0 if ctx is None else ctx.handle, call.cu_seqlens, *inputs, do, dfinal_state, saved,
                call.scale, call.flags, call.workspace, packed,
            )
        args = (*inputs, do, dfinal_state, saved, call.scale, call.flags, call.workspace, packed)
        results, handle, settle = _begin(
            call, ops.backward_begin, args, inputs[0], inputs[2],
            "backward: backend, heads, dims, dtype, options or saved", saved is None,
        )
        _advance(ctx, handle, settle)
        return results
    except BaseException as error:
        raise _of_call(call, error) from None


_ABSENT = (None, None, None)


def _all_of(inputs) -> tuple:
    """q, k, v, g, beta, A_log, dt_bias, initial_state of those that the function was given."""
    return (*inputs, *_ABSENT) if len(inputs) == 5 else tuple(inputs)


class NoSecond(torch.autograd.Function):
    """The first ``count`` of its tensors, gradients, which depend on the others and refuse a backward.

    torch's once_differentiable lets pass what came of a ``do`` without a gradient, and what is asked of some
    inputs alone.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors):
        return tuple(None if t is None else t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_):
        raise UnsupportedError("backward: expected one of the outputs, got one of their gradients")


class GatedDeltaRule(torch.autograd.Function):
    """Saves its inputs and one block of bytes, all through save_for_backward.

    The last three inputs are left out where all are absent: each that torch sees costs a microsecond.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs):
        o, final_state, saved = run_forward(call, _all_of(inputs), call.save)
        if call.handle is not None and call.again is None:
            call.handle.keep(call.key, saved, call.number)
        call.again = None
        ctx.save_for_backward(*inputs, saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (o, final_state) if call.want_final else o

    @staticmethod
    def backward(ctx: Any, do, dfinal_state=None):
        if not torch.is_grad_enabled():
            return (None, *_gradients(ctx, do, dfinal_state)[0])
        with torch.no_grad():  # create_graph
            gradients, inputs = _gradients(ctx, do, dfinal_state)
        return (None, *NoSecond.apply(len(gradients), *gradients, *inputs, do, dfinal_state))


def _gradients(ctx: Any, do, dfinal_state) -> tuple[list, list]:
    """Of the inputs, and the inputs."""
    call = ctx.call
    try:
        *inputs, saved = ctx.saved_tensors
        check_packing(call.ctx, call.refills)
    except BaseException as error:  # an input was changed in place, say
        refuse(call.ctx, of_saved(error), "backward", call.number)
    try:
        gradients = run_backward(
            call, _all_of(inputs), do, dfinal_state, saved if call.save else None, call.packed
        )
        needed = ctx.needs_input_grad[1:]
        return [d if need else None for d, need in zip(gradients, needed)], inputs
    except BaseException as error:
        interrupted(call.ctx, error)
        raise


def of_saved(error: BaseException) -> BaseException:
    """What torch says of saved tensors, typed."""
    if isinstance(error, Error) or "modified by an inplace operation" not in f"{error}":
        return error
    return InvalidArgumentError(f"inputs: expected as they were in the forward: {error}")


def is_packed_row(q, k, v) -> bool:
    """Whether q, k, v are the three outputs, in order, of one packed_qkv_views over a dense row."""
    node = q.grad_fn
    return (
        node is not None
        and getattr(node, "gdn_dense_row", False)
        and k.grad_fn is node
        and v.grad_fn is node
        and q.output_nr == 0
        and k.output_nr == 1
        and v.output_nr == 2
    )


def forward_mode() -> bool:
    """Whether tangents may be asked for: the autograd function refuses them, the op would drop them."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def apply(call: Call, *inputs):
    """(o, final_state or None), with or without a graph."""
    handle = call.handle
    if handle is not None:
        call.key = CallKey.of(call.ctx, inputs[0], inputs[2], call.scale, call.flags)
        try:
            call.again = handle.take(call.key)
            call.number = handle.number
        except InvalidArgumentError as error:
            refuse(call.ctx, error, "forward")
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if wanted or forward_mode():
        call.packed = is_packed_row(*inputs[:3])
        if call.cu_seqlens is not None:  # a buffer may be refilled before the backward
            call.cu_seqlens = call.cu_seqlens.clone()
        present = inputs if any(t is not None for t in inputs[5:]) else inputs[:5]
        result = GatedDeltaRule.apply(call, *present)
        return result if call.want_final else (result, None)
    o, final_state, saved = run_forward(call, inputs, handle is not None)
    if handle is not None and call.again is None:
        handle.keep(call.key, saved, call.number)
    return o, final_state if call.want_final else None


def autocast(device_type: str, *tensors):
    """Under autocast, floating q, k, v in its dtype, as for a matrix product; fp64 stays."""
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedError(f"q: expected a CPU or CUDA tensor, got {device_type}")
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )
