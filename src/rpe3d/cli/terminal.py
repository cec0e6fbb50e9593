"""Output of the verbs: data to stdout, messages and progress bars to stderr, at the level of --quiet and --verbose."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rpe3d.evaluate.grid import Progress

STDOUT = Path("-")
"""File name that stands for stdout."""
NARROW = 80
FOLDED = 8
"""Minimum width of a text column, in characters, in the narrowest terminal."""


class Voice:
    """How much is printed: -1 quiet, 0 normal, 1 verbose. `main` sets the level for the verb that it runs."""

    level = 0


def say(text: str) -> None:
    """Print a message on stderr, unless --quiet."""
    if Voice.level >= 0:
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a note that the user should know of on stderr, unless --quiet."""
    say(f"note: {text}")


def detail(text: str) -> None:
    """Print a debugging message on stderr, with --verbose only."""
    if Voice.level > 0:
        print(f"debug: {text}", file=sys.stderr, flush=True)


def print_json(content: Mapping[str, Any]) -> None:
    """Print results as JSON on stdout, as `--json -` asks for."""
    print(json.dumps(content, indent=2, allow_nan=False))


def new_table(*columns: str, words: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table whose number columns never wrap; the columns named in `words` may."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for column in columns:
        if column in words:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def width_of(table: Table) -> int:
    """Return the width of a table in characters when nothing is wrapped."""
    return _console(9999).measure(table).maximum


def _least_width(table: Table) -> int:
    """Return the width of a table in characters with its words wrapped and its numbers whole."""
    folding = [column for column in table.columns if not column.no_wrap]
    widest = [column.max_width for column in folding]
    for column in folding:
        column.max_width = column.min_width or FOLDED
    least = width_of(table)
    for column, before in zip(folding, widest, strict=True):
        column.max_width = before
    return least


def _console(width: int | None = None, **options: Any) -> Console:
    """Return a console that prints text literally: a label such as [/b] or :x: is neither markup nor an emoji."""
    from rich.console import Console

    return Console(width=width, markup=False, emoji=False, **options)


def room() -> int:
    """Return the maximum line width: the terminal's or COLUMNS, and unlimited in a pipe or a file."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else 9999


def show(table: Table) -> None:
    """Print a table on stdout; nothing is wrapped in a pipe, and numbers stay whole in the narrowest terminal."""
    width = min(room(), max(NARROW, width_of(table)))
    _console(max(width, _least_width(table))).print(table)


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Show a progress bar on stderr with the elapsed and the remaining time."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Times(ProgressColumn):
        """Column with the elapsed and the remaining time."""

        def render(self, task: Task) -> Text:
            return Text(times(task.finished_time if task.finished else task.elapsed, task.time_remaining))

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        Times(),
        console=_console(stderr=True),
        disable=not shown or Voice.level < 0,
        speed_estimate_period=3600,
    )
    with bar:
        task = bar.add_task("loading", total=None)

        def advance(what: str, done: float, total: float) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield advance


def times(passed: float | None, left: float | None) -> str:
    """Format two times in seconds as `0:03:01, 0:00:07 left`; the second only if it is known and not zero."""
    whole = round(passed or 0)
    clock = f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{clock}, {times(left, None)} left" if left else clock
