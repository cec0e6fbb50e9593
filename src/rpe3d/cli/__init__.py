"""The command line: one module per verb, imported only when the verb runs.

A verb's module has `add_arguments(parser)` and `run(arguments) -> int`, and imports torch inside `run`. Data goes
to stdout, messages to stderr. Exit codes: 0 success, 1 an explained error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import REMAINDER, SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from rpe3d import __version__
from rpe3d.cli.interrupt import patient_interrupts
from rpe3d.cli.terminal import Voice
from rpe3d.config import ConfigError, choice

VERBS = {
    "demo": (
        "rpe3d.cli.demo",
        "read a document longer than the default model's context and ask about it, under four laws",
    ),
    "generate": ("rpe3d.cli.generate", "ask a model about a document, under a law with enough context for it"),
    "extend": ("rpe3d.cli.extend", "write a longer-context checkpoint that carries its law"),
    "compare": ("rpe3d.cli.compare", "measure perplexity, copying and passkeys under every law at every length"),
    "eval": (
        "rpe3d.cli.eval",
        "run LongBench (v1, v2), L-Eval, RULER, BABILong, InfiniteBench, needles, perplexity and more",
    ),
    "tasks": ("rpe3d.cli.tasks", "list the tasks of `eval`"),
    "score": ("rpe3d.cli.score", "score a predictions file from any program"),
    "tune": ("rpe3d.cli.tune", "measure how much context a model really uses, and pick chunk, window and reach"),
    "train": ("rpe3d.cli.train", "fine-tune under a law (lm, sft) with the paper's settings, on one GPU or many"),
    "merge": ("rpe3d.cli.merge", "merge an adapter into its base model: one checkpoint that carries its law"),
    "figures": ("rpe3d.cli.figures", "draw the paper's figures and ours: SVG, PNG, and every plotted number as CSV"),
    "explore": ("rpe3d.cli.explore", "open an interactive page that shows what a model sees under a law"),
    "bench": (
        "rpe3d.cli.bench",
        "measure what a law costs on this machine: tokens per second and memory, against the stock model",
    ),
    "serve": ("rpe3d.cli.serve", "serve a model under a law with an OpenAI-compatible server (vLLM)"),
    "laws": ("rpe3d.cli.laws", "list the laws and their parameters"),
    "doctor": ("rpe3d.cli.doctor", "report what runs on this machine and why, or whether a model can be extended"),
    "completion": ("rpe3d.cli.completion", "print a completion script for bash, zsh or fish"),
}


class UsageError(ConfigError):
    """A command line that cannot be parsed: exit code 2."""


class Parser(ArgumentParser):
    """An ArgumentParser that raises `UsageError` and takes --quiet and --verbose, before the verb or after it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        add = self.add_argument
        add("-q", "--quiet", action="store_true", help="print results and errors only: no notes, no progress")
        add("-v", "--verbose", action="store_true", help="print more, and the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"run `{self.prog} --help` for usage")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    Voice.level = 0
    try:
        with patient_interrupts():
            code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        if Voice.level > 0:
            traceback.print_exc()
        print(f"error: {error.problem}\nhint: {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # The reader of stdout is gone. Python would complain again at exit, when it flushes its buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    verbs = "\n".join(f"  {name:<12}{text}" for name, (_, text) in VERBS.items())
    parser = Parser(
        prog="rpe3d",
        usage="rpe3d [--help] [--version] [-q | -v] VERB ...",
        description="A longer context for rotary-position language models.",
        epilog=f"verbs:\n{verbs}\n\nRun `rpe3d VERB --help` for the options of a verb.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rpe3d {__version__}")
    parser.add_argument("verb", help=SUPPRESS)
    parser.add_argument("rest", nargs=REMAINDER, help=SUPPRESS)
    if not argv:
        parser.error("a verb is missing")
    given = parser.parse_args(argv)
    try:
        module, text = VERBS[choice("verb", given.verb, VERBS)]
    except ConfigError as error:
        raise UsageError(error.problem, error.hint) from None
    verb = import_module(module)
    verb_parser = Parser(prog=f"rpe3d {given.verb}", description=f"{text}.", allow_abbrev=False)
    verb.add_arguments(verb_parser)
    asked = verb_parser.parse_args(given.rest)
    Voice.level = (given.verbose or asked.verbose) - (given.quiet or asked.quiet)
    if given.quiet + asked.quiet and given.verbose + asked.verbose:
        verb_parser.error("--quiet and --verbose are given together")
    if Voice.level < 0:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers asks for it as well, once, when it is imported
    return int(verb.run(asked))
