"""The numbers of a figure. What is drawn is in the table, and drawing adds none."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of numbers and names, and a sentence that describes them. None: there is no such value."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]

    def where(self, **wanted: Any) -> Table:
        """Return the rows with these values."""
        places = {self.columns.index(name): value for name, value in wanted.items()}
        rows = [row for row in self.rows if all(row[place] == value for place, value in places.items())]
        return Table(title=self.title, caption=self.caption, columns=self.columns, rows=rows)

    def column(self, name: str) -> list[Any]:
        """Return one column, from the first row to the last."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def kinds(self, name: str) -> list[Any]:
        """Return the distinct values of a column, in order of appearance."""
        return list(dict.fromkeys(self.column(name)))

    def csv(self) -> str:
        """Return the rows with their heading, unrounded; None is an empty cell."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return file.getvalue()


def numbers(values: Iterable[float]) -> list[float | None]:
    """Replace NaN with None: an empty cell, not a word."""
    return [None if value != value else value for value in values]
