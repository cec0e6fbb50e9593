"""A law as a user asks for it, before there is a model to make it for.

As text: `3d-rpe`, `3d-rpe:chunk=512,reach=5120`, `near=3d-rpe:reach=3072` (results call it `near`), or a law file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError, choice, known_keys, size
from rpe3d.geometry.law import Law
from rpe3d.geometry.registry import LAWS, make_law

FILE = ".json"
FACTS = {"name", "pretrained", "context", "head_dim", "rope_theta", "rotary_dim", "interleaved", "rope_scaling"}
EVIDENCE = {"schema", "kind", "measured"}
"""Entries of a law file besides the law's parameters: the model that it was made for, and the measurements."""


@dataclass(frozen=True, kw_only=True)
class LawSpec:
    """A requested law: its label in results, its name, and its parameters that are not defaults."""

    label: str
    name: str
    parameters: Mapping[str, Any]
    pretrained: int | None = None
    """Pretrained length that a law file was made for; None if the law was not read from a file."""
    context: int | None = None
    """Context that a law file was made for; None if the law was not read from a file."""

    def __post_init__(self) -> None:
        cls = LAWS[choice("law", self.name, LAWS)]
        known_keys(f"law {self.name!r}", self.parameters, cls.parameters())
        if self.label in LAWS and self.label != self.name:
            raise ConfigError(f"{self.name} cannot be called {self.label}: that is another law", "choose another name")

    def check(self, pretrained: int) -> None:
        """Refuse a law file that was made for another model."""
        if self.pretrained not in (None, pretrained):
            raise ConfigError(
                f"{self.label} was made for a model of {self.pretrained} positions, but this one has {pretrained}",
                "`rpe3d tune MODEL --context N` makes one for it",
            )

    def at(self, length: int, facts: Mapping[str, Any]) -> Law:
        """Make the law for texts of `length` tokens and the model of `facts` (`rpe3d.models.facts`)."""
        return make_law(self.name, context=max(length, facts["pretrained"]), **facts, **self.parameters)


def parse_law(text: str) -> LawSpec:
    """Parse one law: [label=]name[:parameter=value,...], or [label=]FILE.json as `rpe3d tune` writes it."""
    label, asked = _labelled(text)
    if asked.endswith(FILE):
        return read_law(Path(asked), label)
    name, _, rest = asked.partition(":")
    parameters = {}
    for item in rest.split(",") if rest else ():
        parameter, equals, given = item.partition("=")
        if not equals:
            raise ConfigError(f"{item!r} in {text!r} has no value", "write a law as name:parameter=value")
        own = parameter.strip().replace("-", "_")
        if own in parameters:
            raise ConfigError(f"{own} is given twice in {text!r}", "give it once")
        parameters[own] = parse_value(given.strip())
    return LawSpec(label=label or asked, name=name, parameters=parameters)


def parse_laws(text: str) -> list[LawSpec]:
    """Parse comma-separated laws; a parameter without a law belongs to the law before it."""
    parts: list[str] = []
    for item in text.split(","):
        if parts and ":" in parts[-1] and _is_parameter(item):
            parts[-1] += f",{item.strip()}"
        else:
            parts.append(item.strip())
    return [parse_law(part) for part in parts]


def parse_value(text: str) -> bool | int | float | str:
    """Parse a parameter's value: true or false, a number, a size such as 2k, or a word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, size) if text.isascii() and "_" not in text else ():
        with suppress(ValueError):
            return kind(text)
    return text


def read_law(path: Path, label: str = "") -> LawSpec:
    """Read a law file, with the meaning its parameters had when it was written."""
    hint = "pass a file that `rpe3d tune` wrote"
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the law file {path}: {error.strerror}", hint) from None
    except ValueError:
        content = None
    known = content if isinstance(content, dict) else {}
    if not isinstance(known.get("name"), str) or type(known.get("pretrained")) is not int:
        raise ConfigError(f"{path} is not a law file", hint)
    own = {key: given for key, given in content.items() if key not in FACTS | EVIDENCE}
    own = LAWS[choice("law", content["name"], LAWS)].as_saved(own)
    made_for = {name: content.get(name) for name in ("pretrained", "context")}
    return LawSpec(label=label or path.stem, name=content["name"], parameters=own, **made_for)


def _labelled(text: str) -> tuple[str, str]:
    """Split `near=3d-rpe:chunk=64` into its label and its law; the label is empty if there is none."""
    label, equals, law = text.partition("=")
    return (label.strip(), law.strip()) if equals and ":" not in label else ("", text.strip())


def _is_parameter(item: str) -> bool:
    """Return whether `a=b` after a law sets a parameter; otherwise it is another law, with the label a."""
    _, equals, given = item.partition("=")
    return bool(equals) and ":" not in item and not (given.strip() in LAWS or given.strip().endswith(FILE))
