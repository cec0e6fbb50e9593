"""What an evaluation asks, as one checked value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpe3d.config import ConfigError, choice, freeze, whole
from rpe3d.evaluate.perplexity import PROTOCOLS
from rpe3d.evaluate.settings import SHORTEST
from rpe3d.evaluate.suites import SUITES, suite
from rpe3d.geometry import LawSpec

PROBES = ("ppl", "passkey", "copy")
Task = tuple[str, str]
"""A suite and a task of it; a probe is a suite with one nameless task, `ppl` with one for each folder of texts, too."""


def parse_tasks(names: Sequence[str]) -> list[Task]:
    """`longbench` is the paper's tasks of it, `longbench:lcc` one; `ppl` reads --texts, `ppl:X` a folder of --data."""
    tasks: list[Task] = []
    for name in names:
        group, _, one = name.strip().partition(":")
        choice("suite of tasks", group, (*SUITES, *PROBES))
        if group in SUITES:
            known = suite(group)
            tasks += (
                [(group, choice(f"{group} task", one, known.TASKS))] if one else [(group, t) for t in known.DEFAULT]
            )
        elif one and group != "ppl":
            raise ConfigError(f"{group} has no task {one!r}", f"write {group} alone")
        else:
            tasks.append((group, one))
    return list(dict.fromkeys(tasks))


def title(task: Task) -> str:
    return ":".join(filter(None, task))


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Which tasks under which laws at which lengths, how many samples of each, and how prompts are made.

    Without `laws` the model is taken as it is, with its own rope settings or the law that it was saved with.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    laws: Sequence[LawSpec] = ()
    limit: int | None = None
    """Samples of each task; None: all of them, and RULER's 500."""
    batch: int = 1
    authors: bool = False
    """Chat words for LongBench's code tasks, too, as the 3D-RPE authors' script has it."""
    protocol: str = "windows"
    windows: int | None = None
    copies: int = 4
    passkeys: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        labels = [entry.label for entry in self.laws]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ConfigError(f"law {twice!r} is given twice", "give it once, or rename the law file")
        freeze(
            self,
            tasks=tuple(self.tasks),
            lengths=tuple(dict.fromkeys(whole("length", length, least=SHORTEST) for length in self.lengths)),
            laws=tuple(self.laws),
            limit=None if self.limit is None else whole("limit", self.limit),
            batch=whole("batch", self.batch),
            protocol=choice("protocol", self.protocol, PROTOCOLS),
        )
        for name in ("tasks", "lengths"):
            if not getattr(self, name):
                raise ConfigError(f"no {name} are given", f"give at least one of {name}")

    def to_dict(self, chat: str) -> dict[str, Any]:
        """What every row of a results file has in common."""
        names = ("limit", "protocol", "windows", "copies", "passkeys", "seed")
        rules = "authors" if self.authors else "upstream"
        return {"chat": chat, "chat_rules": rules, **{name: getattr(self, name) for name in names}}
