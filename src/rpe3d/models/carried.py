"""The law that a model's config carries."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.geometry import Law, make_law, saved_law


class Carried(dict[str, Any]):
    """Rope parameters that hold a law as a dict, and the law itself, made once for all readers.

    A config that was loaded has a plain dict there, which `carried` replaces; a copy shares the law, which is frozen.
    """

    def __init__(self, parameters: dict[str, Any], law: Law | None = None) -> None:
        super().__init__(parameters)
        self.law = saved_law(parameters["law"]) if law is None else law
        self.source = copy.deepcopy(parameters["law"])
        self.unrotated = frozenset(parameters.get("unrotated_layers", ()))
        self.pieces = tuple((first, end) for first, end in parameters.get("head_pieces", ()))
        self.notes = bool(parameters.get("positions_noted", False))
        self.others: dict[int | None, Law] = dict(self.law.layers.items())
        """Laws of the layers that have another one; layers without rotation have one that never rotates."""
        if self.unrotated:
            own = self.law
            still = make_law("rope", pretrained=own.pretrained, context=own.context, head_dim=own.rotary.head_dim)
            self.others |= dict.fromkeys(self.unrotated, still)

    def law_at(self, layer: int | None) -> Law:
        """Return the law of a layer."""
        return self.others.get(layer, self.law)

    def arranged(self, x: Tensor) -> Tensor:
        """Return vectors with their dimensions in the order that a law expects: rotated pairs first, as in Llama."""
        return torch.cat([x[..., first:end] for first, end in self.pieces], -1) if self.pieces else x

    def __deepcopy__(self, memo: dict[int, Any]) -> Carried:
        return Carried(copy.deepcopy(dict(self), memo), self.law if self["law"] == self.source else None)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def kind_of(config: Any) -> str:
    """Return the name of the full-attention layer type in a config with several rope parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in parameters:  # every layer asks in every step
        return "full_attention"
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    named = [kind for kind in kinds if kind in parameters and "sliding" not in kind]
    return named[0] if len(named) == 1 else "full_attention"


def parameters_of(config: Any, layer_type: str | None = None) -> dict[str, Any] | None:
    """Return the rope parameters that may hold a law: those of full attention if a config has several; else None."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and "rope_type" not in parameters:
        parameters = parameters.get(layer_type or kind_of(config))
    return parameters if isinstance(parameters, dict) else None


def stock_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the model's own rope parameters, which lie beside a law; refuse a config that has lost them."""
    if not isinstance(parameters.get("stock"), dict):
        hint = "copy the config again"
        raise ConfigError("the config carries a law, but not the model's own rope parameters ('stock')", hint)
    return copy.deepcopy(dict(parameters["stock"]))


def carried(config: Any, layer_type: str | None = None) -> Carried | None:
    """Return the rope parameters with the law that they hold, or None. The law is remade if its dict has changed."""
    parameters = parameters_of(config, layer_type)
    if parameters is None or "law" not in parameters:
        return None
    if isinstance(parameters, Carried) and parameters["law"] == parameters.source:
        return parameters
    held = Carried(parameters)
    last, count = max(held.law.layers, default=-1), getattr(config, "num_hidden_layers", None)
    if count is not None and last >= count:
        raise ConfigError(
            f"the config's law names layer {last}, but the model has layers 0 to {count - 1}",
            "load the checkpoint with all of its layers, or extend the stock model again",
        )
    if "rope_type" in config.rope_parameters:
        config.rope_parameters = held
    else:
        config.rope_parameters[layer_type or kind_of(config)] = held
    return held


def facts_of(config: Any) -> dict[str, Any] | None:
    """Return what a config alone says about a model, to make laws for it: lengths and sizes, but not how it rotates."""
    config = config.get_text_config(decoder=True)
    if (held := carried(config)) is not None:
        made = held.law.to_dict()
        return {name: made[name] for name in ("pretrained", "head_dim", "rotary_dim", "rope_theta", "interleaved")}
    sizes = [getattr(config, name, None) for name in ("max_position_embeddings", "hidden_size", "num_attention_heads")]
    own = parameters_of(config)
    if own is None or not all(isinstance(size, int) and size > 1 for size in sizes[:2]) or not sizes[2]:
        return None
    head_dim = getattr(config, "head_dim", None) or sizes[1] // sizes[2]
    turned = int(head_dim * (own.get("partial_rotary_factor") or 1))
    if turned < 2 or turned % 2 or head_dim % 2:
        return None
    theta = own.get("rope_theta", 10000.0)
    return {"pretrained": sizes[0], "head_dim": head_dim, "rotary_dim": turned, "rope_theta": theta}


def law_in(config: Any, layer_type: str | None = None) -> Law:
    """Return the law that a config carries; refuse a config without one."""
    held = carried(config, layer_type)
    if held is None:
        raise ConfigError("this model's config carries no law", "extend it with rpe3d.extend(model, context=...)")
    return held.law


def module_carried(module: Any) -> Carried:
    """Return the rope parameters of an attention module with their law.

    Every layer calls this in every step, so nothing is made or compared.
    """
    held = parameters_of(module.config)
    if not isinstance(held, Carried):  # a config that was replaced since the model was made
        law_in(module.config)
        return module_carried(module)
    return held


def module_law(module: Any) -> Law:
    """Return the law of an attention module."""
    return module_carried(module).law_at(getattr(module, "layer_idx", None))
