"""Find out how a model uses positions by running it, not by its name.

With one token, attention returns that token's value whatever the position, so the hidden states of two forward passes
of the same token at two positions are equal, and they differ only in how each layer has rotated q and k. Watching what
arrives at the attention registry therefore shows, layer by layer, whether and how the model rotates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rpe3d.config import ConfigError
from rpe3d.models.carried import kind_of, parameters_of
from rpe3d.models.noted import positions_given
from rpe3d.rotation import cos_sin, rotate

NAME = "rpe3d-probe"
POSITION = 5
_LOCAL = torch.empty(0)
"""Mask of a layer that sees a window or a chunk of the text."""
KNOWN = ("cache_position", "s_aux", "attention_mask", "position_ids", "num_items_in_batch", "shift_labels")
"""Arguments that a layer may pass without changing its attention; the last two are for the loss."""
UNREACHED = "its attention does not go through transformers' attention registry"
UNTURNED = "none of its layers with full attention rotates"
OVERFLOW = "they overflow, although all of its weights are finite"
MEND = "copy or convert the weights again; float16 overflows where bfloat16 does not"
_one_at_a_time = threading.RLock()
"""Threads that probe models at the same time would send their layers to whichever registered last."""
CLOSE = 1e-3  # relative, in float32; a wrong pairing is off by 0.5
ROUNDINGS = 6.4  # in half precision: nine times the error of the families that are supported, 0.05 in bfloat16


@dataclass(frozen=True)
class Findings:
    """The rotary layout of a model's layers."""

    rotaries: tuple[Any, ...]
    """Modules that compute cos and sin for the layers that a law changes."""
    head_dim: int
    frequencies: Tensor
    """Frequencies θ_l in use, float64."""
    table_dtype: torch.dtype
    """dtype in which the model keeps its frequencies."""
    interleaved: bool
    pieces: tuple[tuple[int, int], ...]
    """Slices of a head in the order that a law expects, the rotated pairs first; empty if they are already in it."""
    unturned_pairs: int
    """Pairs at the end of the table whose frequency is 0."""
    notes: bool
    """Whether positions must be noted where cos and sin are computed, since attention does not receive them."""
    layers: int
    """Number of layers whose attention a law changes."""
    windowed: int
    """Number of layers that keep their own sliding window."""
    unrotated: tuple[int, ...]
    """Indices of layers without rotation, which are left unchanged."""


@dataclass(frozen=True)
class Seen:
    """What one layer passed to attention."""

    layer: int
    q: Tensor
    k: Tensor
    windowed: bool
    positions: bool


class Head(NamedTuple):
    """How the dimensions of a head pair up."""

    interleaved: bool
    pieces: tuple[tuple[int, int], ...]


def probe(model: Any, config: Any) -> Findings:
    """Find out how a model rotates; refuse a model that cannot take a law, with the reason."""
    family = type(model).__name__
    kind = kind_of(config)
    own = getattr(config, "rope_parameters", None) or {}
    if own.get(kind, own) is None:
        raise refusal(family, UNTURNED)
    if any(name.endswith("indexer") for name, _ in model.named_modules()):
        raise refusal(family, "an indexer of its own chooses the keys that a query sees, and no law reaches it")
    tables = [m for m in model.modules() if hasattr(m, "inv_freq") or hasattr(m, f"{kind}_inv_freq")]
    made_for_text = [m for m in tables if _same_rotation(getattr(m, "config", config), config)]
    if not made_for_text:
        raise refusal(
            family,
            "its cos and sin are made from other configs than the one of its text"
            if tables
            else "none of its modules keeps rotary frequencies where transformers' own do (inv_freq)",
        )
    far = POSITION + _switch(config)
    with _called(tables) as used:
        first, second = (_watch(model, config, family, position) for position in (0, far))
    rotaries = tuple(module for module in made_for_text if module in used)  # a picture's is not, with text alone
    if any(module not in made_for_text for module in used):
        raise refusal(family, "its layers are turned by several frequencies, and a law has one set")
    if not first or len(first) != len(second) or not rotaries:
        raise refusal(family, UNREACHED)
    if any(not seen.q.isfinite().all() for seen in first + second):
        raise ConfigError(f"the queries of {family} are not finite: {not_finite(model) or OVERFLOW}", MEND)
    full = [pair for pair in zip(first, second, strict=True) if not pair[0].windowed]
    if not full:
        raise refusal(family, "all of its layers have a sliding window, so none reaches further than it")
    turned = [(a, b) for a, b in full if not torch.equal(a.q, b.q)]
    if not turned:
        raise refusal(family, UNTURNED)
    if any(_drops_keys(config, a.layer) for a, _ in turned):
        raise refusal(family, "its cache keeps a window of keys, although its attention looks back further")
    positions = list(used.values())
    if not all(a.positions for a, _ in turned) and any(x is None for x in positions):
        raise refusal(family, "it passes no position ids to its attention, so a law cannot know where tokens stand")
    table = table_of(rotaries[0], kind)
    theta = table.detach().double().cpu()
    theta = theta[: int((theta != 0).sum())]
    vectors = [(x, y) for a, b in turned for x, y in ((a.q, b.q), (a.k, b.k))]
    heads = {_head(x, y, far * theta) for x, y in vectors}
    head = heads.pop()
    if head is None or heads or not _only_turned(vectors, head, theta.numel()):
        raise refusal(family, "its pairs of dimensions, or the way in which they turn, are none that a law knows")
    return Findings(
        rotaries=rotaries,
        head_dim=turned[0][0].q.shape[-1],
        frequencies=theta,
        table_dtype=table.dtype,
        interleaved=head.interleaved,
        pieces=head.pieces,
        unturned_pairs=table.numel() - theta.numel(),
        notes=not all(a.positions for a, _ in turned) or any(x is not None and x.ndim > 2 for x in positions),
        layers=len(turned),
        windowed=len(first) - len(full),
        unrotated=tuple(a.layer for a, b in full if torch.equal(a.q, b.q)),
    )


def table_of(rotary: Any, kind: str) -> Tensor:
    """Return the frequencies that a module keeps for the full-attention layers."""
    theta: Tensor = rotary.inv_freq if hasattr(rotary, "inv_freq") else getattr(rotary, f"{kind}_inv_freq")
    return theta


def _same_rotation(config: Any, own: Any) -> bool:
    """Return whether a module was made from a model's own config, or from a copy that rotates in the same way."""
    same = type(config) is type(own) and getattr(config, "rope_parameters", None) == own.rope_parameters
    return config is own or bool(same)


def _drops_keys(config: Any, layer: int) -> bool:
    """Return whether the cache that transformers makes for a model drops the first keys of a layer."""
    from transformers import DynamicCache

    layers = DynamicCache(config=config).layers
    return layer < len(layers) and bool(getattr(layers[layer], "is_sliding", False))


def _switch(config: Any) -> int:
    """Return the position from which a model uses other frequencies, those that a law builds on (longrope)."""
    own = parameters_of(config) or {}
    return int(own["original_max_position_embeddings"]) if own.get("rope_type") == "longrope" else 0


def _head(at_zero: Tensor, at_position: Tensor, angles: Tensor) -> Head | None:
    """Return how a vector was rotated by these angles; None if in no way that a law supports."""
    close = max(CLOSE, ROUNDINGS * torch.finfo(at_zero.dtype).eps)
    vector, truth = at_zero.double().cpu(), at_position.double().cpu()
    n, d = angles.numel(), vector.shape[-1]
    if 2 * n > d:
        return None
    cos, sin = cos_sin(angles[None], dtype=torch.float64)
    for interleaved, pieces in _heads(n, d):
        before, after = (torch.cat([x[..., a:b] for a, b in pieces], -1) for x in (vector, truth))
        turned, _ = rotate(before, None, cos, sin, interleaved=interleaved, impl="reference")
        if (turned - after).norm() <= close * (before - after).norm():
            return Head(interleaved, () if pieces == [(0, d)] else tuple(pieces))
    return None


def _only_turned(vectors: list[tuple[Tensor, Tensor]], head: Head, n: int) -> bool:
    """Return whether each pair was turned alike in all heads and layers, but for rounding.

    A norm after the rotation scales the two numbers of a pair differently, by one part in a hundred where a checkpoint
    has hardly trained it: `_head` takes that for rounding in bfloat16. The turn, a complex number, is measured here,
    since the model rounds cos and sin too. Pairs count by its sine: one that has hardly turned shows no norm.
    """
    before, after = ([_pairs(x, head, n) for x in times] for times in zip(*vectors, strict=True))
    x, y = torch.cat(before), torch.cat(after)
    turn = (y * x.conj()).sum(0) / x.abs().square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    close = max(CLOSE, torch.finfo(vectors[0][0].dtype).eps)  # rounding comes to half of that
    errors = [(((y - turn * x) * turn.imag).norm(), (x * turn.imag).norm()) for x, y in zip(before, after, strict=True)]
    return all(bool(error <= close * size) for error, size in errors)


def _pairs(vector: Tensor, head: Head, n: int) -> Tensor:
    """Return the `n` pairs of every head as complex numbers."""
    x = vector.double().cpu()
    x = torch.cat([x[..., a:b] for a, b in head.pieces or ((0, x.shape[-1]),)], -1)[..., : 2 * n].reshape(-1, 2 * n)
    return torch.complex(x[:, ::2], x[:, 1::2]) if head.interleaved else torch.complex(x[:, :n], x[:, n:])


def _heads(n: int, d: int) -> Iterator[tuple[bool, list[tuple[int, int]]]]:
    """Yield the ways in which `n` pairs of `d` dimensions rotate in published models, Llama's first.

    Pairs are halves or neighbours, of the first dimensions or the last ones (DeepSeek's latent attention). Halves may
    rotate backwards (nanochat), which is forwards with the halves exchanged; or each may be the first part of one half
    of the whole head (Gemma 4).
    """
    for start in dict.fromkeys((0, d - 2 * n)):
        middle, end = start + n, start + 2 * n
        for interleaved in (False, True):
            yield interleaved, _joined((start, end), (0, start), (end, d))
        yield False, _joined((middle, end), (start, middle), (0, start), (end, d))
    half = d // 2
    yield False, _joined((0, n), (half, half + n), (n, half), (half + n, d))


def _joined(*pieces: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the non-empty slices, with neighbours joined."""
    kept: list[tuple[int, int]] = []
    for first, end in pieces:
        if kept and kept[-1][1] == first:
            first = kept.pop()[0]
        if end > first:
            kept.append((first, end))
    return kept


def _watch(model: Any, config: Any, family: str, position: int) -> list[Seen]:
    """Run one token at a position and record what arrives at attention."""
    seen: list[Seen] = []

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        sliding_window: int | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if query.shape[-1] != key.shape[-1] or query.shape[2] != 1 or query.shape[1] % key.shape[1]:
            raise ConfigError("its queries and keys do not have the shapes of a plain decoder", "")
        if strange := unknown(kwargs):
            raise ConfigError(f"its attention also takes {strange}, which laws do not support", "")
        layer = int(getattr(module, "layer_idx", len(seen)))
        windowed = sliding_window is not None or attention_mask is _LOCAL
        seen.append(Seen(layer, query.detach().clone(), key.detach().clone(), windowed, position_ids is not None))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    with _attention(config, record):
        run_one_token(model, family, position)
    return seen


def not_finite(model: Any) -> str | None:
    """Describe the first weight that holds NaN or infinity; None if all numbers are finite.

    It checks only what this process holds: not offloaded weights, nor the parts of other processes.
    """
    for name, whole in [*model.named_parameters(), *model.named_buffers()]:
        tensor = whole.to_local() if hasattr(whole, "to_local") else whole
        if tensor.is_floating_point() and tensor.device.type != "meta" and not (finite := tensor.isfinite()).all():
            return f"{name} holds NaN or infinity ({int((~finite).sum())} of its numbers)"
    return None


def run_one_token(
    model: Any, family: str, position: int = 0, how: str = "by itself", past_key_values: Any = None
) -> None:
    """Run a forward of one token; refuse the model if it fails."""
    device = _input_device(model)
    given = {
        "input_ids": torch.ones(1, 1, dtype=torch.long, device=device),
        "position_ids": torch.full((1, 1), position, device=device),
        "use_cache": past_key_values is not None,
        "past_key_values": past_key_values,
    }
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(**given)
    except Exception as error:  # whatever a family does with one plain token, it is not ours to go on with
        line = (str(error).strip().splitlines() or ["?"])[0][:80]
        reason = f"it does not run on one token {how} ({type(error).__name__}: {line})"
        if isinstance(error, ConfigError):
            reason = error.problem
        elif not getattr(model, "_supports_attention_backend", False):
            reason = UNREACHED
        raise refusal(family, reason) from None
    finally:
        model.train(training)


def _input_device(model: Any) -> torch.device:
    """Return the device for token ids: that of the embeddings, or the one accelerate brings offloaded ones to."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type != "meta":
        return device
    hook = getattr(embeddings, "_hf_hook", None)
    places = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])]
    return next((torch.device(place) for place in places if place is not None), device)


def unknown(kwargs: dict[str, Any]) -> str | None:
    """Name a tensor that a family passes to its attention but no law handles: ignoring it would be silently wrong."""
    for name, value in kwargs.items():  # every layer asks in every step
        if isinstance(value, Tensor) and name not in KNOWN:
            return name
    return None


@contextmanager
def _called(modules: list[nn.Module]) -> Iterator[dict[nn.Module, Tensor | None]]:
    """Yield those of the modules that run during a `with` block, and the position ids that each received last."""
    used: dict[nn.Module, Tensor | None] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        used[module] = positions_given(module, args, kwargs)

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in modules]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _attention(config: Any, function: Any) -> Iterator[None]:
    """Give the layers of a config another attention function, and no mask, inside a `with` block."""
    from transformers import AttentionInterface, AttentionMaskInterface

    with _one_at_a_time:
        before = config._attn_implementation
        AttentionInterface.register(NAME, function)
        AttentionMaskInterface.register(
            NAME, lambda *args, local_size=None, **kwargs: None if local_size is None else _LOCAL
        )
        try:
            config._attn_implementation = NAME
            yield
        finally:
            config._attn_implementation = before


def refusal(family: str, reason: str) -> ConfigError:
    """Return the error that refuses a family of models."""
    return ConfigError(f"{family} cannot be extended: {reason}", "docs/families.md lists the families that can be")
