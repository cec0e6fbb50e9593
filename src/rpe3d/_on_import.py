"""Make rpe3d's rope types known to transformers, as soon as it is imported.

A saved model names our rope type, and transformers looks it up while it builds the model: so the type must be known as
soon as transformers is imported, without `import rpe3d` paying for that import.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_ROPE = "transformers.modeling_rope_utils"


def enter_rope_types() -> None:
    """Enter rpe3d's rope types now if transformers' table of rope types is loaded, else when it is."""
    if _ROPE in sys.modules:
        _enter(sys.modules[_ROPE])
    else:
        sys.meta_path.insert(0, _OnImport())


def _enter(module: ModuleType) -> None:
    """Make our rope types known to transformers; their code is imported when a model has one."""

    def rope_init(*args: Any, **kwargs: Any) -> Any:
        from rpe3d.models.registry import rope_init as ours

        return ours(*args, **kwargs)

    for name in ("rpe3d", "rpe3d-dynamic"):
        module.ROPE_INIT_FUNCTIONS[name] = rope_init
    # transformers warns of every rope type that it has no validation for, and has no registry for these.
    module.logger.addFilter(lambda record: "'rope_type'='rpe3d" not in record.getMessage())


class _Entering(Loader):
    """The module's own loader, followed by `_enter`."""

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
