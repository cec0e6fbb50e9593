"""What a verb says: data to stdout, words and bars to stderr. --quiet leaves the data and errors, --verbose adds."""

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
"""The file name that stands for stdout."""
NARROW = 80
FOLDED = 8
"""Characters that a column of words keeps in the narrowest terminal."""


class Voice:
    """How much is said: -1 quiet, 0 as usual, 1 verbose. `main` sets it for the verb that it runs."""

    level = 0


def say(text: str) -> None:
    """Say what was done, unless --quiet."""
    if Voice.level >= 0:
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Say what a user should know, unless --quiet."""
    say(f"note: {text}")


def detail(text: str) -> None:
    """Say what is of use to somebody who looks for a fault, with --verbose."""
    if Voice.level > 0:
        print(f"debug: {text}", file=sys.stderr, flush=True)


def print_json(content: Mapping[str, Any]) -> None:
    """Print results on stdout, as `--json -` asks for."""
    print(json.dumps(content, indent=2, allow_nan=False))


def new_table(*columns: str, words: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table; columns of numbers stay whole, those in `words` may be folded."""
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
    """Return how many characters a table takes if nothing is folded."""
    return _console(9999).measure(table).maximum


def _least_width(table: Table) -> int:
    """Return how many characters a table takes with its words folded and its numbers whole."""
    folding = [column for column in table.columns if not column.no_wrap]
    widest = [column.max_width for column in folding]
    for column in folding:
        column.max_width = column.min_width or FOLDED
    least = width_of(table)
    for column, before in zip(folding, widest, strict=True):
        column.max_width = before
    return least


def _console(width: int | None = None, **options: Any) -> Console:
    """Return a console that shows text as it is: a label such as [/b] or :x: is neither markup nor an emoji."""
    from rich.console import Console

    return Console(width=width, markup=False, emoji=False, **options)


def room() -> int:
    """Return how many characters a line may have: a terminal's width or COLUMNS; any number in a pipe or a file."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else 9999


def show(table: Table) -> None:
    """Print a table on stdout; in a pipe nothing is folded, and no terminal is too narrow for a number."""
    width = min(room(), max(NARROW, width_of(table)))
    _console(max(width, _least_width(table))).print(table)


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Show a bar on stderr with the time that has passed and the time that is left."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Times(ProgressColumn):
        """How long it takes."""

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
    """Write `0:03:01, 0:00:07 left`, in seconds; what is left only where it is known and not nothing."""
    whole = round(passed or 0)
    clock = f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{clock}, {times(left, None)} left" if left else clock
