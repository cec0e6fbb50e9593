"""Put a model under one law after another and restore it afterwards; describe it for results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.geometry import Law, LawSpec
from rpe3d.models import extend, facts, law_of, restore
from rpe3d.models.extend import check_layers
from rpe3d.models.own_context import as_the_checkpoint_has_it

Cell = tuple[str, int]
"""A law's label and a length."""
STOCK = "stock"


def laws_of(
    model: Any, entries: Sequence[LawSpec], lengths: Sequence[int], context: int | None = None
) -> Mapping[Cell, Law | ConfigError | None]:
    """Return every law at every length, as `laws_at` does; refuse if there is none at all.

    Without laws, it returns None for the model as it is: any checkpoint can be measured that way, even one that cannot
    take a law.
    """
    own = law_of(model)
    if not entries:
        return {(own.name if own else STOCK, length): None for length in lengths}
    made = laws_at([as_the_checkpoint_has_it(model, entry) for entry in entries], lengths, facts(model), context)
    raise_if_all_refuse(made.values())
    check_all_layers(model, made.values())
    return made


def laws_at(
    entries: Sequence[LawSpec], lengths: Sequence[int], known: Mapping[str, Any], context: int | None = None
) -> dict[Cell, Law | ConfigError]:
    """Return every law at every length, with the defaults for that length or for a given `context`.

    If a law refuses, its refusal is returned in place of the law.
    """
    made: dict[Cell, Law | ConfigError] = {}
    for entry in entries:
        for length in lengths:
            try:
                made[entry.label, length] = entry.at(context or length, known)
            except ConfigError as refusal:
                made[entry.label, length] = refusal
    return made


def raise_if_all_refuse(laws: Iterable[Law | ConfigError]) -> None:
    """Raise the first refusal if no law could be made."""
    found = list(laws)
    refusals = [law for law in found if isinstance(law, ConfigError)]
    if len(refusals) == len(found):
        raise refusals[0]


def check_all_layers(model: Any, laws: Iterable[Law | ConfigError]) -> None:
    """Refuse a law that names layers which the model lacks, before any is measured."""
    for law in laws:
        if isinstance(law, Law):
            check_layers(model, law)


def own_length(model: Any) -> int:
    """Return the context that a model was made for: Vicuna 16k and LongChat have it in `max_sequence_length`."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_sequence_length", "seq_length")
    said = [int(getattr(config, name, None) or 0) for name in names]
    if not any(said):
        raise ConfigError(f"{type(model).__name__} does not say how long its context is", "pass --length")
    return max(said)


@contextmanager
def under(model: Any, law: Law | None) -> Iterator[None]:
    """Put a model under a law (None: leave it as it is) inside a `with` block, and restore it afterwards."""
    own = law_of(model)
    if law is not None and not law.is_stock:
        extend(model, law)
    elif law is not None and own is not None:
        restore(model)
    try:
        with _every_text_afresh(model):
            yield
    finally:
        if law is not None and own is not None:
            extend(model, own)
        elif law is not None and law_of(model) is not None:
            restore(model)


def growing(model: Any) -> list[Any]:
    """Return the rotary modules whose frequencies grow with the text, and stay grown for the next one."""
    return [module for module in model.modules() if any("dynamic" in kind for kind in _rope_types(module).values())]


@contextmanager
def _every_text_afresh(model: Any) -> Iterator[None]:
    """Have every text read with the frequencies of its own length, whatever was read before it."""
    rotaries = growing(model)

    def begin(_: Any, __: Any, given: Mapping[str, Any]) -> None:
        cache = given.get("past_key_values")
        if cache is None or not cache.get_seq_length():
            for rotary in rotaries:
                x = rotary.inv_freq if hasattr(rotary, "inv_freq") else next(rotary.buffers())
                for layer_type in _rope_types(rotary):  # one token lets transformers return to the first frequencies
                    given_type = {} if layer_type is None else {"layer_type": layer_type}
                    rotary(x, torch.zeros(1, 1, dtype=torch.long, device=x.device), **given_type)

    # A PEFT model's `generate` calls only its base.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hooks = [one.register_forward_pre_hook(begin, with_kwargs=True) for one in {model, base} if rotaries]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rope_types(module: Any) -> dict[str | None, str]:
    """Return the rope type of a rotary module for each type of layers; None stands for all layers."""
    kind = getattr(module, "rope_type", None)
    return kind if isinstance(kind, dict) else {} if kind is None else {None: str(kind)}


def about(model: Any, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a results file records about a model that is put under laws."""
    return _about(model, name, {key: facts[key] for key in ("pretrained", "head_dim", "rope_theta")})


def about_as_it_is(model: Any, name: str) -> dict[str, Any]:
    """Return what a results file records about a model with its own rope settings or law."""
    law = law_of(model)
    config = model.config.get_text_config(decoder=True)
    told = {
        "pretrained": law.pretrained if law else getattr(config, "max_position_embeddings", None),
        "rope": None if law else getattr(config, "rope_parameters", None),
        "law": law.to_dict() if law else None,
    }
    return _about(model, name, told)


def _about(model: Any, name: str, positions: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        **positions,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
    }
