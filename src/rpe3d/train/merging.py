"""Merge an adapter and its base into one model whose config carries the law."""

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
WEIGHTS = "adapter_model.safetensors"
GIVE = "pass the adapter folder of a `rpe3d train` run"
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
    """Return a hint at the adapter that was probably meant."""
    if (folder / "adapter" / CONFIG).is_file():
        return f"its adapter is {folder / 'adapter'}: pass that folder"
    if (folder / "run.json").is_file():
        whole = (folder / "model").is_dir()
        return f"the run trained a whole model, {folder / 'model'}, which needs no merging" if whole else UNFINISHED
    return "it is a whole model, which needs no merging" if (folder / "config.json").is_file() else GIVE


def merge(folder: Path, base: str | None = None, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Loaded:
    """Merge an adapter into its base, under the adapter's law; weights are summed in float32 and rounded once."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

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
            f"the adapter was trained on a model of {law.pretrained} positions, but {name} has {positions}",
            "pass the model that it was trained on to --base",
        )
    held = _tensors(folder)
    extend(loaded.model, law)
    check_savable(loaded.model)
    try:
        adapted = PeftModel.from_pretrained(loaded.model, str(folder))
        # PEFT saves the base's embeddings beside an adapter of them.
        fitting = [set(get_peft_model_state_dict(adapted, save_embedding_layers=both)) for both in (False, True)]
        if held not in fitting:
            raise ConfigError(
                f"the adapter does not fit {name}: its tensors are of other layers",
                "pass the model that it was trained on to --base",
            )
        ends = (loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings())
        if loaded.model.config.get_text_config().tie_word_embeddings and any(
            isinstance(x, BaseTunerLayer) for x in ends
        ):
            raise ConfigError(
                f"the adapter changes the embeddings or the head of {name}, which are one tensor there",
                "load it unmerged (`rpe3d.models.adapters.load_adapter`): merging would change both",
            )
        merged = adapted.merge_and_unload()
    except RuntimeError as error:  # torch's, of weights that have other shapes
        why = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"the adapter does not fit {name} ({why})", "pass the model that it was trained on to --base"
        ) from None
    if loaded.tokenizer is not None:
        loaded.tokenizer.model_max_length = law.context
    notes = (*loaded.notes, *_other_files(folder, name))
    return Loaded(model=merged.to(dtype), tokenizer=loaded.tokenizer, source=loaded.source, notes=notes)


def _tensors(folder: Path) -> set[str]:
    """Return the names of an adapter's tensors; refuse weights that are missing or damaged."""
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}", "copy the adapter again")
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or cut short ({error})", "copy the adapter again") from None


def _other_files(folder: Path, base: str) -> list[str]:
    """Return a note if the base's files are not those the adapter was trained on; none if that is unknown."""
    trained_on = json.loads((folder / FILE).read_text(encoding="utf-8")).get("base_sha256")
    if trained_on is None or fingerprint(base) in (None, trained_on):
        return []
    return [f"the files of {base} are not those that the adapter was trained on: merging anyway"]
