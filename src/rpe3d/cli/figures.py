"""`rpe3d figures`: draw the paper's figures and ours as SVG and PNG, light and dark, and all plotted numbers as CSV."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rpe3d.cli.arguments import folder, need
from rpe3d.cli.terminal import say
from rpe3d.config import choice


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder for the files; existing files of the same names are replaced",
    )
    add("--only", metavar="A,B", help="any of figure-1a,figure-1b,... (file names); default: all")


def run(arguments: Namespace) -> int:
    need("cli", "matplotlib")
    from rpe3d.analysis.figures import FIGURES, write_figures

    asked = arguments.only.split(",") if arguments.only else FIGURES
    names = [choice("figure", name.strip(), FIGURES) for name in asked]
    out = folder("--out", arguments.out)
    written = write_figures(out, names, say)
    say(f"wrote {len(written)} files; {out / 'index.html'} shows them all")
    return 0
