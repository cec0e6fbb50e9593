"""Record what a result was made from (the model itself, not its name), and refuse to resume results of something else.

A results file names its model, settings, data and versions, and is resumed only if all of them are the same. The model
is identified by digests of everything that decides its numbers, so that weights trained again in the same folder are
another model. A row and a line of predictions carry one short digest of all of it (`made_from`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpe3d import __version__
from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.retrieval import GRASS, TASK

START_OVER = "pass another file to --json, or --overwrite to start over"
NOT_COMPARED = ("schema", "kind", "command", "rows")
COLLECTED = ("data", "laws", "keys")
"""Parts of a results file that grow with each command: only the entries that both sides have must agree."""
PIECE = 1 << 24
"""Bytes copied from a GPU at once: whole tensors took five times as long, in fresh pages of host memory."""
NAMES = ("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Config entries that do not affect a number; the digest of the weights covers their dtypes."""

HERE = Path(__file__)


def digest(value: Any) -> str:
    """Return the sha256 of a value as sorted JSON; sets are sorted, and other objects count by their string form."""

    def plain(other: Any) -> Any:
        return sorted(map(str, other)) if isinstance(other, (set, frozenset)) else str(other)

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode()).hexdigest()


def fingerprint(model: Any, tokenizer: Any) -> dict[str, str]:
    """Return digests of a model's weights, of its config and adapters, and of its tokenizer."""
    return {
        "weights": weights_digest(model),
        "config": digest([_config(model.config), _adapters(model), _remote_code(model)]),
        "tokenizer": digest(_tokenizer(tokenizer)),
    }


def weights_digest(model: Any) -> str:
    """Return one sha256 over every byte, shape and dtype of all parameters and buffers, on whatever device.

    Every element counts; the devices and the order in which tensors are read do not. Buffers that are not saved are
    included: a rotary table that was rounded gives other numbers.
    """
    tensors = _tensors(model)
    unique = {id(tensor): tensor for tensor in tensors.values()}  # tied weights are read once
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib releases the interpreter's lock
        digests = dict(zip(unique, pool.map(_tensor_digest, unique.values()), strict=True))
    return digest({name: digests[id(tensor)] for name, tensor in tensors.items()})


def _tensors(model: Any) -> dict[str, Any]:
    """Return all state by name; weights that accelerate has offloaded are fetched."""
    state: dict[str, Any] = dict(model.named_buffers()) | model.state_dict(keep_vars=True)
    if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        state |= get_state_dict_offloaded_model(model)
    return state


def _tensor_digest(value: Any) -> str:
    """Return the digest of a tensor's dtype, shape and bytes; a wrapper counts by the tensors that it wraps."""
    if not isinstance(value, Tensor):  # extra state of a module
        return digest(value)
    value = value.detach()
    if hasattr(value, "full_tensor"):  # sharded over devices
        value = value.full_tensor()
    if hasattr(value, "__tensor_flatten__"):
        names, rest = value.__tensor_flatten__()
        return digest([{name: _tensor_digest(getattr(value, name)) for name in names}, rest])
    read = hashlib.sha256()
    for part in value.contiguous().reshape(-1).view(torch.uint8).split(PIECE):
        read.update(part.cpu().numpy())
    return f"{value.dtype} {list(value.shape)} {read.hexdigest()}"


def _config(config: Any) -> dict[str, Any]:
    """Return the part of a config that affects a model's numbers, with the attention that was chosen for it."""
    content = {name: value for name, value in config.to_dict().items() if name not in NAMES}
    return {**content, "attention": getattr(config, "_attn_implementation", None)}


def _adapters(model: Any) -> dict[str, Any]:
    """Return the state of PEFT's layers that is not in their weights: which adapters are active, and how strongly."""
    names = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
    return {
        name: [getattr(layer, state, None) for state in names]
        for name, layer in model.named_modules()
        if hasattr(layer, "merged_adapters")
    }


def _remote_code(model: Any) -> dict[str, str]:
    """Return digests of the code that came with a checkpoint; transformers' own code is identified by its version."""
    if not type(model).__module__.startswith("transformers_modules"):
        return {}
    folder = Path(inspect.getfile(type(model))).parent
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.py"))}


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return what decides a text's tokens and their text, without the padding state that a call leaves behind."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "clean_up_tokenization_spaces")
    content: dict[str, Any] = {name: getattr(tokenizer, name, None) for name in names}
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        whole = json.loads(backend.to_str())
        return content | {name: part for name, part in whole.items() if name not in ("truncation", "padding")}
    probe = tokenizer(f"{TASK}\n{GRASS} 0123456789 def f(x): return x").input_ids
    return content | {"vocabulary": tokenizer.get_vocab(), "probe": list(probe)}


def generation(model: Any, chat_template: str | None) -> str:
    """Return the digest of what else decides an answer: the generation config and the chat template."""
    config = getattr(model, "generation_config", None)
    content = {} if config is None else config.to_dict()
    noise = ("transformers_version", "_from_model_config")
    return digest([{name: value for name, value in content.items() if name not in noise}, chat_template])


def versions() -> dict[str, str]:
    """Return the versions of the packages that can change a number."""
    packages = {package: version(package) for package in ("torch", "transformers", "tokenizers")}
    return {"rpe3d": __version__, **packages, "python": platform.python_version()}


@cache
def commit(file: Path = HERE) -> str | None:
    """Return the commit of the running checkout, with a + if files differ from it; None outside a checkout.

    A copy that is installed within somebody else's checkout is not tracked there, and has none.
    """

    def git(*command: str) -> str:
        run = ["git", "-C", str(file.parent), *command]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def made_from(parts: Mapping[str, Any]) -> str:
    """Return the short digest that rows and predictions carry. A model counts by its contents, not by its name."""
    return digest({name: _nameless(name, part) for name, part in parts.items() if name not in NOT_COMPARED})[:16]


def check_same(path: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume results made from anything other than `now`, and name the part that differs."""
    for part in (name for name in now if name not in NOT_COMPARED):
        before, asked = (_nameless(part, json.loads(json.dumps(side.get(part)))) for side in (kept, now))
        if part in COLLECTED and isinstance(before, dict):
            shared = before.keys() & asked.keys()
            before, asked = ({name: side[name] for name in shared} for side in (before, asked))
        if before != asked:
            raise ConfigError(_difference(path, part, before, asked), START_OVER)


def check_rows(path: Path, rows: Iterable[tuple[Mapping[str, Any], str]]) -> None:
    """Refuse finished rows that do not match their digests, such as rows merged by hand."""
    for row, origin in rows:
        if row["status"] == "ok" and row.get("made_from") != origin:
            which = f"the row of {row['law']} at {row['length']} in {path}"
            raise ConfigError(f"{which} was not made from what the file says", START_OVER)


def _nameless(part: str, value: Any) -> Any:
    return {key: one for key, one in value.items() if key != "name"} if part == "model" and value else value


def _difference(path: Path, part: str, before: Any, now: Any) -> str:
    """Say in one sentence what differs; for a model, which of its digests."""
    if part != "model" or not isinstance(before, dict):
        return f"{path} holds results of other {part}"
    if "fingerprint" not in before:
        return f"{path} does not record the weights of its model, since an earlier version of rpe3d wrote it"
    known, mine = before["fingerprint"], now["fingerprint"]
    changed = [name for name in mine if known.get(name) != mine[name]]
    changed += [name for name in now if name != "fingerprint" and before.get(name) != now[name]]
    return f"{path} holds results of another model (other {', '.join(changed)})"
