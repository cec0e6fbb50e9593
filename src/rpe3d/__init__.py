"""rpe3d: a longer context for rotary-position language models.

    law = rpe3d.make_law("3d-rpe", pretrained=8192, context=65536, head_dim=64, rope_theta=1e5)
    law.relative_position(query=60_000, key=12)

The names below load on first use, so that `import rpe3d` and the command line stay fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpe3d.config import ConfigError
    from rpe3d.geometry import Law, laws, make_law
    from rpe3d.models import extend, law_of, restore

__version__ = "0.1.0"
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
    return sorted([*globals(), *__all__])


# A saved model names our rope type, and transformers looks it up while it builds the model: so it must be there as soon
# as transformers is, without this import paying for that one.
_ROPE = "transformers.modeling_rope_utils"


def _enter(module: ModuleType) -> None:
    """Make our rope types known to transformers; what they do is imported when a model has one."""

    def rope_init(*args: Any, **kwargs: Any) -> Any:
        from rpe3d.models.registry import rope_init as ours

        return ours(*args, **kwargs)

    for name in ("rpe3d", "rpe3d-dynamic"):
        module.ROPE_INIT_FUNCTIONS[name] = rope_init
    # transformers warns of every rope type that it has no validation for, and has no registry for these.
    module.logger.addFilter(lambda record: "'rope_type'='rpe3d" not in record.getMessage())


class _Entering(Loader):
    """The module's own loader, and then `_enter`."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _enter(module)


class _OnImport(MetaPathFinder):
    """Waits for transformers' table of rope types, once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _ROPE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Entering(spec.loader)
        return spec


if _ROPE in sys.modules:
    _enter(sys.modules[_ROPE])
else:
    sys.meta_path.insert(0, _OnImport())
