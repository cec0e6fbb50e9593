"""What an evaluation asks, as one checked value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import ConfigError, choice, freeze, whole
from rpe3d.evaluate.settings import Asked
from rpe3d.evaluate.suites import SUITES, suite

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
class Ask(Asked):
    """Which tasks under which laws at which lengths, how many samples of each, and how prompts are made.

    Without `laws` the model is taken as it is, with its own rope settings or the law that it was saved with.
    """

    tasks: Sequence[Task]
    limit: int | None = None
    """Samples of each task; None: all of them, and RULER's 500."""
    authors: bool = False
    """Chat words for LongBench's code tasks, too, as the 3D-RPE authors' script has it."""

    needed: ClassVar[tuple[str, ...]] = ("tasks", "lengths")

    def __post_init__(self) -> None:
        limit = None if self.limit is None else whole("limit", self.limit)
        freeze(self, tasks=tuple(self.tasks), limit=limit)
        super().__post_init__()

    def to_dict(self, chat: str) -> dict[str, Any]:
        """What every row of a results file has in common."""
        names = ("limit", "protocol", "windows", "copies", "passkeys", "seed")
        rules = "authors" if self.authors else "upstream"
        return {"chat": chat, "chat_rules": rules, **{name: getattr(self, name) for name in names}}
