"""A model under one law after another, and as it was in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.geometry import Law, LawSpec
from rpe3d.models import extend, facts, law_of, restore

Place = tuple[str, int]
"""A law's label and a length."""
STOCK = "stock"


def laws_of(model: Any, entries: Sequence[LawSpec], lengths: Sequence[int]) -> dict[Place, Law | ConfigError | None]:
    """Every law at every length; where it has none for that length, its refusal.

    Without laws the model as it is, which is None: any checkpoint can be measured so, also one that takes no law.
    """
    own = law_of(model)
    if not entries:
        return {(own.name if own else STOCK, length): None for length in lengths}
    known = facts(model)
    made: dict[Place, Law | ConfigError | None] = {}
    for entry in entries:
        for length in lengths:
            try:
                made[entry.label, length] = entry.at(length, known)
            except ConfigError as refusal:
                made[entry.label, length] = refusal
    refusals = [law for law in made.values() if isinstance(law, ConfigError)]
    if len(refusals) == len(made):
        raise refusals[0]
    return made


@contextmanager
def under(model: Any, law: Law | None) -> Iterator[None]:
    """The model under a law (None: as it is), and as it was afterwards."""
    own = law_of(model)
    if law is not None and not law.is_stock:
        extend(model, law)
    elif law is not None and own is not None:
        restore(model)
    try:
        yield
    finally:
        if law is not None and own is not None:
            extend(model, own)
        elif law is not None and law_of(model) is not None:
            restore(model)


def about(model: Any, name: str) -> dict[str, Any]:
    """What a results file says of a model."""
    law = law_of(model)
    config = model.config.get_text_config(decoder=True)
    return {
        "name": name,
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "pretrained": law.pretrained if law else getattr(config, "max_position_embeddings", None),
        "rope": None if law else getattr(config, "rope_parameters", None),
        "law": law.to_dict() if law else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
    }
