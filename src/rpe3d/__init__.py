"""rpe3d: a longer context for rotary-position language models.

    law = rpe3d.make_law("3d-rpe", pretrained=8192, context=65536, head_dim=64, rope_theta=1e5)
    law.relative_position(query=60_000, key=12)

The public names load on first use, so that `import rpe3d` and the command line stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rpe3d._on_import import enter_rope_types

if TYPE_CHECKING:
    from rpe3d.config import ConfigError
    from rpe3d.geometry import Law, laws, make_law
    from rpe3d.models import extend, law_of, restore

__version__ = "0.2.0"
__all__ = ["ConfigError", "Law", "extend", "law_of", "laws", "make_law", "restore"]

_HOME = {
    "ConfigError": "rpe3d.config",
    "Law": "rpe3d.geometry",
    "extend": "rpe3d.models",
    "law_of": "rpe3d.models",
    "restore": "rpe3d.models",
    "laws": "rpe3d.geometry",
    "make_law": "rpe3d.geometry",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rpe3d' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


enter_rope_types()
