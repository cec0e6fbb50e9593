"""Laws by the names that users type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rpe3d.config import Rotary, Scaling, choice, known_keys, make_scaling
from rpe3d.drawing.palette import OTHERS, Style
from rpe3d.geometry.law import Law
from rpe3d.geometry.laws import found

LAWS: dict[str, type[Law]] = found()
DEFAULT = "3d-rpe"
"""The law of a user who names none."""


@dataclass(frozen=True)
class LawInfo:
    """One line about a law, and its own parameters with their help."""

    description: str
    parameters: Mapping[str, str]


class Laws(dict[str, LawInfo]):
    """Map names of laws to one-line description and parameters; `print` shows them as a table."""

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
    """Return all laws: name -> one-line description and parameters. A dict that prints as a table."""
    return Laws({name: LawInfo(law.summary, law.parameters()) for name, law in LAWS.items()})


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return how each label is drawn: as the law of that name, or in one of the free styles, in the order given."""
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
    """Make a law by its name, for a model pretrained on `pretrained` positions, up to `context` (default: the same).

    `head_dim`, `rope_theta`, `rotary_dim`, `interleaved` and `rope_scaling` (the model's own `rope_parameters`)
    describe the model; `parameters` are the law's own, as `laws()` lists them. `make_law(**law.to_dict())` is `law`.
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
    """Return the law that `to_dict` of this or an earlier version wrote, with the meaning that it had then."""
    cls = LAWS[choice("law", content.get("name"), LAWS)]
    return make_law(**cls.as_saved(content))
