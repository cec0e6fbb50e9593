"""Copy a checkpoint with another law: only the config changes, every other file is copied as it is.

Loading and saving would turn bfloat16 weights into float32, join shards and rewrite the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
"""Suffixes of files that hold the weights in another form, or a second time."""

READ = (".json", ".safetensors", ".model", ".txt", ".jinja", ".py")
"""Suffixes of files that affect what a model reads or produces."""


def sha256(path: Path) -> str:
    """Return the digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[str]:
    """List the files that transformers reads the weights from; empty if they have other names."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        return []
    shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [INDEX, *sorted(set(shards))]


def origin(source: str) -> Path | None:
    """Return the folder that a model was loaded from, possibly in the hub's cache; None for a file."""
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()
    if Path(source).expanduser().exists():
        return None
    from transformers.utils import cached_file

    with suppress(OSError):  # nothing of that name is there: loading it says so
        return Path(cached_file(source, CONFIG, local_files_only=True)).parent
    return None


def can_be_copied(folder: Path, model: Any) -> bool:
    """Return whether the files of `folder` and the config of `model` together are a checkpoint of that model.

    A vision model of which only the text part was loaded, or an adapter next to its base, has to be saved instead.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    same = config.get("model_type") == model.config.model_type
    return same and bool(weight_files(folder)) and not (folder / "adapter_config.json").exists()


def copy_with_config(folder: Path, model: Any, context: int, out: Path) -> None:
    """Copy a checkpoint byte for byte into the folder `out`, with the config of `model`.

    The tokenizer's own limit becomes `context`, since it would warn about longer texts.
    """
    weights = weight_files(folder)
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    names = [path.name for path in files if not path.name.endswith(OTHER_WEIGHTS) and path.name != CONFIG]
    for name in [*names, *weights]:
        shutil.copyfile(folder / name, out / name)
    if (folder / TEMPLATES).is_dir():
        shutil.copytree(folder / TEMPLATES, out / TEMPLATES)
    tokenizer = out / "tokenizer_config.json"
    if tokenizer.is_file():
        content = json.loads(tokenizer.read_text(encoding="utf-8")) | {"model_max_length": context}
        tokenizer.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    model.config.to_json_file(out / CONFIG, use_diff=True)


def fingerprint(name: str) -> str | None:
    """Return a digest of what a model's name stands for (weights, config, tokenizer); None before it is downloaded."""
    from rpe3d.models.gguf import default_gguf

    path = default_gguf() if name == "default" else Path(name).expanduser()
    if path.is_file():
        return sha256(path)
    folder = origin(name)
    if folder is None:
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix in READ and path.name != "generation_config.json")
    return hashlib.sha256("".join(f"{path.name} {sha256(path)}\n" for path in files).encode()).hexdigest()
