"""Run attention under a law with library attention calls, merged exactly, with exact gradients and linear memory.

The vectors come rotated by stock RoPE, so a near region needs nothing and a far one a rotation by the difference. Each
block of the schedule rotates its own queries; far keys are rotated a slab at a time, which bounds the extra memory.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rpe3d.attention.blocked.layout import by_token, flipped, room
from rpe3d.attention.blocked.schedule import Block, Call
from rpe3d.attention.blocked.task import PLAIN, Kind, Task, query_kind
from rpe3d.attention.merge import MOST, Part, add_up, fuses, merge, merge_checked, products
from rpe3d.attention.problem import refuse_second_derivative

WAITING = 2**29
"""Bytes of gradients that may wait to be added up: those of keys, of far keys and of values, each."""


class Blocked(torch.autograd.Function):
    """softmax(scale · q k*) v for one `Task`, with q and k rotated by stock RoPE. Gradients run block by block."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, task: Task
    ) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
        focused = task.fade is not None and task.fade.focus > 0
        queries, keys, values = (as_heads(x, task) for x in (q, k, v))
        far = _empty(queries) if focused and any(ctx.needs_input_grad) else None
        out, lse = _forward(task, queries, keys, values, far)
        if sinks is not None:
            merge([(out, lse)], out, lse, sinks=sinks.repeat(out.shape[1] // len(sinks)))
        out, lse = (_apart(x, q) for x in (out, lse))
        ctx.task = task
        ctx.save_for_backward(q, k, v, out, lse, sinks, *((None, None) if far is None else far[:2]))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        refuse_second_derivative("library calls")
        q, k, v, out, lse, sinks, *kept = ctx.saved_tensors
        far = None if kept[0] is None else Part(*kept)
        do = torch.zeros_like(out) if do is None else do
        dq, dk, dv = backward(ctx.task, q, k, v, out, lse, do, far=far)
        if dlse is not None:
            ones, change, size = logs_as_values(v, out, lse, dlse)
            far = far and far._replace(out=_first(far.out, 1.0))
            found = backward(ctx.task, q, k, ones, torch.zeros_like(out), lse, change, far=far)
            dq += found[0] * size
            dk += found[1] * size
        dsinks = None
        if sinks is not None:
            delta = products(do, out) - (0.0 if dlse is None else dlse)
            dsinks = -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsinks, None


def logs_as_values(v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values and a gradient of the output that give q and k the gradient of the log-sum-exp, up to a factor.

    With values that are all 1 in one dimension, an output gradient of dlse there, and an output of zeros, the slope of
    a score p (dO · v - dO · O) is p dlse, in library calls that know nothing of it. The factor is a power of two per
    sequence, which dlse is divided by: in float16 a small gradient would be 0, and a large one infinite.
    """
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    least = torch.finfo(dlse.dtype).tiny
    size = dlse.abs().amax((1, 2), keepdim=True).clamp(min=least).log2().floor().exp2()
    return _first(v, 1.0), _first(out, dlse / size), size[..., None]


def _first(like: Tensor, value: Tensor | float) -> Tensor:
    """Return zeros with this value in the first dimension."""
    made = torch.zeros_like(like)
    made[..., 0] = value
    return made


def as_heads(x: Tensor, task: Task) -> Tensor:
    """Return sequences as further heads of one, if calls repeat over chunks, which takes the batch dimension."""
    if len(x) == 1 or not task.repeats:
        return x
    return x.reshape(1, -1, x.shape[2]) if x.ndim == 3 else x.permute(2, 0, 1, 3).flatten(1, 2).transpose(0, 1)[None]


def _apart(x: Tensor, like: Tensor) -> Tensor:
    """Split what `as_heads` has joined, one part per sequence."""
    return x if len(x) == len(like) else x[0].unflatten(0, (len(like), -1))


def _empty(q: Tensor) -> Part:
    """Return an empty result in the layout of q, so that an output projection finds a token's heads together."""
    out = torch.empty_like(q)
    return Part(out, torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device))


def _forward(task: Task, q: Tensor, k: Tensor, v: Tensor, far: Part | None) -> tuple[Tensor, Tensor]:
    """Run every block of every pass and merge its parts into the result; faded parts are also merged into `far`."""
    if len(task.blocks) == 1 and len(task.blocks[0].calls) == 1:  # a prompt on which nothing is far
        (call,) = task.blocks[0].calls
        region = task.regions[call.region]
        whole = not call.pieces and (call.key, call.columns) == (0, k.shape[2])
        if whole and region.query.is_stock and region.key.is_stock and region.fade is None:
            return task.backend.forward(q, k, v, call.shape == "causal", task.scale)
    result = _empty(q)
    fused = q.is_cuda and q.dtype != torch.float64
    shift, fades = task.shift, task.fade is not None
    begun: set[int] = set()
    for rows in (_rows(block.rows, task.queries) for block in task.blocks if not block.calls):
        result.out[:, :, rows], result.lse[:, :, rows] = 0.0, -torch.inf
    for slab, work in task.passes():
        turned: dict[Kind, Tensor] = {}
        for block, calls in work:
            here = _rows(block.rows, task.queries)
            total = result.rows(here)
            parts = _forward_block(task, q, k, v, block, calls, slab, turned)
            if block.rows.start in begun:  # what is there is of far keys only, until the last pass
                parts.insert(0, total._replace(faded=fades))
            begun.add(block.rows.start)
            if slab.start:
                assert not fades or all(part.faded for part in parts), "near keys come with the first slab"
                _merged([part._replace(faded=False) for part in parts], total, None, fused)
                continue
            faded = [part for part in parts if part.faded]
            if faded and (far is not None or len(parts) > MOST):
                together = total if far is None else far.rows(here)
                _merged([part._replace(faded=False) for part in faded], together, None, fused)
                faded = [together._replace(faded=True)]
            less = None if shift is None or not faded else shift[:, here]
            _merged([*faded, *(part for part in parts if not part.faded)], total, less, fused)
            del parts, faded  # before the next block's are made
    return result.out, result.lse


def _merged(parts: list[Part], total: Part, shift: Tensor | None, fused: bool) -> None:
    """Merge any number of parts into `total`, which may be the first; beyond MOST of them only the first may fade."""
    merge_checked(parts[:MOST], total.out, total.lse, fade=shift, fused=fused)
    for n in range(MOST, len(parts), MOST - 1):
        merge_checked([total, *parts[n : n + MOST - 1]], total.out, total.lse, fused=fused)


def _forward_block(
    task: Task, q: Tensor, k: Tensor, v: Tensor, block: Block, calls: list[Call], slab: range, far: dict[Kind, Tensor]
) -> list[Part]:
    """Run the calls of a block, region by region, so that one rotated copy of the queries lives at a time."""
    stock = q[:, :, _rows(block.rows, task.queries)]
    of, turned = PLAIN, stock
    parts = []
    for call in calls:
        region = task.regions[call.region]
        if (kind := query_kind(region)) != of:
            of, turned = kind, task.turned(stock, kind, block.rows)
        keys, first = _keys(task, k, (region.key, None), call, slab, far)
        start = call.query - block.rows.start
        parts.append(
            _run(
                task,
                call,
                start,
                _rows_of(task, turned, start, call),
                _keys_of(task, keys, call.key - first, call),
                _keys_of(task, v, call.key, call),
            )
        )
    return parts


def _keys(task: Task, k: Tensor, kind: Kind, call: Call, slab: range, far: dict[Kind, Tensor]) -> tuple[Tensor, int]:
    """Return rotated keys that include those of the call, and the position of the first."""
    if kind == PLAIN:
        return k, 0
    span = range(call.key, call.key + (call.times - 1) * call.step + call.columns)
    if slab.start <= span.start and span.stop <= slab.stop:
        if kind not in far:
            far[kind] = task.turned(k[:, :, slab.start : slab.stop], kind, slab)
        return far[kind], slab.start
    return task.turned(k[:, :, span.start : span.stop], kind, span), span.start


def _run(task: Task, call: Call, start: int, q: Tensor, k: Tensor, v: Tensor) -> Part:
    """Return one library call; its rows begin at `start` in the block. Rows of an upper triangle are reversed."""
    if call.pieces:
        out, lse = task.pack(call).forward(task.backend, q, k, v, call.shape == "causal", task.scale)
    elif call.shape == "upper":
        out, lse = task.backend.forward(flipped(q), flipped(k), flipped(v), True, task.scale)
    else:
        out, lse = task.backend.forward(q, k, v, call.shape == "causal", task.scale)
    faded = task.regions[call.region].fade is not None
    return Part(out, lse, start, call.step if call.times > 1 else 0, faded, call.shape == "upper")


def backward(
    task: Task, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, *, far: Part | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run every block's backward with the whole row's output and log-sum-exp; sums are in at least float32.

    A call computes P = exp(s - lse) and P (dP - rowsum(do · out)). If parts fade, with e = 1 - 1/τ and ℓ, o their own
    log-sum-exp and output, their weights are exp(τ s - e ℓ - loss - lse), and since ℓ also depends on the scores, (1 -
    e) out + e o replaces out.
    """
    alone = q, k, v
    q, k, v, out, lse, do = (as_heads(x, task) for x in (q, k, v, out, lse, do))
    dq, dk, dv = room(q), room(k), room(v)
    if q.shape[0] == 1 and sum(len(block.calls) for block in task.backward_blocks) > 1:
        q, out, do = by_token(q), by_token(out), by_token(do)  # once, and no call copies its own rows of them
    keys, values = {PLAIN: _Sum(k)}, _Sum(v)
    turned_keys = {PLAIN: k}
    shift = task.shift
    for block in task.backward_blocks:
        here = _rows(block.rows, task.queries)
        whole = Part(out, lse).rows(here)
        faded = whole
        if shift is not None and any(task.regions[call.region].fade is not None for call in block.calls):
            faded = _seen_by_faded(whole, far and far.rows(here), shift[:, here], task.shares[..., here])
        turned = {PLAIN: q[:, :, here]}
        parts: dict[Kind, list[Part]] = {PLAIN: []}
        for call in block.calls:
            region = task.regions[call.region]
            kind, key = query_kind(region), (region.key, None)
            if kind not in turned:
                turned[kind], parts[kind] = task.turned(turned[PLAIN], kind, block.rows), []
            if key not in keys:
                keys[key], turned_keys[key] = _Sum(k), task.turned(k, key, task.keys)
            start = call.query - block.rows.start
            seen = whole if region.fade is None else faded
            gq, gk, gv = _gradients(
                task,
                call,
                _rows_of(task, do[:, :, here], start, call),
                _rows_of(task, turned[kind], start, call),
                _keys_of(task, turned_keys[key], call.key, call),
                _keys_of(task, v, call.key, call),
                _rows_of(task, seen.out, start, call),
                _rows_of(task, seen.lse[..., None], start, call)[..., 0],
            )
            step, backwards = call.step if call.times > 1 else 0, call.shape == "upper"
            parts[kind].append(Part(gq, gq, start, step, flipped=backwards))
            keys[key].add(Part(gk, gk, call.key, step, flipped=backwards))
            values.add(Part(gv, gv, call.key, step, flipped=backwards))
        _add_up(task, parts, block.rows, dq[:, :, here])
    _add_up(task, {kind: total.rest() for kind, total in keys.items()}, task.keys, dk)
    add_up(values.rest(), dv)
    dq, dk, dv = (_apart(x, like) for x, like in zip((dq, dk, dv), alone, strict=True))
    return dq, dk, dv


def _add_up(task: Task, parts: dict[Kind, list[Part]], tokens: range, out: Tensor) -> None:
    """Write the sum of the gradients of these tokens' vectors, rotated back to where stock RoPE put them."""
    plain = list(parts[PLAIN])
    whole = fuses(out) and 2 * len(task.frequencies) == out.shape[3]  # no dimensions beside those that turn
    for n, (kind, turned) in enumerate(parts.items()):
        if kind == PLAIN:
            continue
        if whole and n + 1 == len(parts):
            table = task.table(kind, tokens, out.dtype)
            add_up(plain, out, turned, table, interleaved=task.law.rotary.interleaved)
            return
        total = torch.empty(out.shape, dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        add_up(turned, total)
        back = task.turned(total, kind, tokens, back=True)
        plain.append(Part(back, back))
    add_up(plain, out)


def _seen_by_faded(
    whole: Part, far: Part | None, shift: Float[Tensor, "2 t"], shares: Float[Tensor, "2 1 1 t"]
) -> Part:
    """Return the output and the log-sum-exp that the backward of a faded part sees."""
    eased, loss = shift
    if far is None:  # no focus, so e = 0
        return Part(whole.out, whole.lse + loss)
    out, scratch = torch.empty_like(whole.out), torch.empty_like(whole.lse)
    mixed = [Part(x, share.expand_as(scratch)) for x, share in zip((whole.out, far.out), shares, strict=True)]
    merge_checked(mixed, out, scratch, fused=out.is_cuda and out.dtype != torch.float64)  # in one pass over memory
    return Part(out, whole.lse + eased * far.lse + loss)


def _gradients(
    task: Task, call: Call, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the backward of one library call; for an upper triangle, with its rows and columns reversed."""
    if call.pieces:
        return task.pack(call).backward(task.backend, do, q, k, v, out, lse, call.shape == "causal", task.scale)
    if call.shape != "upper":
        return task.backend.backward(do, q, k, v, out, lse, call.shape == "causal", task.scale)
    do, q, k, v, out = (flipped(x) for x in (do, q, k, v, out))
    return task.backend.backward(do, q, k, v, out, lse.flip(2), True, task.scale)


def _rows(rows: range, queries: range) -> slice:
    return slice(rows.start - queries.start, rows.stop - queries.start)


def _rows_of(task: Task, x: Tensor, start: int, call: Call) -> Tensor:
    """Return the rows of x that belong to a call's queries, the first of which is token `start`."""
    return task.pack(call).rows_of(x) if call.pieces else _window(x, start, call.rows, call)


def _keys_of(task: Task, x: Tensor, start: int, call: Call) -> Tensor:
    """Return the rows of x that belong to a call's keys, the first of which is token `start`."""
    return task.pack(call).keys_of(x) if call.pieces else _window(x, start, call.columns, call)


def _window(x: Tensor, start: int, length: int, call: Call) -> Tensor:
    """Return x[:, :, start : start + length], or its repetitions as a batch of (overlapping) views."""
    if call.times == 1:
        return x[:, :, start : start + length]
    _, h, t, d = x.stride()
    shape = (call.times, x.shape[1], length, x.shape[3])
    return x.as_strided(shape, (call.step * t, h, t, d), x.storage_offset() + start * t)


class _Sum:
    """Accumulates the gradient of all keys or values from calls.

    Parts wait until there are as many as one pass over memory takes, or WAITING bytes of them: a pass for each would
    keep the host busier than the GPU.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.sum: Tensor | None = None
        self.parts: list[Part] = []
        self.bytes = 0

    def add(self, part: Part) -> None:
        """Add a part that `_window` showed. Repetitions overlap, so each is added in slices of a step, which do not."""
        pieces = part.out.split(part.step, dim=2) if part.step else [part.out]
        assert len(pieces) == 1 or not part.flipped, "the steps of upper triangles do not overlap"
        if self.parts and (len(self.parts) + len(pieces) >= MOST or self.bytes + part.out.nbytes > WAITING):
            self._settle()
        self.parts += [part._replace(out=x, lse=x, start=part.start + n * part.step) for n, x in enumerate(pieces)]
        self.bytes += part.out.nbytes

    def rest(self) -> list[Part]:
        """Return what is still to be added up."""
        return self.parts if self.sum is None else [Part(self.sum, self.sum), *self.parts]

    def _settle(self) -> None:
        """Add up the waiting parts, in at least float32."""
        if self.sum is None:
            precise = torch.promote_types(self.like.dtype, torch.float32)
            self.sum = torch.empty(self.like.shape, dtype=precise, device=self.like.device)
            add_up(self.parts, self.sum)
        else:
            first = min(part.start for part in self.parts)
            last = max(part.start + (part.out.shape[0] - 1) * part.step + part.out.shape[2] for part in self.parts)
            here = self.sum[:, :, first:last]
            add_up([Part(here, here), *(part._replace(start=part.start - first) for part in self.parts)], here)
        self.parts, self.bytes = [], 0
