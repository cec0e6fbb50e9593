"""`extend` and `restore`: a law for a model, in place, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor, nn

from rpe3d.config import SCALINGS, ConfigError, Rotary, make_scaling, whole
from rpe3d.geometry import DEFAULT, Law, make_law
from rpe3d.geometry.frequencies import model_frequencies
from rpe3d.models.carried import Carried, carried, parameters_of
from rpe3d.models.probe import Findings, probe, refusal, run_one_token
from rpe3d.models.registry import DYNAMIC, NAME, register, rope_init

_STATE = "_rpe3d_stock"


@dataclass
class Stock:
    """What a model was before: enough to make it so again, bit for bit."""

    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    attention: str
    rotaries: list[tuple[dict[str, Tensor], dict[str, Any]]] = field(default_factory=list)
    """Buffers and attributes of the modules that make cos and sin; none where the model was loaded extended."""


@dataclass(frozen=True)
class _Reading:
    """What a model says of itself, whether it is under a law or not."""

    found: Findings
    stock: Stock | None
    """What it was before; None where it is stock."""
    facts: dict[str, Any]


@overload
def extend(model: Any, law: str = DEFAULT, *, context: int, **parameters: Any) -> Any: ...


@overload
def extend(model: Any, law: Law) -> Any: ...


def extend(model: Any, law: str | Law = DEFAULT, *, context: int | None = None, **parameters: Any) -> Any:
    """Give a Hugging Face causal language model a longer context, in place; returns the model.

    `law` is any of `rpe3d.laws()`, `parameters` its own; or a `Law` that was made for this model, alone. The pretrained
    length, rope base, scaling and head layout are read from the model. Nothing is changed if anything is wrong.
    Extending again replaces the law.
    """
    read = _read(model)
    found = read.found
    made = _law_for(read.facts, law, context, parameters)
    stock = read.stock or _stock(text_config(model), found.rotaries)
    register()
    tables = [_kept(rotary) for rotary in found.rotaries]
    shared = _own_config(model)
    try:
        _apply(text_config(model), found, made, stock)
        run_one_token(model, type(model).__name__, how="under a rope type of ours")
    except BaseException:
        for module, name, value in shared:
            setattr(module, name, value)
        _put_back(found.rotaries, tables)
        raise
    setattr(model, _STATE, stock)
    return model


def facts(model: Any) -> dict[str, Any]:
    """Return the keyword arguments of `make_law` that describe a model; refuse a model that takes no law.

    Found by running one token at two positions. The model stays as it is, under a law or not.
    """
    return _read(model).facts


def restore(model: Any) -> Any:
    """Make a model stock again, bit for bit, in place; returns the model."""
    config = text_config(model)
    stock = getattr(model, _STATE, None) or _loaded_stock(model, config)
    if stock is None:
        raise ConfigError("this model is not extended", "there is nothing to restore")
    rotaries = probe(model, config).rotaries
    config.rope_parameters = copy.deepcopy(stock.rope_parameters)
    config.max_position_embeddings = stock.max_position_embeddings
    # A model that was loaded extended has its stock tables made anew from its stock config.
    kept = stock.rotaries or [_kept(type(rotary)(config=config)) for rotary in rotaries]
    _put_back(rotaries, kept)
    config._attn_implementation = stock.attention
    if hasattr(model, _STATE):
        delattr(model, _STATE)
    return model


def law_of(model: Any) -> Law | None:
    """Return the law that a model is under; None for a stock model."""
    held = carried(text_config(model))
    return None if held is None else held.law


def pretrained_length(model: Any) -> int:
    """Return how many positions a model was pretrained on, whether it is under a law or not."""
    config, law = text_config(model), law_of(model)
    if law is not None:
        return law.pretrained
    _rope_parameters(config)  # refuses a model without rotation, which may know no such length
    return int(config.max_position_embeddings)


def as_stock(model: Any) -> Any:
    """Restore a model that is under a law; returns the model."""
    return model if law_of(model) is None else restore(model)


def check_savable(model: Any) -> None:
    """Refuse an extended model whose config class takes no rope type but its own: `save_pretrained` would, later."""
    try:
        text_config(model).validate_rope()
    except Exception as error:  # config classes raise what they like
        raise ConfigError(
            f"{type(model).__name__} runs under a law but cannot be saved with it: its config takes no rope type but "
            "those it knows",
            "save the stock model, and extend it wherever it is loaded",
        ) from error


def text_config(given: Any) -> Any:
    """Return the config that holds a causal language model's positions; refuse anything else."""
    model: Any = given
    if not isinstance(given, nn.Module) or not hasattr(given, "config"):
        raise ConfigError(f"{type(model).__name__} is not a Hugging Face model", "give a transformers causal LM")
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or not hasattr(model, "generate") or not model.can_generate():
        raise ConfigError(f"{type(model).__name__} is not a causal language model", "give one that generates text")
    return config


def _rope_parameters(config: Any) -> dict[str, Any]:
    """A copy of the model's own, as its config has them: one dict, or one per type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        raise ConfigError(
            f"{type(config).__name__} describes no rotary position encoding (rope_parameters)",
            "a law needs a model that has one: docs/families.md lists them",
        )
    return copy.deepcopy(dict(parameters))


def _full(parameters: dict[str, Any]) -> dict[str, Any]:
    """Those of the layers with full attention."""
    chosen = parameters if "rope_type" in parameters or "rope_theta" in parameters else parameters["full_attention"]
    return dict(chosen)


def _check_rope_type(family: str, rope_type: str) -> None:
    """Refuse a model whose own frequencies no law is built to stand on."""
    if rope_type not in ("default", *SCALINGS):
        why = {
            "dynamic": "whose frequencies change with the length of the text",
            "longrope": "which has one set of frequencies for short texts and another for long ones",
            "proportional": "which pairs a whole head and turns only its first pairs",
        }.get(rope_type, "which is not known here")
        raise refusal(family, f"no law is built to stand on its rope type {rope_type!r}, {why}")


def _read(model: Any) -> _Reading:
    """Find out what a law is made from, or refuse a model that takes none."""
    config, family = text_config(model), type(model).__name__
    stock = getattr(model, _STATE, None) or _loaded_stock(model, config)
    base = stock.rope_parameters if stock else _rope_parameters(config)
    pretrained = stock.max_position_embeddings if stock else int(config.max_position_embeddings)
    found = probe(model, config)
    own = _full(base)
    _check_rope_type(family, own.get("rope_type", "default"))
    rotary = Rotary(
        head_dim=found.head_dim,
        rope_theta=own.get("rope_theta", 10000.0),
        rotary_dim=2 * found.frequencies.numel(),
        interleaved=found.interleaved,
        scaling=make_scaling(own),
    )
    if stock is None:
        # `model.to(torch.bfloat16)` rounds the table too. A law brings its own, in float32; `restore` brings this back.
        rounding = torch.finfo(found.table_dtype)
        relative, absolute = max(1e-4, rounding.eps), rounding.smallest_normal * rounding.eps
        if not torch.allclose(model_frequencies(rotary), found.frequencies, rtol=relative, atol=absolute):
            raise refusal(family, "its frequencies are not those of its rope parameters")
    return _Reading(found, stock, {"pretrained": pretrained, **rotary.to_dict()})


def _law_for(facts: dict[str, Any], law: str | Law, context: int | None, parameters: dict[str, Any]) -> Law:
    """The law of this name for the model of these facts; or the law given, if it was made for such a model."""
    if not isinstance(law, Law):
        if context is None:
            raise TypeError("extend() missing 1 required keyword-only argument: 'context'")
        if read := sorted(facts.keys() & parameters):
            raise ConfigError(
                f"{read[0]} is read from the model", "leave it out: only the law's own parameters are free"
            )
        return make_law(law, context=whole("context", context), **facts, **parameters)
    if given := sorted(parameters) if context is None else ["context"]:
        raise ConfigError(
            f"{given[0]} is given beside a law that was made with its own", "leave it out, or give the law by its name"
        )
    made_for = law.to_dict()
    for name, value in facts.items():
        if made_for[name] != value:
            raise ConfigError(
                f"the law was made for a model whose {name} is {made_for[name]!r}, and this model's is {value!r}",
                f"make it for this model: rpe3d.extend(model, {law.name!r}, context={law.context}, ...)",
            )
    return law


def _stock(config: Any, rotaries: tuple[Any, ...]) -> Stock:
    return Stock(
        rope_parameters=_rope_parameters(config),
        max_position_embeddings=int(config.max_position_embeddings),
        attention=config._attn_implementation or "sdpa",
        rotaries=[_kept(rotary) for rotary in rotaries],
    )


def _kept(rotary: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = (
        "rope_type",
        "attention_scaling",
        "full_attention_attention_scaling",
        "max_seq_len_cached",
        "original_max_seq_len",
    )
    buffers = {name: x.clone() for name, x in rotary.named_buffers(recurse=False)}
    return buffers, {name: copy.copy(getattr(rotary, name)) for name in names if hasattr(rotary, name)}


def _put_back(rotaries: tuple[Any, ...], kept: list[tuple[dict[str, Tensor], dict[str, Any]]]) -> None:
    for rotary, (buffers, attributes) in zip(rotaries, kept, strict=True):
        for name, buffer in buffers.items():
            setattr(rotary, name, buffer.to(getattr(rotary, name).device))
        for name, value in attributes.items():
            setattr(rotary, name, value)


def _own_config(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Give the model a config of its own, since another may be built on the same object; what was replaced where."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    shared = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig) and id(value) in copies
    ]
    for module, name, value in shared:
        setattr(module, name, copies[id(value)])
    return shared


def _loaded_stock(model: Any, config: Any) -> Stock | None:
    """What a config that was saved extended says of its stock model."""
    parameters = parameters_of(config)
    if parameters is None or "law" not in parameters:
        return None
    return Stock(
        rope_parameters=copy.deepcopy(parameters["stock"]),
        max_position_embeddings=int(parameters["law"]["pretrained"]),
        attention="sdpa" if getattr(model, "_supports_sdpa", False) else "eager",
    )


def _apply(config: Any, found: Findings, law: Law, stock: Stock) -> None:
    """Config, tables and attention, in this order: each reads the one before."""
    rope_type = DYNAMIC if law.grows else NAME
    own = _full(stock.rope_parameters)
    entry: dict[str, Any] = {"rope_type": rope_type, "rope_theta": own.get("rope_theta", 10000.0)}
    if "partial_rotary_factor" in own:
        entry["partial_rotary_factor"] = own["partial_rotary_factor"]
    entry |= {"law": law.to_dict(), "stock": copy.deepcopy(stock.rope_parameters)}
    if found.unrotated:
        entry["unrotated_layers"] = list(found.unrotated)
    nested = "rope_type" not in stock.rope_parameters and "rope_theta" not in stock.rope_parameters
    held = Carried(entry, law)
    config.rope_parameters = {**copy.deepcopy(stock.rope_parameters), "full_attention": held} if nested else held
    # Dynamic NTK grows from the length that transformers finds here, so there it stays the pretrained one.
    config.max_position_embeddings = length = law.pretrained if law.grows else law.context

    prefix = "full_attention_" if nested else ""
    for rotary in found.rotaries:
        theta, scaling = rope_init(config, getattr(rotary, f"{prefix}inv_freq").device)
        for name in ("inv_freq", "original_inv_freq"):
            setattr(rotary, prefix + name, theta.clone())
        setattr(rotary, f"{prefix}attention_scaling", scaling)
        rotary.rope_type = {**rotary.rope_type, "full_attention": rope_type} if nested else rope_type
        rotary.max_seq_len_cached = rotary.original_max_seq_len = length
    config._attn_implementation = NAME if law.needs_attention else stock.attention
