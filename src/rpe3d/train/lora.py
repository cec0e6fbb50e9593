"""Choose which parameters are trained: low-rank adapters, also LongLoRA's embeddings and norms, or everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rpe3d.config import ConfigError
from rpe3d.models import law_of
from rpe3d.models.adapters import FILE
from rpe3d.models.card import write_adapter_card
from rpe3d.train.settings import Settings

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def trainable(model: Any, settings: Settings) -> Any:
    """Return the model with its trained parameters in float32: bfloat16 would round small steps away."""
    if settings.method != "full":
        from peft import LoraConfig, get_peft_model

        names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if missing := [name for name in PROJECTIONS if name not in names]:
            raise ConfigError(
                f"{type(model).__name__} has no {missing[0]}, which LoRA adapts", "train it with --method full"
            )
        plus: dict[str, Any] = {}
        if settings.method == "lora-plus":
            tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
            plus = {"modules_to_save": _embeddings_and_norms(model), "ensure_weight_tying": tied}
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(PROJECTIONS),
            task_type="CAUSAL_LM",
            **plus,
        )
        model = get_peft_model(model, config)
        model.peft_config["default"].base_model_name_or_path = base_name(settings.model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return model


def base_name(model: str) -> str:
    """Return the name by which an adapter refers to its base: a folder by its full path."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _embeddings_and_norms(model: Any) -> list[str]:
    """Return what else LongLoRA trains, by the last part of its name: modules with "embed" or "norm" in it."""
    ends = {name.rpartition(".")[2] for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    return sorted(end for end in ends if "embed" in end or "norm" in end)


def save_trained(
    model: Any,
    folder: Path,
    state: dict[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    base_sha256: str | None = None,
) -> None:
    """Save an adapter with its law, or a whole model with its law in its config, without contacting the hub.

    `base_sha256` is the digest of the files that the adapter was trained on, for `merge` to compare.
    """
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder, state_dict=state)
        return
    law = law_of(model.get_base_model())
    assert law is not None
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
    about = {"schema": 1, "law": law.to_dict()} | ({"base_sha256": base_sha256} if base_sha256 else {})
    text = json.dumps(about, indent=2) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")
    write_adapter_card(folder, law, model.peft_config["default"].base_model_name_or_path, training)
