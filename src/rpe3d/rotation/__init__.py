"""The rotation of queries and keys by angles: its specification and its fused kernel.

    cos, sin = cos_sin(angles)              # float64 angles [t, l] or [b, t, l], one per token and pair
    q, k = rotate(q, k, cos, sin)           # q [b, hq, t, d], k [b, hk, t, d]

Triton is imported on the first call that uses it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rpe3d.config import ConfigError, choice, flag, real
from rpe3d.rotation import reference

__all__ = ["available", "cos_sin", "rotate"]

IMPLS = ("auto", "reference", "triton")
_VECTORS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TABLES = (torch.float32, torch.float64)
_HAS_TRITON = find_spec("triton") is not None


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = False, impl: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Rotate pair l of every head by the angle of its token: (x₁ cos - x₂ sin, x₂ cos + x₁ sin).

    q is [b, hq, t, d]; k is [b, hk, t, d] or None; cos and sin are [t, l], or [b, t, l] (b may be 1). The first 2l
    dimensions are rotated, in pairs (i, i + l), or (2i, 2i + 1) if `interleaved`; the others pass through. Gradients
    flow to q and k, not to the angles. `impl` is "reference" (the specification in plain PyTorch), "triton" (the fused
    kernel) or "auto" (whichever `available` names).
    """
    choice("impl", impl, IMPLS)
    interleaved = flag("interleaved", interleaved)
    _check(q, k, cos, sin)
    if impl == "auto":
        impl = available(q.device, torch.promote_types(q.dtype, cos.dtype))
    if impl == "reference":
        return reference.rotate(q, k, cos, sin, interleaved=interleaved)
    _check_kernel(q, cos)
    from rpe3d.rotation import kernel

    return kernel.rotate(q, k, cos, sin, interleaved=interleaved)


def cos_sin(angles: Tensor, *, scaling: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the cos and sin tables for `rotate`: float64, times `scaling` (YaRN's attention factor), then cast."""
    if angles.dtype != torch.float64:
        raise ConfigError(f"angles are {angles.dtype}, but long contexts need float64", "compute the angles in float64")
    if dtype not in _TABLES:
        raise ConfigError(f"dtype of the table is {dtype}, not float32 or float64", "leave dtype out")
    scaling = real("scaling", scaling, above=True)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def available(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return the implementation that impl="auto" picks for this device and dtype: "triton" or "reference"."""
    fused = torch.device(device).type == "cuda" and dtype in _VECTORS and dtype != torch.float64 and _HAS_TRITON
    return "triton" if fused else "reference"


def _check(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    _check_vectors("q", q, q)
    if k is not None:
        _check_vectors("k", k, q)
    _check_table("cos", cos, q)
    _check_table("sin", sin, q)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ConfigError(
            f"cos is {cos.dtype} {list(cos.shape)} but sin is {sin.dtype} {list(sin.shape)}",
            "make both with cos_sin() from the same angles",
        )


def _check_vectors(name: str, x: Tensor, q: Tensor) -> None:
    if x.dim() != 4:
        raise ConfigError(
            f"{name} has shape {list(x.shape)}, which is not [batch, heads, tokens, head dim]",
            f"reshape {name} to four dimensions",
        )
    if x.dtype not in _VECTORS:
        raise ConfigError(
            f"{name} is {x.dtype}, which cannot be rotated", f"cast {name} to bfloat16, float16, float32 or float64"
        )
    for what, dim in (("batch", 0), ("tokens", 2), ("head dim", 3)):
        if x.shape[dim] != q.shape[dim]:
            raise ConfigError(
                f"{name} has {what} {x.shape[dim]} but q has {q.shape[dim]}",
                "q and k may differ only in the number of heads",
            )
    if x.dtype != q.dtype or x.device != q.device:
        raise ConfigError(
            f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}", f"move {name} with {name}.to(q)"
        )


def _check_table(name: str, table: Tensor, q: Tensor) -> None:
    b, _, tokens, dim = q.shape
    if table.dim() not in (2, 3):
        raise ConfigError(
            f"{name} has shape {list(table.shape)}, which is neither [tokens, pairs] nor [batch, tokens, pairs]",
            "make it with cos_sin() from angles of that shape",
        )
    if table.dtype not in _TABLES:
        raise ConfigError(
            f"{name} is {table.dtype}, which blurs the angles of long contexts", "use the float32 table of cos_sin()"
        )
    if table.device != q.device:
        raise ConfigError(f"{name} is on {table.device} but q is on {q.device}", "move both to one device")
    if table.shape[-2] != tokens:
        raise ConfigError(
            f"{name} has {table.shape[-2]} tokens but q has {tokens}", "pass the angles of exactly these tokens"
        )
    if table.dim() == 3 and table.shape[0] not in (1, b):
        raise ConfigError(
            f"{name} has batch {table.shape[0]} but q has {b}", "pass one table for each sequence, or one for all"
        )
    if not 1 <= table.shape[-1] <= dim // 2:
        raise ConfigError(
            f"{name} has {table.shape[-1]} pairs, outside [1, {dim // 2}] for head dim {dim}",
            "pass one angle for each pair of dimensions, without repeating them",
        )
    if table.requires_grad:
        raise ConfigError(
            f"{name} requires a gradient, but none flows to the angles",
            f"pass {name}.detach(), or rotate q and k yourself",
        )


def _check_kernel(q: Tensor, cos: Tensor) -> None:
    if not _HAS_TRITON:
        raise ConfigError('impl is "triton" but Triton is not installed', 'install triton, or pass impl="auto"')
    if torch.float64 in (q.dtype, cos.dtype):
        raise ConfigError(
            'impl is "triton" but a tensor is float64, and the kernel computes in float32',
            'cast it to float32, or pass impl="reference"',
        )
    if q.device.type != "cuda":
        from rpe3d.rotation import kernel

        if not kernel.INTERPRETED:
            raise ConfigError(
                f'impl is "triton" but q is on {q.device}, where the kernel does not run',
                'move it to a GPU, or pass impl="auto"',
            )
