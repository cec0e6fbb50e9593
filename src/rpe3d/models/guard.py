"""Guard against two silent errors: another attention under a law, and a text beyond the law's context.

A law that needs its own attention is lost when a model is given another one, by `set_attn_implementation`, by its
config, or on loading. The layers do not report this, but before each forward pass transformers asks its registry for a
mask on behalf of that attention, and passes the config. So this module watches the functions of that registry. A caller
that brings a four-dimensional mask, as continuous batching does, asks for none: so transformers' own attention
functions are watched as well.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.geometry.registry import LAWS
from rpe3d.models.carried import parameters_of

OURS = "rpe3d"
_told: set[Law] = set()


def watch() -> None:
    """Make every other attention and mask function refuse a model whose law it would drop. May be called repeatedly."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, function in list(ALL_MASK_ATTENTION_FUNCTIONS.items()):
        if not name.startswith(OURS) and not getattr(function, "_rpe3d_watched", False):
            AttentionMaskInterface.register(name, _watched_mask(name, function))
    for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
        known = getattr(function, "__module__", "").startswith("transformers.")
        if known and not getattr(function, "_rpe3d_watched", False):
            AttentionInterface.register(name, _watched_attention(name, function))


def _watched_mask(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
        _refuse_to_drop_a_law(config, name)
        return function(*args, config=config, **kwargs)

    mask._rpe3d_watched = True  # type: ignore[attr-defined]
    return mask


def _watched_attention(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_to_drop_a_law(getattr(module, "config", None), name)
        return function(module, *args, **kwargs)

    attention._rpe3d_watched = True  # type: ignore[attr-defined]
    return attention


def _refuse_to_drop_a_law(config: Any, name: str) -> None:
    parameters = parameters_of(config)
    if parameters is not None and "law" in parameters and LAWS[parameters["law"]["name"]].needs_attention:
        raise ConfigError(
            f"this model is under {parameters['law']['name']}, which its attention {name!r} does not support",
            f"call rpe3d.restore(model) for the stock model, or model.set_attn_implementation({OURS!r})",
        )


def tell_of_length(law: Law, length: int) -> None:
    """Warn once per law about a text longer than its context, unless the law is endless."""
    if length > law.context and not law.endless and law not in _told:
        _told.add(law)
        warnings.warn(
            f"a text of {length} tokens is longer than the context {law.context} that {law.name} was made for, and its "
            f"positions exceed the law's bound: extend the model with context={length} or more",
            stacklevel=2,
        )
