"""The law that a model's config carries."""

from __future__ import annotations

import copy
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.geometry import Law, make_law


class Carried(dict[str, Any]):
    """Rope parameters that hold a law as a dict, and the law itself, made once for everyone who reads them.

    A config that was loaded has a plain dict there, which `carried` replaces; a copy shares the law, which is frozen.
    """

    def __init__(self, parameters: dict[str, Any], law: Law | None = None) -> None:
        super().__init__(parameters)
        self.law = make_law(**parameters["law"]) if law is None else law
        self.source = copy.deepcopy(parameters["law"])
        self.unrotated = frozenset(parameters.get("unrotated_layers", ()))
        self.still = self.law
        """What the layers without rotation are under: a law that never turns."""
        if self.unrotated:
            own = self.law
            self.still = make_law("rope", pretrained=own.pretrained, context=own.context, head_dim=own.rotary.head_dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carried:
        return Carried(copy.deepcopy(dict(self), memo), self.law if self["law"] == self.source else None)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def parameters_of(config: Any, layer_type: str | None = None) -> dict[str, Any] | None:
    """Return the rope parameters that may hold a law: those of full attention where a config has several; else None."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and "rope_type" not in parameters:
        parameters = parameters.get(layer_type or "full_attention")
    return parameters if isinstance(parameters, dict) else None


def carried(config: Any, layer_type: str | None = None) -> Carried | None:
    """Return the rope parameters with the law that they hold, or None. A law is made again if its dict has changed."""
    parameters = parameters_of(config, layer_type)
    if parameters is None or "law" not in parameters:
        return None
    if isinstance(parameters, Carried) and parameters["law"] == parameters.source:
        return parameters
    held = Carried(parameters)
    if "rope_type" in config.rope_parameters:
        config.rope_parameters = held
    else:
        config.rope_parameters[layer_type or "full_attention"] = held
    return held


def law_in(config: Any, layer_type: str | None = None) -> Law:
    """Return the law that a config carries; refuse a config without one."""
    held = carried(config, layer_type)
    if held is None:
        raise ConfigError("this model's config carries no law", "extend it with rpe3d.extend(model, context=...)")
    return held.law


def module_law(module: Any) -> Law:
    """Return the law of an attention module. Every layer asks in every step: nothing is made or compared here."""
    held = parameters_of(module.config)
    if not isinstance(held, Carried):  # a config that was replaced since the model was made
        law_in(module.config)
        return module_law(module)
    return held.still if getattr(module, "layer_idx", None) in held.unrotated else held.law
