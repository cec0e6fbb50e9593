"""What verbs share: sizes and laws as people write them, files that are whole or absent, extras that may be missing."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d import files
from rpe3d.config import ConfigError

if TYPE_CHECKING:
    from rpe3d.geometry import LawSpec

UNITS = {"": 1, "k": 1024, "m": 1024**2}
MOST = 2**24
"""Tokens at most: transformers holds positions in float32, where 2^24 and 2^24 + 1 are the same number."""


def size(text: str) -> int:
    """Parse a number of tokens: 65536, 64k or 1M, with k = 1024 and M = 1024 k. The `type` of an argument."""
    match = re.fullmatch(r"([0-9]{1,12})([km]?)", text.strip().lower())
    if not match:
        raise ArgumentTypeError(f"{text!r} is not a size: write it as 65536 or 64k (k = 1024)")
    tokens = int(match[1]) * UNITS[match[2]]
    if tokens > MOST:
        raise ArgumentTypeError(f"{text!r} is more than 16m tokens: beyond, float32 cannot tell neighbours apart")
    return tokens


def sizes(text: str) -> list[int]:
    """Parse several sizes with commas between."""
    return [size(part) for part in text.split(",")]


# What a law file holds besides its law's own parameters: the model that it was made for, and the evidence.
FACTS = {"name", "pretrained", "context", "head_dim", "rope_theta", "rotary_dim", "interleaved", "rope_scaling"}
EVIDENCE = {"schema", "kind", "measured"}


def law(text: str) -> LawSpec:
    """Parse a law: `3d-rpe`, `3d-rpe:chunk=512,reach=5120`, or a file that `rpe3d tune` wrote."""
    if text.endswith(".json"):
        return _law_file(Path(text))
    from rpe3d.geometry import LawSpec

    name, _, rest = text.partition(":")
    parameters = {}
    for item in rest.split(",") if rest else ():
        parameter, equals, given = item.partition("=")
        if not equals:
            raise ConfigError(f"{item!r} in {text!r} has no value", "write a law as name:parameter=value")
        parameters[parameter.strip().replace("-", "_")] = value(given.strip())
    return LawSpec(label=text, name=name, parameters=parameters)


def laws(text: str) -> list[LawSpec]:
    """Parse several laws with commas between; a parameter without a law belongs to the law before it."""
    parts: list[str] = []
    for item in text.split(","):
        if parts and ":" in parts[-1] and "=" in item and ":" not in item:
            parts[-1] += f",{item.strip()}"
        else:
            parts.append(item.strip())
    return [law(part) for part in parts]


def value(text: str) -> bool | int | float | str:
    """Parse a parameter's value: true or false, a number, a size such as 2k, or a word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, size):
        with suppress(ValueError, ArgumentTypeError):
            return kind(text)
    return text


def _law_file(path: Path) -> LawSpec:
    from rpe3d.geometry import LawSpec

    hint = "give a file that `rpe3d tune` wrote"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the law file {path}: {error.strerror}", hint) from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str) or "pretrained" not in content:
        raise ConfigError(f"{path} is not a law file", hint)
    own = {key: given for key, given in content.items() if key not in FACTS | EVIDENCE}
    return LawSpec(label=path.stem, name=content["name"], parameters=own, pretrained=content["pretrained"])


def need(extra: str, *modules: str) -> None:
    """Refuse to start without the packages of an extra, before any work is done."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed", f"pip install 'rpe3d[{extra}]'")


def command_line() -> str:
    """Return the command as a user would type it again."""
    return shlex.join(["rpe3d", *sys.argv[1:]])


def results_file(arguments: Namespace, name: str) -> Path | None:
    """Return where the rows are kept: --json, or `name` in the folder of --report, which is made if need be."""
    if arguments.report is not None:
        folder("--report", arguments.report)
        return Path(arguments.json or arguments.report / name)
    return arguments.json and Path(arguments.json)


def kept(arguments: Namespace) -> dict[str, Any]:
    """Return what the results say of their origin, and whether rows that are there are kept."""
    return {"overwrite": arguments.overwrite, "name": arguments.model, "command": command_line()}


def folder(option: str, path: Path) -> Path:
    """Return `path` as a folder, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} is a file, not a folder", f"give {option} a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}", f"give {option} another one") from None
    return path


def write_json(option: str, path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON to the file that an option names, whole or not at all."""
    with replacing(option, path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which gets the name `path` at the end; `path` may be an empty folder."""
    with (
        files.refusing(f"cannot write {path}", f"give {option} a place with room to write to"),
        files.new_folder(path) as unfinished,
    ):
        yield unfinished


@contextmanager
def replacing(option: str, path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` at the end: readers see the old file or the new."""
    with files.refusing(f"cannot write {path}", f"give {option} a place to write to"):
        if path.exists() and not path.is_file():  # a folder, or /dev/null, which root could replace
            raise ConfigError(f"{path} is not a regular file", f"give {option} a name that can be replaced")
        with files.replacing(path) as unfinished:
            yield unfinished
