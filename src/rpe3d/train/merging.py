"""An adapter and its base as one model, whose config carries the law."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.models import extend, pretrained_length
from rpe3d.models.adapters import FILE, adapter_law
from rpe3d.models.checkpoint import fingerprint
from rpe3d.models.extend import check_savable
from rpe3d.models.load import Loaded, load

CONFIG = "adapter_config.json"
GIVE = "give the adapter folder of a `rpe3d train` run"
UNFINISHED = "the run is not finished: the same `rpe3d train` command resumes it"


def adapter_base(folder: Path) -> str:
    """Return the name of the model that an adapter was trained on."""
    path = folder / CONFIG
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no adapter", _where_instead(folder)) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error})", "copy the adapter again") from None


def _where_instead(folder: Path) -> str:
    """Find the adapter that was probably meant."""
    if (folder / "adapter" / CONFIG).is_file():
        return f"its adapter is {folder / 'adapter'}: give that folder"
    if (folder / "run.json").is_file():
        whole = (folder / "model").is_dir()
        return f"the run trained a whole model, {folder / 'model'}, which needs no merging" if whole else UNFINISHED
    return "it is a whole model, which needs no merging" if (folder / "config.json").is_file() else GIVE


def merge(folder: Path, base: str | None = None, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Loaded:
    """Merge an adapter into its base, under the adapter's law. Sums are float32 and rounded to `dtype` once."""
    from peft import PeftModel

    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", GIVE)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no adapter", _where_instead(folder))
    law = adapter_law(folder)
    name = base or adapter_base(folder)
    loaded = load(name, dtype=torch.float32, device="cpu", **options)
    positions = pretrained_length(loaded.model)
    if positions != law.pretrained:
        raise ConfigError(
            f"the adapter was trained on a model of {law.pretrained} positions, and {name} has {positions}",
            "give --base the model that it was trained on",
        )
    extend(loaded.model, law)
    check_savable(loaded.model)
    try:
        merged = PeftModel.from_pretrained(loaded.model, str(folder)).merge_and_unload()
    except RuntimeError as error:  # torch's, of weights that have other shapes
        why = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"the adapter does not fit {name} ({why})", "give --base the model that it was trained on"
        ) from None
    if loaded.tokenizer is not None:
        loaded.tokenizer.model_max_length = law.context
    notes = (*loaded.notes, *_other_files(folder, name))
    return Loaded(model=merged.to(dtype), tokenizer=loaded.tokenizer, source=loaded.source, notes=notes)


def _other_files(folder: Path, base: str) -> list[str]:
    """Say so where the base's files are not those that the adapter was trained on; nothing where that is not known."""
    trained_on = json.loads((folder / FILE).read_text(encoding="utf-8")).get("base_sha256")
    if trained_on is None or fingerprint(base) in (None, trained_on):
        return []
    return [f"the files of {base} are not those that the adapter was trained on: merged all the same"]
