"""One file per law. A new law is a new file here: `found` scans this folder, so nothing else has to name it."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from rpe3d.geometry.law import Law

ORDER = (
    "rope",
    "linear",
    "ntk",
    "dynamic",
    "yarn",
    "longrope",
    "cope",
    "logn",
    "3d-rpe",
    "3d-rpe-definition",
    "3d-rpe-dual-chunk",
    "dca",
    "self-extend",
    "rerope",
    "leaky-rerope",
    "streaming-llm",
    "string",
    "dpe",
    "lampe",
)
"""Order in which tables and plots list laws, by kind; laws not listed here follow by name."""


def found() -> dict[str, type[Law]]:
    """Return every law of this folder under its name, in the order of `ORDER`."""
    laws = {law.name: law for module in iter_modules(__path__) for law in _laws_of(f"{__name__}.{module.name}")}
    return {name: laws[name] for name in (*ORDER, *sorted(laws)) if name in laws}


def _laws_of(module: str) -> list[type[Law]]:
    """Return the laws that a module defines: the classes with their own name."""
    classes = [member for member in vars(import_module(module)).values() if isinstance(member, type)]
    return [one for one in classes if issubclass(one, Law) and one.__module__ == module and "name" in vars(one)]
