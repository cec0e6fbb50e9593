"""The command line: one module per verb, imported only when the verb runs.

A verb's module has `add_arguments(parser)` and `run(arguments) -> int`, and imports torch inside `run`. Data goes
to stdout, words to stderr. Exit codes: 0 done, 1 an error that is explained, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from rpe3d import __version__
from rpe3d.cli.interrupt import patient_interrupts
from rpe3d.config import ConfigError, choice

VERBS = {
    "demo": (
        "rpe3d.cli.demo",
        "run the main job on the default model: four laws past its pretrained length, a passkey, a report",
    ),
    "extend": ("rpe3d.cli.extend", "write a checkpoint with a longer context, which carries its law"),
    "compare": ("rpe3d.cli.compare", "measure perplexity, copying and passkeys under every law at every length"),
    "eval": ("rpe3d.cli.eval", "run LongBench, L-Eval, RULER, perplexity, passkeys and copying, as the paper's tables"),
    "score": ("rpe3d.cli.score", "score a predictions file from any program"),
    "tune": ("rpe3d.cli.tune", "measure the context that a model really uses, and pick chunk, window and reach"),
    "train": ("rpe3d.cli.train", "fine-tune under a law (lm, sft) with the paper's settings, on one GPU or many"),
    "merge": ("rpe3d.cli.merge", "merge an adapter and its base into one checkpoint, which carries its law"),
    "figures": ("rpe3d.cli.figures", "draw the paper's figures and ours: SVG, PNG, and every plotted number as CSV"),
    "explore": ("rpe3d.cli.explore", "open a page to turn the knobs of a law and see what a model would see"),
    "bench": (
        "rpe3d.cli.bench",
        "measure what a law costs on this machine: tokens per second and memory, beside the stock model",
    ),
    "serve": ("rpe3d.cli.serve", "serve a model under a law by an OpenAI-compatible server (vLLM)"),
    "doctor": ("rpe3d.cli.doctor", "say what runs on this machine, and why"),
}


class UsageError(ConfigError):
    """The command line itself is wrong."""


class Parser(ArgumentParser):
    """argparse whose usage errors read like all other errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"`{self.prog} --help` says what it takes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the return value is the exit code."""
    try:
        with patient_interrupts():
            code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"error: {error.problem}\nhint: {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # The reader of stdout left. Python would complain again at exit, when it flushes what is buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    verbs = "\n".join(f"  {name:<10}{text}" for name, (_, text) in VERBS.items())
    parser = Parser(
        prog="rpe3d",
        usage="rpe3d [--help] [--version] VERB ...",
        description="A longer context for rotary-position language models.",
        epilog=f"verbs:\n{verbs}\n\n`rpe3d VERB --help` says what a verb takes.",
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
    return int(verb.run(verb_parser.parse_args(given.rest)))
