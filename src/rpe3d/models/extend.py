"""Put a model under a law in place (`extend`), and take it back to stock (`restore`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from rpe3d.config import SCALINGS, ConfigError, Rotary, Scaling, make_scaling, whole
from rpe3d.geometry import DEFAULT, LAWS, Law, LawSpec, make_law, parse_law, read_law
from rpe3d.geometry.frequencies import model_frequencies
from rpe3d.models.carried import Carried, carried, kind_of, parameters_of, stock_of
from rpe3d.models.noted import is_watched, unwatch, watch
from rpe3d.models.own_context import as_the_checkpoint_has_it, pretrained_positions
from rpe3d.models.probe import Findings, probe, refusal, run_one_token, table_of
from rpe3d.models.registry import DYNAMIC, NAME, register, rope_init

_STATE = "_rpe3d_stock"
Model = TypeVar("Model")
"""A model is returned with the type that it was passed with."""
_FOREIGN = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings")
"""Rope parameters that model families use for purposes other than frequencies."""


@dataclass
class Stock:
    """The state of a model before it was extended: enough to restore it bit for bit."""

    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    attention: str
    rotaries: list[tuple[dict[str, Tensor], dict[str, Any]]] = field(default_factory=list)
    """Buffers and attributes of the modules that compute cos and sin; empty if the model was loaded extended."""


@dataclass(frozen=True)
class _Reading:
    """Facts about a model, whether it is under a law or not."""

    found: Findings
    stock: Stock | None
    """State before the law; None if the model is stock."""
    facts: dict[str, Any]


@overload
def extend(model: Model, law: str | Path = DEFAULT, *, context: int, **parameters: Any) -> Model: ...


@overload
def extend(model: Model, law: Law | str | Path) -> Model: ...


def extend(model: Model, law: Law | str | Path = DEFAULT, *, context: int | None = None, **parameters: Any) -> Model:
    """Give a Hugging Face causal language model a longer context, in place, and return it.

    `law` is a name from `rpe3d.laws()`, with `parameters` as keywords or in the string (`"3d-rpe:chunk=64"`); or a law
    file, whose own context is the default; or a `Law` made for this model, without further arguments. The pretrained
    length, RoPE base, scaling and head layout are read from the model. If anything is wrong, the model is left
    unchanged. Extending again replaces the law.
    """
    read = _read(model)
    found = read.found
    asked: Any = law
    if isinstance(law, str | Path):
        asked = as_the_checkpoint_has_it(model, read_law(law) if isinstance(law, Path) else parse_law(law))
    made = _law_for(read.facts, asked, context, parameters)
    _check_layers(made, text_config(model), found)
    stock = read.stock or _stock(text_config(model), found.rotaries)
    register()
    tables = [_kept(rotary) for rotary in found.rotaries]
    watched = [rotary for rotary in found.rotaries if is_watched(rotary)]
    shared = _own_config(model, found.rotaries)
    try:
        _apply(text_config(model), found, made, stock)
        run_one_token(model, type(model).__name__, how="under a rope type of ours")
    except BaseException:
        for module, name, value in shared:
            setattr(module, name, value)
        _put_back(found.rotaries, tables)
        unwatch(found.rotaries)
        watch(watched)
        raise
    setattr(model, _STATE, stock)
    return model


def check_layers(model: Any, law: Law) -> None:
    """Refuse a law that names layers which the model lacks, or which no law reaches; `extend` does, too."""
    if law.layers:
        _check_layers(law, text_config(model), _read(model).found)


def facts(model: Any) -> dict[str, Any]:
    """Return the keyword arguments of `make_law` that describe a model; refuse a model that cannot take a law.

    They are found by running one token at two positions. The model is left unchanged, under a law or not.
    """
    return _read(model).facts


def restore(model: Model) -> Model:
    """Turn an extended model back into the stock model, bit for bit and in place, and return it."""
    stock = getattr(model, _STATE, None) or _loaded_stock(model, text_config(model))
    if stock is None:
        raise ConfigError("this model is not extended", "there is nothing to restore")
    rotaries = probe(model, text_config(model)).rotaries
    _own_config(model, rotaries)
    config = text_config(model)
    for one in _configs(config, rotaries):
        one.rope_parameters = copy.deepcopy(stock.rope_parameters)
        one.max_position_embeddings = stock.max_position_embeddings
    unwatch(rotaries)
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
    """Return the number of positions that a model was pretrained on, whether it is under a law or not."""
    config, law = text_config(model), law_of(model)
    if law is not None:
        return law.pretrained
    _rope_parameters(config)  # refuses a model without rotation, which may know no such length
    known = pretrained_positions(config)
    if known is None:
        raise ConfigError(f"{type(config).__name__} has no max_position_embeddings", "use another model")
    return known


def as_stock(model: Model) -> Model:
    """Restore a model if it is under a law, and return it."""
    return model if law_of(model) is None else restore(model)


def check_savable(model: Any) -> None:
    """Refuse an extended model whose config class accepts only its own rope types, as `save_pretrained` would later."""
    try:
        text_config(model).validate_rope()
    except Exception as error:  # config classes raise what they like
        raise ConfigError(
            f"{type(model).__name__} runs under a law but cannot be saved with it: its config accepts only the rope "
            "types that it knows",
            "save the stock model, and extend it wherever it is loaded",
        ) from error


def text_config(given: Any) -> Any:
    """Return the config that holds a causal language model's positions; refuse anything else."""
    model: Any = given
    if not isinstance(given, nn.Module) or not hasattr(given, "config"):
        raise ConfigError(f"{type(model).__name__} is not a Hugging Face model", "pass a transformers causal LM")
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or not hasattr(model, "generate") or not model.can_generate():
        raise ConfigError(f"{type(model).__name__} is not a causal language model", "pass one that generates text")
    return config


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Copy the model's own rope parameters from its config: one dict, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        raise ConfigError(
            f"{type(config).__name__} describes no rotary position encoding (rope_parameters)",
            "use a model that has one: docs/families.md lists them",
        )
    return copy.deepcopy(dict(parameters))


def _nested(parameters: dict[str, Any]) -> bool:
    """Return whether there are several rope parameters, one per layer type."""
    return "rope_type" not in parameters and "rope_theta" not in parameters


def _full(parameters: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the rope parameters of the full-attention layers."""
    return dict(parameters[kind] if _nested(parameters) else parameters)


def _check_rope_type(family: str, rope_type: str) -> None:
    """Refuse a model whose own frequencies no law can build on."""
    if rope_type not in ("default", "proportional", *SCALINGS):
        why = {
            "dynamic": "whose frequencies change with the length of the text",
        }.get(rope_type, "which rpe3d does not know")
        raise refusal(family, f"no law supports its rope type {rope_type!r}, {why}")


def _read(model: Any) -> _Reading:
    """Read the facts that a law is made from; refuse a model that cannot take one."""
    config, family = text_config(model), type(model).__name__
    stock = getattr(model, _STATE, None) or _loaded_stock(model, config)
    base = stock.rope_parameters if stock else _rope_parameters(config)
    found = probe(model, config)
    law = law_of(model)
    pretrained = law.pretrained if law else pretrained_positions(config)
    if pretrained is None:
        raise refusal(family, "its config names no length that it was pretrained on (max_position_embeddings)")
    own = _full(base, kind_of(config))
    _check_rope_type(family, own.get("rope_type", "default"))
    rotary = Rotary(
        head_dim=found.head_dim,
        rope_theta=_base(own, found),
        rotary_dim=2 * found.frequencies.numel(),
        interleaved=found.interleaved,
        scaling=_scaling(own, pretrained),
    )
    if stock is None:
        # `model.to(torch.bfloat16)` rounds the table too. A law brings its own, in float32; `restore` brings this back.
        rounding = torch.finfo(found.table_dtype)
        relative, absolute = max(1e-4, rounding.eps), rounding.smallest_normal * rounding.eps
        if not torch.allclose(model_frequencies(rotary), found.frequencies, rtol=relative, atol=absolute):
            raise refusal(family, "its frequencies are not those of its rope parameters")
    return _Reading(found, stock, {"pretrained": pretrained, **rotary.to_dict()})


def _base(own: dict[str, Any], found: Findings) -> float:
    """Return the base b with θ_l = b^(-2l/r) for the r rotated dimensions.

    `proportional` frequencies are B^(-2l/d) with the whole head d, of which only the first dimensions rotate: so b =
    B^(r/d).
    """
    base: float = own.get("rope_theta", 10000.0)
    whole_head = own.get("rope_type") == "proportional"
    return base ** (2 * found.frequencies.numel() / found.head_dim) if whole_head else base


def _scaling(own: dict[str, Any], pretrained: int) -> Scaling | None:
    """Return a model's own scaling, from the rope parameters that transformers reads.

    A `proportional` rope type leaves, besides its base, a linear scaling or none.
    """
    given = {k: v for k, v in own.items() if k not in _FOREIGN}
    match own.get("rope_type"):
        case "proportional":
            factor = own.get("factor", 1.0)
            given = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "longrope":
            if given.get("factor") is None:  # as transformers has it
                given["factor"] = max(1.0, pretrained / given["original_max_position_embeddings"])
            given.pop("short_factor", None)
    return make_scaling(given)


def _law_for(facts: dict[str, Any], law: Law | LawSpec, context: int | None, parameters: dict[str, Any]) -> Law:
    """Return the requested law for a model with these facts, or the given law if it fits the model."""
    if not isinstance(law, Law | LawSpec):
        raise ConfigError(
            f"law is {law!r}, which is not a Law, a str or a Path",
            "pass a name from rpe3d.laws(), a law file, or a Law",
        )
    if isinstance(law, LawSpec):
        law.check(facts["pretrained"])
        context = law.context if context is None else context
        if context is None:
            raise TypeError("extend() missing 1 required keyword-only argument: 'context'")
        if read := sorted(facts.keys() & parameters):
            raise ConfigError(f"{read[0]} is read from the model", "leave it out: only the law's parameters can be set")
        return make_law(law.name, context=whole("context", context), **facts, **{**law.parameters, **parameters})
    if given := sorted(parameters) if context is None else ["context"]:
        raise ConfigError(f"{given[0]} is given together with a finished law", "leave it out, or pass the law by name")
    if LAWS.get(law.name, type(law)) is not type(law):
        raise ConfigError(
            f"the law is a {type(law).__name__}, but {law.name} is the name of a {LAWS[law.name].__name__}",
            "pass a law from make_law, or give a law of your own a name of its own",
        )
    made_for = law.to_dict()
    for name, value in facts.items():
        if made_for[name] != value:
            raise ConfigError(
                f"the law was made for a model whose {name} is {made_for[name]!r}, but this model's is {value!r}",
                f"make it for this model: rpe3d.extend(model, {law.name!r}, context={law.context}, ...)",
            )
    return law


def _check_layers(law: Law, config: Any, found: Findings) -> None:
    """Refuse a law with other laws for layers that the model lacks, or that no law reaches."""
    if not law.layers:
        return
    count, kinds, own = config.num_hidden_layers, getattr(config, "layer_types", None) or (), kind_of(config)
    reached = [n for n in range(count) if n not in found.unrotated and (own not in kinds or kinds[n] == own)]
    hint = f"choose from {', '.join(map(str, reached))}"
    for layer in law.layers:
        if layer >= count:
            raise ConfigError(f"the law names layer {layer}, but the model has layers 0 to {count - 1}", hint)
        if layer not in reached:
            raise ConfigError(f"the law names layer {layer}, which keeps its own attention", hint)


def _stock(config: Any, rotaries: tuple[Any, ...]) -> Stock:
    return Stock(
        rope_parameters=_rope_parameters(config),
        max_position_embeddings=int(config.max_position_embeddings),
        attention=config._attn_implementation or "sdpa",
        rotaries=[_kept(rotary) for rotary in rotaries],
    )


def _kept(rotary: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = ("rope_type", "max_seq_len_cached", "original_max_seq_len")
    names += tuple(name for name in vars(rotary) if name.endswith("attention_scaling"))
    buffers = {name: x.clone() for name, x in rotary.named_buffers(recurse=False)}
    return buffers, {name: copy.copy(getattr(rotary, name)) for name in names if hasattr(rotary, name)}


def _put_back(rotaries: tuple[Any, ...], kept: list[tuple[dict[str, Tensor], dict[str, Any]]]) -> None:
    for rotary, (buffers, attributes) in zip(rotaries, kept, strict=True):
        for name, buffer in buffers.items():
            setattr(rotary, name, buffer.to(getattr(rotary, name).device))
        for name, value in attributes.items():
            setattr(rotary, name, value)


def _own_config(model: Any, rotaries: tuple[Any, ...]) -> list[tuple[nn.Module, str, Any]]:
    """Give the model its own copies of shared configs, and return what was replaced where."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for rotary in rotaries:
        copy.deepcopy(getattr(rotary, "config", None), copies)
    shared = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig) and id(value) in copies
    ]
    for module, name, value in shared:
        setattr(module, name, copies[id(value)])
    return shared


def _configs(config: Any, rotaries: tuple[Any, ...]) -> list[Any]:
    """Return a model's config, and the copies of it that some families compute cos and sin from."""
    held = [config, *(getattr(rotary, "config", config) for rotary in rotaries)]
    return list({id(one): one for one in held}.values())


def _loaded_stock(model: Any, config: Any) -> Stock | None:
    """Return the stock state recorded in a config that was saved extended."""
    parameters = parameters_of(config)
    if parameters is None or "law" not in parameters:
        return None
    return Stock(
        rope_parameters=stock_of(parameters),
        max_position_embeddings=int(parameters.get("stock_positions", parameters["law"]["pretrained"])),
        attention="sdpa" if getattr(model, "_supports_sdpa", False) else "eager",
    )


def _apply(config: Any, found: Findings, law: Law, stock: Stock) -> None:
    """Set the config, the tables and the attention, in this order: each reads the one before."""
    rope_type = DYNAMIC if law.grows else NAME
    kind, nested = kind_of(config), _nested(stock.rope_parameters)
    own = _full(stock.rope_parameters, kind)
    # Whatever else a family keeps there stays: some read a temperature or a section of their own from it.
    entry: dict[str, Any] = {**copy.deepcopy(own), "rope_type": rope_type, "rope_theta": own.get("rope_theta", 10000.0)}
    entry |= {"law": law.to_dict(), "stock": copy.deepcopy(stock.rope_parameters)}
    if stock.max_position_embeddings != law.pretrained:
        entry["stock_positions"] = stock.max_position_embeddings
    if found.unrotated:
        entry["unrotated_layers"] = list(found.unrotated)
    if found.pieces:
        entry["head_pieces"] = [list(piece) for piece in found.pieces]
        entry.setdefault("factor", 1.0)  # DeepSeek reads it as soon as a rope type is not the default
    if found.unturned_pairs:
        entry["unturned_pairs"] = found.unturned_pairs
    if found.notes:
        entry["positions_noted"] = True
    held = Carried(entry, law)
    # Dynamic NTK grows from the length that transformers finds here, so there it stays the pretrained one.
    length = law.pretrained if law.grows else law.context
    for one in _configs(config, found.rotaries):
        one.rope_parameters = {**copy.deepcopy(stock.rope_parameters), kind: held} if nested else held
        one.max_position_embeddings = length

    prefix = f"{kind}_" if nested else ""
    for rotary in found.rotaries:
        theta, scaling = rope_init(config, table_of(rotary, kind).device, layer_type=kind if nested else None)
        for name in ("inv_freq", "original_inv_freq"):
            setattr(rotary, prefix + name, theta.clone())
        setattr(rotary, f"{prefix}attention_scaling", scaling)
        rotary.rope_type = {**rotary.rope_type, kind: rope_type} if nested else rope_type
        rotary.max_seq_len_cached = rotary.original_max_seq_len = length
    unwatch(found.rotaries)
    if found.notes and law.needs_attention:
        watch(found.rotaries)
    config._attn_implementation = NAME if law.needs_attention else stock.attention
