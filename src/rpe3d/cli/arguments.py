"""What verbs share: sizes and laws as people write them, files that are whole or absent, extras that may be missing."""

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
from rpe3d.cli.terminal import STDOUT, print_json
from rpe3d.config import ConfigError

if TYPE_CHECKING:
    from rpe3d.geometry import LawSpec


def size(text: str) -> int:
    """Parse a number of tokens, as 65536 or 64k. The `type` of an argument."""
    try:
        return config.size(text)
    except ConfigError as refusal:
        raise ArgumentTypeError(str(refusal)) from None


def sizes(text: str) -> list[int]:
    """Parse several sizes with commas between."""
    return [size(part) for part in text.split(",")]


def law(text: str) -> LawSpec:
    """Parse a law, as `rpe3d.geometry.spec` describes it."""
    from rpe3d.geometry import parse_law

    return parse_law(text)


def laws(text: str) -> list[LawSpec]:
    """Parse several laws with commas between, or `all` of them."""
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


def command_line() -> str:
    """Return the command as a user would type it again."""
    return shlex.join(["rpe3d", *sys.argv[1:]])


def results_file(arguments: Namespace, name: str) -> Path | None:
    """Return where the rows are kept: --json, or `name` in the folder of --report, which is made if need be.

    `--json -` keeps them nowhere: the verb prints them.
    """
    file: Path | None = None if arguments.json == STDOUT else arguments.json
    if arguments.report is not None:
        folder("--report", arguments.report)
        return file or Path(arguments.report / name)
    return file


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


def check_writable(option: str, path: Path) -> None:
    """Refuse a place where nothing could be written in the end, before any work is done."""
    if path == STDOUT:
        return
    folder = path.expanduser().resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", f"make it, or give {option} another place")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file", f"give {option} a name that can be replaced")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the folder {folder} cannot be written to", f"give {option} another place")


def check_new_folder(option: str, path: Path) -> None:
    """Refuse a place where no new folder can be made, before any work is done; an empty folder will do."""
    with files.refusing(f"cannot write {path}", f"give {option} a place to write to"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} already exists", f"pass a new folder to {option}")
        place = next(parent for parent in path.absolute().parents if parent.exists())
        if not place.is_dir():
            raise ConfigError(f"{place} is a file, not a folder", f"give {option} another place")
        if not os.access(place, os.W_OK):
            raise ConfigError(f"the folder {place} cannot be written to", f"give {option} another place")


def write_json(option: str, path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON to the file that an option names, whole or not at all; to stdout where that is -."""
    if path == STDOUT:
        print_json(content)
        return
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
