"""A law as a user asks for it, before there is a model to make it for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpe3d.config import ConfigError, choice, known_keys
from rpe3d.geometry.law import Law
from rpe3d.geometry.registry import LAWS, make_law


@dataclass(frozen=True, kw_only=True)
class LawSpec:
    """What results call a law, its name, and its own parameters where they are not the defaults."""

    label: str
    name: str
    parameters: Mapping[str, Any]
    pretrained: int | None = None
    """The pretrained length that a law file was made for; None: it was not read from a file."""

    def __post_init__(self) -> None:
        cls = LAWS[choice("law", self.name, LAWS)]
        known_keys(f"law {self.name!r}", self.parameters, cls.parameters())

    def check(self, pretrained: int) -> None:
        """Refuse a law file that was made for another model."""
        if self.pretrained not in (None, pretrained):
            raise ConfigError(
                f"{self.label} was made for a model of {self.pretrained} positions, and this one has {pretrained}",
                "`rpe3d tune MODEL --context N` makes one for it",
            )

    def at(self, length: int, facts: Mapping[str, Any]) -> Law:
        """Make the law for texts of `length` tokens and the model of `facts` (`rpe3d.models.facts`)."""
        return make_law(self.name, context=max(length, facts["pretrained"]), **facts, **self.parameters)
