"""The law that a model's config carries."""

from __future__ import annotations

from typing import Any

from rpe3d.config import ConfigError
from rpe3d.geometry import Law, make_law


def parameters_of(config: Any, layer_type: str | None = None) -> dict[str, Any] | None:
    """The rope parameters that may hold a law: of the layers with full attention where a config has several."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and "rope_type" not in parameters:
        parameters = parameters.get(layer_type or "full_attention")
    return parameters if isinstance(parameters, dict) else None


def law_in(config: Any, layer_type: str | None = None) -> Law:
    """The law, or a refusal of a config without one."""
    parameters = parameters_of(config, layer_type)
    if parameters is None or "law" not in parameters:
        raise ConfigError("this model's config carries no law", "extend it with rpe3d.extend(model, context=...)")
    return make_law(**parameters["law"])
