"""Save and load PEFT adapters trained under a law: the law is stored with the weights, and other bases are refused.

PEFT stores nothing of a model's positions, so an adapter loads silently on a base it was not trained on. These two
functions are `save_pretrained` and `PeftModel.from_pretrained` with the law checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.files import write_json
from rpe3d.geometry import Law, saved_law
from rpe3d.models.card import write_adapter_card
from rpe3d.models.extend import law_of

FILE = "rpe3d.json"


def save_adapter(model: Any, folder: str | Path) -> None:
    """Save a PEFT model's adapter with the law that its base is under."""
    law = law_of(model.get_base_model())
    if law is None:
        raise ConfigError(
            "the adapter's base model is not under a law", "save it with save_pretrained, or extend the base"
        )
    model.save_pretrained(folder)
    write_json(Path(folder) / FILE, {"schema": 1, "law": law.to_dict()})
    base = model.peft_config[model.active_adapter].base_model_name_or_path
    write_adapter_card(Path(folder), law, base or type(model.get_base_model()).__name__)


def load_adapter(base: Any, folder: str | Path, **options: Any) -> Any:
    """Load an adapter onto a base that is under the law that the adapter was trained with."""
    from peft import PeftModel

    check_adapter(base, folder)
    return PeftModel.from_pretrained(base, str(folder), **options)


def adapter_law(folder: str | Path) -> Law:
    """Return the law that an adapter was trained under."""
    path = Path(folder) / FILE
    try:
        return saved_law(json.loads(path.read_text(encoding="utf-8"))["law"])
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {FILE}, so it was not trained under a law", "load or merge it with PEFT itself"
        ) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error})", "copy the adapter, or save it with save_adapter") from None


def check_adapter(base: Any, folder: str | Path) -> None:
    """Refuse a base model whose law is not the one that the adapter was trained under."""
    check_law(law_of(base), folder)


def check_law(found: Law | None, folder: str | Path) -> None:
    """Refuse a base whose law, or lack of one, differs from what the adapter was trained under."""
    needed = adapter_law(folder)
    if found is None:
        raise ConfigError(
            f"the adapter was trained under {needed.name}, but this base is not under a law",
            f"rpe3d.extend(base, {needed.name!r}, context={needed.context}, ...) first",
        )
    if found != needed:
        ours, theirs = needed.to_dict(), found.to_dict()
        # Of both: either leaves out parameters that came later than the law, where they are at their defaults.
        differing = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        raise ConfigError(
            f"the adapter's law and the base's differ in {', '.join(differing)}",
            "extend the base with the adapter's law",
        )
