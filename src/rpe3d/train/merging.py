"""Merge an adapter and its base into one model whose config carries the law."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
OTHER_BASE = "pass the model that it was trained on to --base"
UNMERGED = "load it unmerged (`rpe3d.models.adapters.load_adapter`)"
CLOSE = 1e-4
"""Part of a token's row by which merging may change it: hundreds of roundings of float32, less than one of float16."""


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
            f"the adapter was trained on a model of {law.pretrained} positions, but {name} has {positions}", OTHER_BASE
        )
    extend(loaded.model, law)
    check_savable(loaded.model)
    tied = _tied(loaded.model)
    merged = _merged(_adapted(loaded.model, folder, name), name, tied)
    if loaded.tokenizer is not None:
        loaded.tokenizer.model_max_length = law.context
    notes = (*loaded.notes, *_other_files(folder, name))
    return Loaded(model=merged.to(dtype), tokenizer=loaded.tokenizer, source=loaded.source, notes=notes)


def _adapted(model: Any, folder: Path, name: str) -> Any:
    """Return a model with an adapter that fits it and that can be merged; refuse any other."""
    from peft import PeftModel, get_peft_model_state_dict

    held = _tensors(folder)
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except RuntimeError as error:  # torch's, of weights that have other shapes
        raise ConfigError(f"the adapter does not fit {name} ({_short(error)})", OTHER_BASE) from None
    if not hasattr(adapted, "merge_and_unload"):
        kind = adapted.peft_config[adapted.active_adapter].peft_type.value
        raise ConfigError(f"an adapter of type {kind} changes no weights, so it cannot be merged", UNMERGED)
    # PEFT saves the base's embeddings beside an adapter of them.
    if held not in [set(get_peft_model_state_dict(adapted, save_embedding_layers=both)) for both in (False, True)]:
        raise ConfigError(f"the adapter does not fit {name}: its tensors are of other layers", OTHER_BASE)
    return adapted


def _merged(adapted: Any, name: str, tied: bool) -> Any:
    """Return the base with its adapter merged; refuse what PEFT cannot merge, and what it merges wrongly if tied."""
    wanted = _ends(adapted.get_base_model()) if tied else []
    try:
        merged = adapted.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"PEFT cannot merge the adapter ({_short(error)})", UNMERGED) from None
    found = _ends(merged) if tied else []
    if any(((x - y).norm(dim=-1) > CLOSE * y.norm(dim=-1)).any() for x, y in zip(found, wanted, strict=True)):
        raise ConfigError(
            f"the adapter changes the embeddings or the head of {name}, which are one tensor there",
            f"{UNMERGED}: merging would change both",
        )
    return merged


def _tied(model: Any) -> bool:
    """Return whether a model's embeddings and head are one tensor; configs say so in several places, or wrongly."""
    return getattr(model.get_output_embeddings(), "weight", None) is model.get_input_embeddings().weight


@torch.no_grad()
def _ends(model: Any) -> list[Tensor]:
    """Return what the embeddings and the head do, for every token: projections of its embedding, and its logits."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tokens, width = embeddings.weight.shape
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    return [torch.cat([embeddings(ids) @ x.T for ids in torch.arange(tokens).split(4096)]), head(x).T]


def _short(error: Exception) -> str:
    """Return the beginning of an error's text, on one line."""
    return " ".join(str(error).split())[:160]


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
