"""Explain in one sentence whatever can be wrong with a model on disk or on the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError

CHOICES = "pass a folder, a .gguf file or `default`"


def need(*modules: str) -> None:
    """Refuse to start if one of these packages is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed", "pip install 'rpe3d[models]'")


def check_complete(target: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks tensors: transformers fills them with random numbers."""
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"the weights of {target} lack {missing[0]}{more}", "copy or save the model again")


@contextmanager
def explained(source: str, *, hub: bool = False) -> Iterator[None]:
    """Turn any exception from transformers, safetensors or the file system while `source` loads into a ConfigError.

    It catches all exceptions: a damaged file surfaces as KeyError, TypeError, SafetensorError and many more.
    """
    from safetensors import SafetensorError

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if interrupted(error):
            raise KeyboardInterrupt from error
        line = first_line(error)
        if "trust_remote_code" in str(error):
            hint = "read that code, then pass trust_remote_code=True (--trust-remote-code)"
            raise ConfigError(f"{source} needs code from its own repository", hint) from error
        if isinstance(error, ImportError):
            hint = "install the package it names: quantised weights need the library that made them"
            raise ConfigError(f"cannot load {source} without another package ({line})", hint) from error
        if isinstance(error, SafetensorError):
            raise ConfigError(*_broken_weights(source, line)) from error
        if hub and isinstance(error, OSError):
            raise ConfigError(f"there is no folder {source}, and the hub did not serve it ({line})", CHOICES) from error
        raise ConfigError(f"cannot load {source} ({line})", "copy it again, or pass another model") from error


def interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C is the cause of an error: modules that are being imported turn it into an ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, as part of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = next((line.strip().rstrip(".:") for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__} {text}".strip()


def _broken_weights(source: str, line: str) -> tuple[str, str]:
    """Return problem and hint for weights that safetensors rejects without naming the file."""
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
            return f"{path} is damaged or cut short ({first_line(error)})", "copy or download it again"
    return f"the weights of {source} are damaged ({line})", "copy or download them again"
