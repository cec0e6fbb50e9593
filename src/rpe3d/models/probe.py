"""What a model does with positions, found out by running it, not by its name.

With one token attention returns that token's value whatever the position, so the hidden states of two forwards of the
same token at two positions are the same, and all that differs is how each layer has turned q and k. Watching what
arrives at the attention registry therefore tells, layer by layer, whether and how the model rotates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpe3d.config import ConfigError
from rpe3d.rotation import cos_sin, rotate

NAME = "rpe3d-probe"
POSITION = 5
KNOWN = ("cache_position", "s_aux", "attention_mask", "position_ids", "num_items_in_batch", "shift_labels")
"""What a layer may be handed without its attention changing; the last two are for the loss."""
UNREACHED = "its attention does not go through transformers' attention registry"
OVERFLOW = "they overflow, although all of its weights are finite"
MEND = "copy or convert the weights again; float16 overflows where bfloat16 does not"
CLOSE = 0.05  # relative: half-precision rounding is a tenth of it, a wrong pairing ten times it


@dataclass(frozen=True)
class Findings:
    """The rotary layout of a model's layers."""

    rotaries: tuple[Any, ...]
    """The modules that make cos and sin for the layers that a law changes."""
    head_dim: int
    frequencies: Tensor
    """θ_l in force, float64."""
    table_dtype: torch.dtype
    """What the model keeps them in."""
    interleaved: bool
    layers: int
    """Layers whose attention a law changes."""
    windowed: int
    """Layers that keep a sliding window of their own."""
    unrotated: tuple[int, ...]
    """Indices of layers without rotation, which stay as they are."""


@dataclass(frozen=True)
class Seen:
    """What one layer handed to attention."""

    layer: int
    q: Tensor
    windowed: bool
    positions: bool


def probe(model: Any, config: Any) -> Findings:
    """Find out how a model rotates; refuse one that takes no law, with the reason."""
    family = type(model).__name__
    tables = [m for m in model.modules() if hasattr(m, "inv_freq") or hasattr(m, "full_attention_inv_freq")]
    rotaries = tuple(m for m in tables if getattr(m, "config", config) is config)
    if not rotaries:
        raise refusal(family, "none of its modules keeps rotary frequencies where transformers' own do (inv_freq)")
    if any(name.endswith("indexer") for name, _ in model.named_modules()):
        raise refusal(family, "an indexer of its own chooses the keys that a query sees, and no law reaches it")
    with _called(tables) as used:
        first, second = (_watch(model, config, family, position) for position in (0, POSITION))
    if any(module not in rotaries for module in used):
        raise refusal(family, "its layers are turned by a copy of its config, which a law does not reach")
    if not first or len(first) != len(second):
        raise refusal(family, UNREACHED)
    if any(not seen.q.isfinite().all() for seen in first + second):
        raise ConfigError(f"the queries of {family} are not finite numbers: {not_finite(model) or OVERFLOW}", MEND)
    full = [pair for pair in zip(first, second, strict=True) if not pair[0].windowed]
    if not full:
        raise refusal(family, "all of its layers have a sliding window, so none reaches further than it")
    turned = [(a, b) for a, b in full if not torch.equal(a.q, b.q)]
    if not turned:
        raise refusal(family, "none of its layers with full attention rotates")
    if not all(a.positions for a, _ in turned):
        raise refusal(family, "it passes no position ids to its attention, so a law cannot know where tokens stand")
    table = _table(rotaries[0])
    theta = table.detach().double().cpu()
    head_dim = turned[0][0].q.shape[-1]
    interleaved = [_pairing(a.q, b.q, theta) for a, b in turned]
    if None in interleaved or len(set(interleaved)) > 1:
        raise refusal(family, "it turns other dimensions of a head than the first, in other pairs, or the other way")
    return Findings(
        rotaries=rotaries,
        head_dim=head_dim,
        frequencies=theta,
        table_dtype=table.dtype,
        interleaved=bool(interleaved[0]),
        layers=len(turned),
        windowed=len(first) - len(full),
        unrotated=tuple(a.layer for a, b in full if torch.equal(a.q, b.q)),
    )


def _table(rotary: Any) -> Tensor:
    theta: Tensor = rotary.inv_freq if hasattr(rotary, "inv_freq") else rotary.full_attention_inv_freq
    return theta


def _pairing(at_zero: Tensor, at_position: Tensor, theta: Tensor) -> bool | None:
    """Whether a vector was turned in neighbours (True) or halves (False); None if in neither."""
    vector, truth = at_zero.double().cpu(), at_position.double().cpu()
    if 2 * theta.numel() > vector.shape[-1]:
        return None
    cos, sin = cos_sin(POSITION * theta[None], dtype=torch.float64)
    for interleaved in (False, True):
        turned, _ = rotate(vector, None, cos, sin, interleaved=interleaved, impl="reference")
        if (turned - truth).norm() <= CLOSE * (vector - truth).norm():
            return interleaved
    return None


def _watch(model: Any, config: Any, family: str, position: int) -> list[Seen]:
    """Run one token at a position and note what arrives at attention."""
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
            raise ConfigError("its queries and keys do not have the shapes of a plain decoder's", "")
        if strange := unknown(kwargs):
            raise ConfigError(f"its attention is also given {strange}, of which a law knows nothing", "")
        layer = int(getattr(module, "layer_idx", len(seen)))
        seen.append(Seen(layer, query.detach().clone(), sliding_window is not None, position_ids is not None))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    with _attention(config, record):
        run_one_token(model, family, position)
    return seen


def not_finite(model: Any) -> str | None:
    """Name the first weight that holds NaN or infinity, in words; None where all numbers are finite.

    Looks at what this process holds: not at weights that are offloaded, nor at other processes' parts of them.
    """
    for name, whole in [*model.named_parameters(), *model.named_buffers()]:
        tensor = whole.to_local() if hasattr(whole, "to_local") else whole
        if tensor.is_floating_point() and tensor.device.type != "meta" and not (finite := tensor.isfinite()).all():
            return f"{name} holds {int((~finite).sum())} that are NaN or infinite"
    return None


def run_one_token(model: Any, family: str, position: int = 0, how: str = "by itself") -> None:
    """Run a forward of one token; refuse the model if it fails."""
    device = _input_device(model)
    given = {
        "input_ids": torch.ones(1, 1, dtype=torch.long, device=device),
        "position_ids": torch.full((1, 1), position, device=device),
        "use_cache": False,
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
    """Where token ids go: to the embeddings, or to where accelerate brings them for a forward if it keeps them away."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type != "meta":
        return device
    hook = getattr(embeddings, "_hf_hook", None)
    places = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])]
    return next((torch.device(place) for place in places if place is not None), device)


def unknown(kwargs: dict[str, Any]) -> str | None:
    """Name a tensor that a family passes to its attention and no law handles: ignoring it would be silently wrong."""
    return next((k for k, v in kwargs.items() if isinstance(v, Tensor) and k not in KNOWN), None)


@contextmanager
def _called(modules: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Those of some modules that run during a `with`."""
    used: list[nn.Module] = []
    hooks = [m.register_forward_hook(lambda module, *_: used.append(module)) for m in modules]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _attention(config: Any, function: Any) -> Iterator[None]:
    """The layers of a config with another attention function, and without a mask, for the time of a `with`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    before = config._attn_implementation
    AttentionInterface.register(NAME, function)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = before


def refusal(family: str, reason: str) -> ConfigError:
    """Return the error that refuses a family of models."""
    return ConfigError(f"{family} cannot be extended: {reason}", "docs/families.md lists the families that can be")
