"""Reference pages in Markdown, made from the code: signatures, docstrings, parsers and the registry of laws."""

from __future__ import annotations

import inspect
from argparse import HelpFormatter
from importlib import import_module
from pathlib import Path
from typing import Any

from rpe3d.cli import VERBS, Parser
from rpe3d.geometry.registry import LAWS

MODULES = {
    "rpe3d": None,
    "rpe3d.models": None,
    "rpe3d.models.load": ["load", "Loaded"],
    "rpe3d.evaluate": None,
    "rpe3d.train": None,
    "rpe3d.attention": ["attention", "explain", "Problem", "Shared"],
    "rpe3d.rotation": None,
    "rpe3d.geometry.region": ["Region", "Turn", "PairTurns", "Steps", "Phase", "Fade", "Choice"],
    "rpe3d.geometry.theory": ["decay_bound", "score_bound", "resolution", "relative_position_matrix"],
    "rpe3d.testing": ["assert_as_good"],
}
"""Modules of the public interface, and their names where they are not all of `__all__`."""
SCHEMAS = {
    "rpe3d.evaluate.compare": "`rpe3d compare --json`",
    "rpe3d.evaluate.row": "a row of `rpe3d compare`",
    "rpe3d.evaluate.evaluation": "`rpe3d eval --json`",
    "rpe3d.evaluate.keys": "key tokens of LongPPL, `--keys`",
    "rpe3d.cli.bench": "`rpe3d bench --json`",
    "rpe3d.evaluate.speed": "a row of `rpe3d bench`",
    "rpe3d.cli.doctor": "`rpe3d doctor --json`",
    "rpe3d.evaluate.tune": "law files of `rpe3d tune`",
    "rpe3d.cli.laws": "`rpe3d laws --json`",
    "rpe3d.cli.tasks": "`rpe3d tasks --json`",
}
"""Modules whose docstring describes a JSON file, and the file."""
NOTE = "*Made from the code by `make docs`.*\n"


def python() -> str:
    """Return the page of the Python interface."""
    parts = ["# Python", NOTE]
    shown: dict[int, str] = {}
    for name, names in MODULES.items():
        module = import_module(name)
        parts += [f"## `{name}`", _text(module)]
        members = {member: getattr(module, member) for member in names or module.__all__}
        for member, thing in sorted(members.items(), key=lambda item: inspect.isclass(item[1])):
            place = shown.setdefault(id(thing), name)
            if place == name:
                parts += _described(member, thing)
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """Return the page of the command line: what `rpe3d VERB --help` says, for every verb."""
    parts = ["# Command line", NOTE, "`rpe3d VERB --help` prints the same. Data goes to stdout, messages to stderr."]
    parts.append("Exit codes: 0 success, 1 an explained error, 2 wrong usage, 130 interrupted.")
    for verb, (module, text) in VERBS.items():
        parser = Parser(prog=f"rpe3d {verb}", description=f"{text}.", allow_abbrev=False, formatter_class=_Wide)
        import_module(module).add_arguments(parser)
        parts += [f"## `rpe3d {verb}`", _fenced(parser.format_help(), "text")]
    return "\n\n".join(parts) + "\n"


def laws() -> str:
    """Return the page of all laws with their parameters."""
    parts = ["# Laws and their parameters", NOTE]
    parts.append(
        "As text, in Python and on the command line, `NAME:PARAMETER=VALUE,...`; in Python also "
        "`rpe3d.extend(model, NAME, PARAMETER=VALUE)`. `rpe3d laws` prints them."
    )
    for name, law in LAWS.items():
        parts += [f"## `{name}`", f"{law.summary[0].upper()}{law.summary[1:]}.", _text(import_module(law.__module__))]
        if rows := law.parameters():
            parts.append(
                "\n".join(
                    ["| parameter | meaning |", "|---|---|", *(f"| `{key}` | {text} |" for key, text in rows.items())]
                )
            )
    return "\n\n".join(parts) + "\n"


def schemas() -> str:
    """Return the page of all JSON files, as the modules that write them describe them."""
    parts = ["# JSON files", NOTE, "Files name their `schema`; a number that a reader does not know is refused."]
    for module, what in SCHEMAS.items():
        parts += [f"## {what[0].upper()}{what[1:]}", f"From `{module}`:", _fenced(_text(import_module(module)), "text")]
    return "\n\n".join(parts) + "\n"


def examples(folder: Path) -> str:
    """Return the page of the examples: each script with its source."""
    parts = ["# Examples", "Scripts of `examples/`, each of which the tests run on the default model."]
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        parts += [f"## `{path.name}`", _fenced(source, "python")]
    return "\n\n".join(parts) + "\n"


class _Wide(HelpFormatter):
    """argparse's help at one width on every machine."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=100)


def _described(name: str, thing: Any) -> list[str]:
    """Return the parts of one function, class or value."""
    if not callable(thing):
        return [f"### `{name}`", _fenced(repr(thing), "python")]
    parts = [f"### `{name}`", _fenced(f"{name}{_signature(thing)}", "python"), _text(thing)]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for key, member in vars(thing).items():
            inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if key.startswith("_") or not inspect.isfunction(inner) or not inner.__doc__:
                continue
            shown = key if isinstance(member, property) else " ".join(f"{key}{_signature(inner)}".split())
            parts.append(f"- `{shown}`: {' '.join(_text(inner).split())}")
    return parts


def _signature(thing: Any) -> str:
    """Return a signature, an argument to a line where it is long."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "()"
    arguments = list(signature.parameters.values())
    shown = [_argument(one) for one in arguments if one.name not in ("self", "cls")]
    named = [one for one in arguments if one.kind is one.KEYWORD_ONLY]
    if named and not any(one.kind is one.VAR_POSITIONAL for one in arguments):
        shown.insert(shown.index(_argument(named[0])), "*")
    end = (
        ""
        if signature.return_annotation in (None, "None", signature.empty)
        else f" -> {_named(signature.return_annotation)}"
    )
    line = f"({', '.join(shown)}){end}"
    return line if len(line) <= 90 else "(\n" + "".join(f"    {one},\n" for one in shown) + ")" + end


def _argument(one: inspect.Parameter) -> str:
    """Return one argument of a signature, as its source has it."""
    stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
    text = f"{stars}{one.name}" + ("" if one.annotation is one.empty else f": {_named(one.annotation)}")
    if one.default is one.empty:
        return text
    default = getattr(one.default, "__name__", repr(one.default))
    return f"{text} = {default}".replace("<factory>", "...")


def _named(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", repr(annotation))


def _text(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def _fenced(code: str, language: str) -> str:
    return f"```{language}\n{code.rstrip()}\n```"
