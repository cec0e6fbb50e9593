"""Helpers that the verbs share: parsers for sizes and laws, atomic output files, and checks for optional packages."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d import config, files
from rpe3d.cli.terminal import STDOUT, note, print_json
from rpe3d.config import ConfigError

if TYPE_CHECKING:
    from rpe3d.geometry import LawSpec


def size(text: str) -> int:
    """Parse a number of tokens such as 65536 or 64k; used as the `type` of an argument."""
    try:
        return config.size(text)
    except ConfigError as refusal:
        raise ArgumentTypeError(str(refusal)) from None


def sizes(text: str) -> list[int]:
    """Parse comma-separated sizes."""
    return [size(part) for part in text.split(",")]


def law(text: str) -> LawSpec:
    """Parse a law written as `rpe3d.geometry.spec` describes."""
    from rpe3d.geometry import parse_law

    return parse_law(text)


def laws(text: str) -> list[LawSpec]:
    """Parse comma-separated laws; `all` stands for every law."""
    from rpe3d.geometry import LAWS, parse_laws

    return parse_laws(",".join(LAWS) if text == "all" else text)


def value(text: str) -> bool | int | float | str:
    """Parse a parameter's value."""
    from rpe3d.geometry.spec import parse_value

    return parse_value(text)


def need(extra: str, *modules: str) -> None:
    """Refuse to start without the packages of an extra, before any work is done."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed", f"pip install 'rpe3d[{extra}]'")


def note_unused(arguments: Namespace, without: Mapping[str, str]) -> None:
    """Say which options were given and have no effect; `without` maps an option to what it needs."""
    if os.environ.get("RANK", "0") != "0":
        return  # the first of several processes says it
    for name, needed in without.items():
        if getattr(arguments, name, None) not in (None, [], False):
            note(f"--{name.replace('_', '-')} has no effect without {needed}")


def command_line() -> str:
    """Return the current command line, quoted for a shell."""
    return shlex.join(["rpe3d", *sys.argv[1:]])


def results_file(arguments: Namespace, name: str) -> Path | None:
    """Return the file for the rows: --json, or `name` in the --report folder, which is created if needed.

    With `--json -` no file is kept: the verb prints the rows.
    """
    file: Path | None = None if arguments.json == STDOUT else arguments.json
    if arguments.report is not None:
        folder("--report", arguments.report)
        return file or Path(arguments.report / name)
    return file


def kept(arguments: Namespace) -> dict[str, Any]:
    """Return the keywords that record the origin of results, and whether existing rows are overwritten."""
    return {"overwrite": arguments.overwrite, "name": arguments.model, "command": command_line()}


def folder(option: str, path: Path) -> Path:
    """Return `path` as a folder, creating it if needed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} is a file, not a folder", f"pass a folder to {option}") from None
    except OSError as error:
        raise ConfigError(f"cannot create the folder {path}: {error.strerror}", f"pass another to {option}") from None
    return path


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before any work is done."""
    if path == STDOUT:
        return
    folder = path.expanduser().resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", f"create it, or pass another path to {option}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file", f"pass a file that can be replaced to {option}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the folder {folder} is not writable", f"pass another path to {option}")


def check_new_folder(option: str, path: Path) -> None:
    """Refuse a path where no new folder can be created, before any work is done; an empty folder is accepted."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name {str(path)!r} is not UTF-8, and safetensors could not load from it",
            f"pass a name that can be read as text to {option}",
        ) from None
    with files.refusing(f"cannot write {path}", f"pass a writable path to {option}"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} already exists", f"pass a new folder to {option}")
        place = next(parent for parent in path.absolute().parents if parent.exists())
        if not place.is_dir():
            raise ConfigError(f"{place} is a file, not a folder", f"pass another path to {option}")
        if not os.access(place, os.W_OK):
            raise ConfigError(f"the folder {place} is not writable", f"pass another path to {option}")


def write_json(option: str, path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON atomically to the file that an option names, or to stdout for -."""
    if path == STDOUT:
        print_json(content)
        return
    with replacing(option, path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `path` at the end; `path` may be an empty folder."""
    with (
        files.refusing(f"cannot write {path}", f"pass a writable path with enough free space to {option}"),
        files.new_folder(path) as unfinished,
    ):
        yield unfinished


@contextmanager
def replacing(option: str, path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` at the end: readers see either the old file or the new one."""
    with files.refusing(f"cannot write {path}", f"pass a writable path to {option}"):
        if path.exists() and not path.is_file():  # a folder, or /dev/null, which root could replace
            raise ConfigError(f"{path} is not a regular file", f"pass a file that can be replaced to {option}")
        with files.replacing(path) as unfinished:
            yield unfinished
