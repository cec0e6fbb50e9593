"""Computes one attention from partial ones of the same rows: a softmax over all keys from softmaxes over some of them.

Used by `blocked`: one kernel on a GPU, PyTorch elsewhere. Equals `reference` over all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rpe3d.config import ConfigError, choice
from rpe3d.rotation import rotate

IMPLS = ("auto", "torch", "triton")
MOST = 12
ROOM = 2**28
"""Bytes that copies of gradients in float32 may take."""
_HAS_TRITON = find_spec("triton") is not None


class Part(NamedTuple):
    """The output of attention over some keys and the natural log of its denominator, for some of the rows.

    Row r of `out` [b, h, rows, e] is row start + r of the result. With `step`, the first dimension is no batch but
    repetitions: row r of out[n] is row start + n · step + r of the only sequence.
    """

    out: Float[Tensor, "n h rows e"]
    lse: Float[Tensor, "n h rows"]
    start: int = 0
    step: int = 0
    faded: bool = False
    """It is one of those that `fade` applies to, of which the merge has two numbers for every row."""
    flipped: bool = False
    """Its rows stand backwards, in each repetition: row r is the r-th from the end."""

    def rows(self, rows: slice) -> Part:
        """Return some rows of a whole result: views."""
        return Part(self.out[:, :, rows], self.lse[:, :, rows])


def merge(
    parts: Sequence[Part | tuple[Tensor, Tensor]],
    out: Float[Tensor, "b h t e"],
    lse: Float[Tensor, "b h t"],
    *,
    sinks: Float[Tensor, " h"] | None = None,
    fade: Float[Tensor, "2 t"] | None = None,
    impl: str = "auto",
) -> None:
    """Return out = Σ_i o_i exp(lse_i - lse), lse = log Σ_i exp(lse_i), written into the tensors given.

    One to twelve parts, any strides with a contiguous last dimension. A row that a part does not hold, or where lse_i
    is -inf, was not seen by it, and o_i is not looked at, whatever it holds; seen by none, a row is zeros and -inf.
    `sinks` is one logit per head that joins the denominator alone. `fade` is `Fade.shift` of every row: with l the
    log-sum-exp of all parts that are `faded`, their lse_i first lose fade[0] · l + fade[1]. `out` and `lse` may be
    those of one of the parts (the very same memory: every element is read before it is written), and may not overlap
    them otherwise. No gradient flows. impl: "torch" is plain operations, "triton" one pass over memory in float32,
    "auto" the kernel on CUDA.
    """
    choice("impl", impl, IMPLS)
    whole = [Part(*part) for part in parts]
    _check(whole, out, lse, sinks, fade)
    exact = torch.float64 in (out.dtype, lse.dtype, *(part.out.dtype for part in whole))
    if impl == "triton" and (exact or not _HAS_TRITON):
        problem = "a tensor is float64" if exact else "Triton is not installed"
        raise ConfigError(f'impl is "triton" but {problem}', 'pass impl="auto"')
    fused = impl == "triton" or (impl == "auto" and out.is_cuda and not exact)
    merge_checked(whole, out, lse, sinks, fade, fused=fused)


def merge_checked(
    parts: Sequence[Part],
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    fade: Tensor | None = None,
    *,
    fused: bool,
) -> None:
    """Return `merge` for arguments known to be right, as those of the blocks are, of which there are many."""
    with torch.no_grad():
        if not (fused and _HAS_TRITON):
            _plain(parts, out, lse, sinks, fade)
            return
        from rpe3d.attention.merge import kernel

        kernel.merge(parts, out, lse, sinks, fade)


def add_up(
    parts: Sequence[Part],
    out: Float[Tensor, "b h t e"],
    turned: Sequence[Part] = (),
    table: tuple[Float[Tensor, "t l"], Float[Tensor, "t l"]] | None = None,
    *,
    interleaved: bool = False,
) -> None:
    """Return out = Σ_i o_i over the parts that hold a row, zeros where none does: how gradients of parts meet.

    To it comes the sum of those that are `turned`, turned back by a table of cos and sin. Written into the tensor
    given, in one pass over memory on CUDA; any number of parts, whose `lse` is not looked at; sums in at least float32.
    """
    assert table is not None or not turned, "what is turned is turned back by a table"
    precise = torch.promote_types(out.dtype, torch.float32)
    if not parts and not turned:
        out.zero_()
        return
    if not fuses(out):
        total = torch.zeros(out.shape, dtype=precise, device=out.device)
        for part in turned:
            for rows, values in _held(part, part.out):
                total[:, :, rows] += values
        if table is not None:
            total = rotate(total, None, table[0], -table[1], interleaved=interleaved)[0]
        for part in parts:
            for rows, values in _held(part, part.out):
                total[:, :, rows] += values
        out.copy_(total)
        return
    from rpe3d.attention.merge import kernel

    while len(parts) + len(turned) > MOST:  # some of them first, without rounding
        many, turns = (parts, False) if len(parts) > len(turned) else (turned, True)
        some = torch.empty(out.shape, dtype=precise, device=out.device)
        kernel.add_up(many[:MOST], some)
        many = [Part(some, some), *many[MOST:]]
        parts, turned = (parts, many) if turns else (many, turned)
    kernel.add_up(parts, out, turned, table, interleaved=interleaved)


def fuses(out: Tensor) -> bool:
    """Say whether `add_up` is one kernel for such a result."""
    return out.is_cuda and _HAS_TRITON and out.dtype != torch.float64 and out.shape[3] % 2 == 0


def products(do: Float[Tensor, "b h t e"], out: Float[Tensor, "b h t e"]) -> Float[Tensor, "b h t"]:
    """Return dO · O of every row in at least float32, a few heads at a time."""
    b, h, t, e = out.shape
    precise = torch.promote_types(out.dtype, torch.float32)
    made = torch.empty(b, h, t, dtype=precise, device=out.device)
    step = max(1, ROOM // (16 * b * t * e))
    for start in range(0, h, step):
        some = slice(start, start + step)
        made[:, some] = (do[:, some].to(precise) * out[:, some].to(precise)).sum(-1)
    return made


def _plain(parts: Sequence[Part], out: Tensor, lse: Tensor, sinks: Tensor | None, fade: Tensor | None) -> None:
    """Return the specification of the kernel: everything is computed before anything is written."""
    precise = torch.promote_types(lse.dtype, torch.float32)
    logs = torch.full((len(parts) + 1, *lse.shape), -torch.inf, dtype=precise, device=lse.device)
    for log, part in zip(logs, parts, strict=False):
        for rows, seen in _held(part, part.lse):
            log[:, :, rows] = seen
    faded = [i for i, part in enumerate(parts) if part.faded]
    if faded and fade is not None:
        together = logs[faded].logsumexp(0)
        logs[faded] -= fade[0] * together.masked_fill(together == -torch.inf, 0.0) + fade[1]
    if sinks is not None:
        logs[-1] = sinks.to(precise)[None, :, None]
    merged = logs.logsumexp(0)
    weights = torch.exp(logs - merged.masked_fill(merged == -torch.inf, 0.0))
    result = torch.zeros(out.shape, dtype=precise, device=out.device)
    for weight, part in zip(weights, parts, strict=False):
        for (rows, seen), (_, log) in zip(_held(part, part.out), _held(part, part.lse), strict=True):
            values = seen.to(precise).masked_fill((log == -torch.inf)[..., None], 0.0)
            result[:, :, rows] += values * weight[:, :, rows, None]
    out.copy_(result)
    lse.copy_(merged)


def _held(part: Part, x: Tensor) -> list[tuple[slice, Tensor]]:
    """Return which rows of the result the part holds, and its values there."""
    x = x.flip(2) if part.flipped else x
    if not part.step:
        return [(slice(part.start, part.start + x.shape[2]), x)]
    starts = (part.start + n * part.step for n in range(x.shape[0]))
    return [(slice(a, a + x.shape[2]), x[n : n + 1]) for n, a in enumerate(starts)]


def _check(parts: Sequence[Part], out: Tensor, lse: Tensor, sinks: Tensor | None, fade: Tensor | None) -> None:
    if not 1 <= len(parts) <= MOST:
        raise ConfigError(f"there are {len(parts)} parts", f"merge 1 to {MOST} at a time")
    if out.ndim != 4 or lse.shape != out.shape[:3] or out.stride(3) != 1:
        raise ConfigError(
            f"out and lse are {tuple(out.shape)} and {tuple(lse.shape)}",
            "pass [b, h, t, e], contiguous in e, and [b, h, t]",
        )
    b, h, t, e = out.shape
    for i, part in enumerate(parts):
        o, rows = part.out, part.out.shape[2]
        last = part.start + rows + (o.shape[0] - 1) * part.step
        batch = b == 1 if part.step else o.shape[0] == b
        if not batch or o.shape[1] != h or o.shape[3] != e or part.lse.shape != o.shape[:3] or not 0 < last <= t:
            raise ConfigError(
                f"part {i} is {tuple(o.shape)} and {tuple(part.lse.shape)} from row {part.start}, out {(b, h, t, e)}",
                "pass parts [b, h, rows, e] and [b, h, rows] inside out",
            )
        if o.stride(3) != 1:
            raise ConfigError(f"part {i} is not contiguous in its last dimension", "call .contiguous()")
    if sinks is not None and sinks.shape != out.shape[1:2]:
        raise ConfigError(f"sinks is {tuple(sinks.shape)}", f"pass one number per head, {tuple(out.shape[1:2])}")
    if fade is None and any(part.faded for part in parts):
        raise ConfigError("a part is faded, but there is no fade", "pass two numbers per row")
    if fade is not None and (fade.shape != (2, t) or fade.stride(1) != 1):
        raise ConfigError(f"fade is {tuple(fade.shape)}", f"pass two numbers per row, {(2, t)}, contiguous in rows")
