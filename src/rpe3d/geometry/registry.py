"""The registry of laws, by the names that users type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rpe3d.config import ConfigError, Rotary, Scaling, choice, known_keys, make_scaling
from rpe3d.drawing.palette import OTHERS, Style
from rpe3d.geometry.law import Law
from rpe3d.geometry.laws import found

LAWS: dict[str, type[Law]] = found()
DEFAULT = "3d-rpe"
"""Law to use when none is named."""


@dataclass(frozen=True)
class LawInfo:
    """One-line description of a law, and help for each of its parameters."""

    description: str
    parameters: Mapping[str, str]


class Laws(dict[str, LawInfo]):
    """A dict from the names of laws to their one-line description and parameters; prints as a table."""

    def __str__(self) -> str:
        width = max(map(len, self))
        lines = []
        for name, info in self.items():
            lines.append(f"{name:<{width}}  {info.description}")
            if info.parameters:
                lines.append(f"{'':<{width}}  {', '.join(info.parameters)}")
        return "\n".join(lines)

    __repr__ = __str__


def laws() -> Laws:
    """Return all laws as a dict that prints as a table: name -> one-line description and parameters."""
    return Laws({name: LawInfo(law.summary, law.parameters()) for name, law in LAWS.items()})


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return the drawing style of each label: that of the law it names, else one of the free styles in turn."""
    chosen, free = {}, list(OTHERS)
    for label in labels:
        chosen[label] = LAWS[label].style if label in LAWS else free.pop(0) if len(free) > 1 else free[0]
    return chosen


def make_law(
    name: str,
    *,
    pretrained: int,
    context: int | None = None,
    head_dim: int,
    rope_theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    rope_scaling: Mapping[str, Any] | Scaling | None = None,
    **parameters: Any,
) -> Law:
    """Make a law by name, for a model pretrained on `pretrained` positions, up to `context` (default: the same).

    `head_dim`, `rope_theta`, `rotary_dim`, `interleaved` and `rope_scaling` (the model's own `rope_parameters`)
    describe the model; `parameters` are those of the law, as `laws()` lists them. `make_law(**law.to_dict())` equals
    `law`.
    """
    cls = LAWS[choice("law", name, LAWS)]
    known_keys(f"law {name!r}", parameters, cls.parameters())
    rotary = Rotary(
        head_dim=head_dim,
        rope_theta=rope_theta,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=make_scaling(rope_scaling),
    )
    context = pretrained if context is None else context
    return cls(pretrained=pretrained, context=context, rotary=rotary, **parameters)


def saved_law(content: Mapping[str, Any]) -> Law:
    """Return the law that `to_dict` of this or an earlier version wrote, with the meaning it had then."""
    hint = "copy the config or the file that holds it again"
    if not isinstance(content, Mapping):
        raise ConfigError(f"the law is {content!r}, which is not a dict", hint)
    cls = LAWS[choice("law", content.get("name"), LAWS)]
    if lacking := [name for name in ("pretrained", "head_dim") if name not in content]:
        raise ConfigError(f"the law {cls.name!r} lacks {', '.join(lacking)}", hint)
    return make_law(**cls.as_saved(content))
