"""Fine-tune models under a law: the paper's recipe, from a laptop to a cluster.

The public names load on first use, so that the options of `rpe3d train` can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpe3d.train.limit import OutOfTime
    from rpe3d.train.merging import merge
    from rpe3d.train.run import train
    from rpe3d.train.settings import Settings, read_recipe

__all__ = ["OutOfTime", "Settings", "merge", "read_recipe", "train"]

_HOME = {
    "OutOfTime": "limit",
    "Settings": "settings",
    "merge": "merging",
    "read_recipe": "settings",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
