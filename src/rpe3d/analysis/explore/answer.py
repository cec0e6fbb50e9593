"""What the page asks for: one law on one model, as JSON. The only place where its numbers are made.

A question is {"law", "pretrained", "context", "head_dim", "rope_theta"} with those of `SLIDERS` that
are not the law's own defaults, and "plane" (default: a slow one). An answer to a law that cannot be made is
{"error": {"problem", "hint"}}, in the library's own words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rpe3d.analysis.cost import cost
from rpe3d.analysis.shown import KINDS, Run, distances, kinds, runs, shown
from rpe3d.analysis.table import numbers
from rpe3d.config import ConfigError, known_keys, whole
from rpe3d.geometry import DEFAULT, LAWS, Law, decay_bound, make_law, resolution

MODEL = ("pretrained", "context", "head_dim", "rope_theta")
OPTIONS = ("chunk", "window", "reach")
"""Parameters that have their own option on the command line; the others are set with --set."""
SLIDERS = (*OPTIONS, "focus", "fade", "sinks", "far", "block", "first", "decay")
BUCKETS, IN_BUCKET, BANDS = 200, 16, 40
SIDE = 36
RINGS, ON_RING, ON_CIRCLE = 18, 11, 180
HEIGHT = math.radians(50)
WIDEST = 1024  # dimensions of a head: no model has more, and every plane is looked at


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the page shows of a law, or why there is no such law."""
    known_keys("a question", question, ("law", *MODEL, *SLIDERS, "plane"))
    try:
        given = {name: number(question[name]) for name in SLIDERS if name in question}
        model = {name: number(question[name]) for name in MODEL}
        whole("head_dim", model["head_dim"], most=WIDEST)
        law = make_law(question["law"], **model, **given)
        plane = whole("plane", number(question.get("plane", slow_plane(law))), least=0, most=law.rotary.pairs - 1)
    except KeyError as missing:
        raise ConfigError(f"a question lacks {missing}", f"pass law, {', '.join(MODEL)}") from None
    except ConfigError as refusal:
        return {"error": {"problem": refusal.problem, "hint": refusal.hint}}
    last = law.context - 1
    few = distances(law, BUCKETS)
    told = resolution(law, last, (last - few).clamp(max=last - 1))[:, plane]
    found = runs(law, 1024)
    return {
        "error": None,
        "parameters": {name: getattr(law, name) for name in SLIDERS if name in law.parameters()},
        "plane": plane,
        "planes": law.rotary.pairs,
        "shown": _extremes(law, plane),
        "distance": few.tolist(),
        "bound": _bands(law),
        "resolution": _rounded(told),
        "resolved": _digits(float((told.abs() > 0.999).double().mean())),
        "runs": found,
        "matrix": _matrix(law, plane),
        "sphere": _sphere(law, plane),
        "trained": _digits(float(law.model_frequencies()[plane]) * law.pretrained),
        "cost": cost(law)._asdict(),
        "sentence": _sentence(law, found),
        "code": code(law.name, law.context, given),
        "command": command(law.name, law.context, given),
    }


def number(value: Any) -> Any:
    """Parse text from an address as a number; anything else is left for the law to refuse."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,15}", value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e[+-]?[0-9]{1,3})?", value):
        return float(value)
    return value


def slow_plane(law: Law) -> int:
    """Return the fastest plane that turns by less than half a circle within the pretrained length.

    Fast ones have met every angle in training; in this one, what was met and what was not can be seen at one glance.
    """
    slow = law.model_frequencies() * law.pretrained <= 0.75 * math.pi
    return int(slow.nonzero()[0, 0]) if slow.any() else law.rotary.pairs - 1


def _extremes(law: Law, plane: int) -> list[float | None]:
    """Return the lowest and the highest position shown in every bucket of distances, in the order in which they come.

    A line through them shows teeth that are narrower than the buckets.
    """
    last, many = law.context - 1, distances(law, BUCKETS * IN_BUCKET)
    f = shown(law, last, last - many, plane)
    extremes: list[float] = []
    for piece in f.tensor_split(BUCKETS):
        seen = piece[~piece.isnan()]
        ends = sorted((int(seen.argmin()), int(seen.argmax()))) if len(seen) else ()
        extremes += [float(seen[i]) for i in ends] if ends else [math.nan, math.nan]
    return _rounded(extremes)


def _bands(law: Law) -> dict[str, list[float | None]]:
    """Return the mean, least and most of eq. 7's bound in bands of distances: it swings from token to token."""
    last, many = law.context - 1, distances(law, BUCKETS * IN_BUCKET)
    pieces = [piece[~piece.isnan()] for piece in decay_bound(law, last, last - many).tensor_split(BANDS)]
    told = [(p.mean(), p.min(), p.max()) if len(p) else (math.nan,) * 3 for p in pieces]
    return {name: _rounded([float(of[i]) for of in told]) for i, name in enumerate(("mean", "low", "high"))}


def _matrix(law: Law, plane: int) -> dict[str, Any]:
    """Return the position shown to every pair of `SIDE` tokens spread over the context, one row per query."""
    position = distances(law, SIDE)
    f = shown(law, position[:, None], position[None, :], plane)
    return {"positions": position.tolist(), "rows": [_rounded(row[: i + 1]) for i, row in enumerate(f.unbind())]}


def _sphere(law: Law, plane: int) -> dict[str, Any]:
    """Place keys as the last query sees them: longitude is the angle in one plane, height the chunk distance.

    Heights follow its square root, so that near chunks lie apart. A law without chunks has one coordinate, and goes
    round the equator.
    """
    last, chunk = law.context - 1, law.chunk_in_use
    if chunk is None or chunk > last:
        paths, heights = [distances(law, ON_CIRCLE)], [0.0]
    else:
        most = last // chunk
        steps = sorted({round(most * (n / RINGS) ** 2) for n in range(RINGS + 1)})
        paths, heights = [], []
        for a in steps:
            first = (most - a) * chunk
            offsets = torch.linspace(0, min(chunk, last + 1 - first) - 1, min(ON_RING, chunk), dtype=torch.float64)
            paths.append((last - first - offsets.round().long()).flip(0).unique())
            heights.append(HEIGHT * (2 * math.sqrt(a / most) - 1))
    every, sizes = torch.cat(paths), [len(path) for path in paths]
    angle, kind = law.relative_angles(last, last - every)[:, plane], kinds(law, last, last - every)
    return {
        "chunks": chunk is not None,
        "distance": [path.tolist() for path in paths],
        "angle": [_rounded(piece) for piece in angle.split(sizes)],
        "kind": [piece.tolist() for piece in kind.split(sizes)],
        "height": _rounded(heights),
    }


def _sentence(law: Law, found: list[Run]) -> str:
    """Summarise the result in words."""
    share = dict.fromkeys(KINDS, 0)
    for run in found:
        share[run.kind] += run.last + 1 - run.first
    near = found[0].last + 1 if found[0].kind == "exact" else 0
    parts = [f"exact for the nearest {near:,} tokens" if near > 1 else "exact nowhere"]
    if share["compressed"]:
        parts.append(f"{_percent(share['compressed'] / law.context)} of the distances compressed")
    if share["unseen"]:
        parts.append(f"{_percent(share['unseen'] / law.context)} at angles never seen in training")
    else:
        parts.append("no angle that training has not seen")
    if share["not attended"]:
        parts.append(f"{_percent(share['not attended'] / law.context)} not attended to")
    return "; ".join([*parts, *_weighing(law)]) + "."


def _weighing(law: Law) -> list[str]:
    """Describe how the last query weighs its far keys."""
    said, last = [], torch.tensor([law.context - 1])
    far = law.regions[-1]
    if far.fade is not None and law.context > far.fade.span:
        sharper, share = float(far.fade.sharpness(last)), math.exp(-float(far.fade.loss(last)))
        said.append(
            f"the last query sharpens far keys {sharper:.2f} times and keeps {100 * share:.0f}\u00a0% of their weight"
        )
    if far.choice is not None:
        said.append(f"a query sees at most {far.choice.most * far.choice.size:,} far keys")
    return said


def _percent(share: float) -> str:
    return (
        f"{100 * share:.0f}\u00a0%"
        if 0.01 <= share <= 0.99
        else f"{100 * share:.2g}\u00a0%"
        if share < 0.01
        else "nearly all"
    )


def code(name: str, context: int, given: Mapping[str, Any]) -> str:
    """Return the Python call that extends a model this way; `model` is the user's."""
    law = "" if name == DEFAULT else f'"{name}", '
    return f"import rpe3d\n\nrpe3d.extend(model, {law}{', '.join(_keywords(context, given))})"


def _keywords(context: int, given: Mapping[str, Any]) -> list[str]:
    return [f"context={context}", *(f"{name}={value}" for name, value in given.items())]


def command(name: str, context: int, given: Mapping[str, Any]) -> str:
    """Return the same as a command line; MODEL and DIR are the user's."""
    law = "" if name == DEFAULT else f" --law {name}"
    options = "".join(
        f" --{option} {value}" if option in OPTIONS else f" --set {option}={value}" for option, value in given.items()
    )
    return f"rpe3d extend MODEL --context {context}{law}{options} --out DIR"


def _rounded(values: Tensor | list[float]) -> list[float | None]:
    listed = values.tolist() if isinstance(values, Tensor) else values
    return [None if value is None else _digits(value) for value in numbers(listed)]


def _digits(value: float) -> float:
    """Round to five digits, which is more than a screen shows, and keep whole numbers as such."""
    short_form = float(f"{value:.5g}")
    return int(short_form) if short_form.is_integer() else short_form


def about_laws() -> dict[str, Any]:
    """Return what the page needs to know about every law beforehand."""
    return {
        name: {"summary": law.summary, "sliders": {s: law.parameters()[s] for s in SLIDERS if s in law.parameters()}}
        for name, law in LAWS.items()
    }
