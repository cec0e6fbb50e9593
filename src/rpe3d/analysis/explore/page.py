"""Build the page as one HTML file that needs no network: live with its server, or with a grid of answers inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from itertools import product
from typing import Any

from rpe3d.analysis.explore.answer import MODEL, SLIDERS, about_laws, answer
from rpe3d.analysis.shown import KINDS
from rpe3d.drawing.palette import KIND_COLOURS
from rpe3d.geometry import LAWS, styles

START: dict[str, Any] = {"pretrained": 8192, "context": 65536, "head_dim": 64, "rope_theta": 100000}
Stops = Mapping[str, list[int] | list[float]]
LIVE: Stops = {
    "pretrained": [2**n for n in range(9, 18)],
    "context": [2**n for n in range(10, 21)],
    "head_dim": [32, 64, 80, 96, 128, 192, 256],
    "rope_theta": [10_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000, 10_000_000],
    "chunk": [n for e in range(4, 16) for n in (2**e, 3 * 2 ** (e - 1))],
    "window": [n for e in range(6, 17) for n in (2**e, 5 * 2 ** (e - 2), 3 * 2 ** (e - 1), 7 * 2 ** (e - 2))],
    "reach": [n for e in range(7, 17) for n in (2**e, 5 * 2 ** (e - 2), 3 * 2 ** (e - 1), 7 * 2 ** (e - 2))],
    "focus": [0, 0.5, 1, 1.5, 2, 3, 4],
    "fade": [0, 0.0625, 0.125, 0.25, 0.5, 1, 2],
    "sinks": [0, 1, 4, 16],
    "far": [0, *(2**n for n in range(3, 11))],
    "block": [2**n for n in range(1, 8)],
    "first": [0, *(2**n for n in range(4, 10))],
    "decay": [0.5, 0.6, 0.7, 0.8, 0.9, 1],
}
FILE: Stops = {
    "pretrained": [4096, 8192],
    "context": [16384, 32768, 65536, 131072],
    "head_dim": [64, 128],
    "rope_theta": [10_000, 100_000, 500_000],
    "chunk": [256, 1024],
    "window": [1024, 3072],
    "reach": [3072, 6144],
    "focus": [],
    "fade": [],
    "sinks": [],
    "far": [],
    "block": [],
    "first": [],
    "decay": [],
}
"""Sliders of the file: it holds an answer for each combination, so it has none for the weight of far keys."""


SCRIPTS = ("settings.js", "words.js", "spheres.js", "charts.js", "start.js")
"""Parts of one program, in the order in which they are read."""


def live_page(measured: Mapping[str, Any] | None = None) -> str:
    """Return the page that asks its server."""
    return _page({"stops": LIVE, "start": _start(measured), "measured": measured, "answers": None})


def file_page(
    measured: Mapping[str, Any] | None = None,
    stops: Stops = FILE,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> str:
    """Return the page with the answer to every question that its sliders can ask."""
    questions = list(grid(stops))
    answers = {}
    for done, question in enumerate(questions):
        progress(done, len(questions))
        answers[key(question)] = answer(question)
    progress(len(questions), len(questions))
    start = {name: START[name] if START[name] in stops[name] else stops[name][-1] for name in MODEL}
    packed = gzip.compress(json.dumps(_shared(answers), separators=(",", ":")).encode(), mtime=0)
    return _page({"stops": stops, "start": start, "measured": measured, "answers": base64.b64encode(packed).decode()})


def grid(stops: Stops) -> Iterator[dict[str, Any]]:
    """Return every question that sliders with these stops can ask: models, laws, each parameter or its default."""
    for model in product(*(stops[name] for name in MODEL)):
        for name, law in about_laws().items():
            own = [slider for slider in SLIDERS if slider in law["sliders"]]
            for values in product(*([None, *stops[slider]] for slider in own)):
                chosen = {slider: value for slider, value in zip(own, values, strict=True) if value is not None}
                yield {"law": name, **dict(zip(MODEL, model, strict=True)), **chosen}


def key(question: Mapping[str, Any]) -> str:
    """Write a question as the page writes it: its values in a fixed order."""
    return "&".join(f"{name}={question[name]}" for name in ("law", *MODEL, *SLIDERS) if name in question)


def _shared(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Put the parts of answers into a list, once each: most do not depend on the head dimension or the base."""
    places: dict[str, int] = {}
    kept: dict[str, dict[str, int]] = {}
    for name, parts in answers.items():
        kept[name] = {
            part: places.setdefault(json.dumps(value, separators=(",", ":")), len(places))
            for part, value in parts.items()
        }
    return {"parts": [json.loads(part) for part in places], "answers": kept}


def _start(measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the model that the page opens with: the one that was measured, or the default."""
    if measured is None:
        return START
    return {name: measured["model"].get(name, START[name]) for name in MODEL}


def _page(setup: Mapping[str, Any]) -> str:
    folder = files("rpe3d.analysis.explore") / "web"
    template, css, *scripts = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)
    )
    script = "\n".join(scripts)
    names = [*LAWS, *((setup["measured"] or {}).get("laws") or ())]
    looks = {
        name: {"light": look.colour.light, "dark": look.colour.dark, "dash": look.dash, "width": look.width}
        for name, look in styles(dict.fromkeys(names)).items()
    }
    kinds = [
        {"name": kind, "light": colour.light, "dark": colour.dark}
        for kind, colour in zip(KINDS, KIND_COLOURS, strict=True)
    ]
    about = {"laws": about_laws(), "model": MODEL, "sliders": SLIDERS, "styles": looks, "kinds": kinds}
    data = json.dumps({**setup, **about}, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {_hash(script)}; style-src {_hash(css)}"
    )
    for mark, text in (("POLICY", policy), ("STYLE", css), ("SETUP", data), ("SCRIPT", script)):
        template = template.replace(f"%%{mark}%%", text)
    return template


def _hash(text: str) -> str:
    """Return the CSP hash of an inline text: a browser may run this one and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
