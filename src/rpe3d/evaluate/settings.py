"""Settings of a measurement, validated as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import ConfigError, choice, freeze, whole
from rpe3d.evaluate.tasks import Task
from rpe3d.evaluate.tasks.perplexity import PROTOCOLS, WINDOWS
from rpe3d.geometry import LawSpec, parse_law

MEASURES = ("ppl", "copy", "passkey", "longppl")
DEFAULT = MEASURES[:3]
"""LongPPL must be asked for by name: finding its key tokens takes extra forward passes."""
SHORTEST = 256


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings of every measurement: laws (names or specs) and lengths, the size of each probe, and the seed."""

    laws: Sequence[str | LawSpec] = ()
    lengths: Sequence[int]
    windows: int | None = None
    """Windows of text per row; None: 4, or all of them in the published protocols."""
    copies: int = 4
    passkeys: int = 10
    protocol: str = "windows"
    seed: int = 0
    batch: int = 1
    context: int | None = None
    """Length that every law is made for; None: that of each row."""

    needed: ClassVar[tuple[str, ...]] = ("lengths",)
    """Fields of which at least one must be given."""

    def __post_init__(self) -> None:
        entries = [parse_law(law) if isinstance(law, str) else law for law in self.laws]
        for i, entry in enumerate(entries):
            if entry.label in [other.label for other in entries[:i]]:
                raise ConfigError(
                    f"law {entry.label!r} is given twice", "give it once, or name one of the two: NAME=law"
                )
        freeze(
            self,
            laws=tuple(entries),
            lengths=tuple(dict.fromkeys(whole("length", length, least=SHORTEST) for length in self.lengths)),
            windows=None if self.windows is None else whole("windows", self.windows),
            copies=whole("copies", self.copies),
            passkeys=whole("passkeys", self.passkeys),
            protocol=choice("protocol", self.protocol, PROTOCOLS),
            seed=whole("seed", self.seed, least=0),
            batch=whole("batch", self.batch),
            context=None if self.context is None else whole("context", self.context),
        )
        if self.context is not None and max(self.lengths, default=0) > self.context:
            raise ConfigError(
                f"length {max(self.lengths)} is beyond the context {self.context}",
                "raise the context, or leave it out to make each law for the length of its row",
            )
        for name in self.needed:
            if not getattr(self, name):
                raise ConfigError(f"no {name} are given", f"pass at least one of {name}")

    @property
    def window_count(self) -> int | None:
        """Windows of text per row, with the default; None: all of them."""
        return WINDOWS if self.windows is None and self.protocol == "windows" else self.windows

    @property
    def fixed(self) -> dict[str, int]:
        """Return the context for a results file; empty if each row has its own context."""
        return {} if self.context is None else {"context": self.context}

    @property
    def entries(self) -> tuple[LawSpec, ...]:
        return tuple(law for law in self.laws if isinstance(law, LawSpec))


@dataclass(frozen=True, kw_only=True)
class Settings(Asked):
    """Settings of a comparison: which of `MEASURES` to take under every law at every length."""

    measures: Sequence[str] = DEFAULT

    needed: ClassVar[tuple[str, ...]] = ("laws", "lengths", "measures")

    def __post_init__(self) -> None:
        chosen = [choice("measure", measure, MEASURES) for measure in self.measures]
        freeze(self, measures=tuple(name for name in MEASURES if name in chosen))
        super().__post_init__()
        freeze(self, windows=self.window_count)

    @property
    def reads_text(self) -> bool:
        """Whether some measure needs texts; passkeys lie in sentences of their own."""
        return self.measures != ("passkey",)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a results file stores them."""
        return {
            "laws": [entry.label for entry in self.entries],
            "given": {entry.label: {"law": entry.name, **entry.parameters} for entry in self.entries},
            "lengths": list(self.lengths),
            "windows": self.windows,
            "copy_trials": self.copies,
            "passkeys": self.passkeys,
            "measures": list(self.measures),
            "protocol": self.protocol,
            "seed": self.seed,
            "batch": self.batch,
            **self.fixed,
        }


@dataclass(frozen=True, kw_only=True)
class Ask(Asked):
    """Settings of an evaluation: tasks, laws, lengths, samples per task, and how prompts are made.

    Without `laws`, the model is taken as it is, with its own rope settings or the law that it was saved with.
    """

    tasks: Sequence[Task]
    limit: int | None = None
    """Samples per task; None: all of them, or as many as upstream generates."""
    authors: bool = False
    """Whether LongBench's code tasks are asked as chats as well, as in the 3D-RPE authors' script."""

    needed: ClassVar[tuple[str, ...]] = ("tasks", "lengths")

    def __post_init__(self) -> None:
        limit = None if self.limit is None else whole("limit", self.limit)
        freeze(self, tasks=tuple(self.tasks), limit=limit)
        super().__post_init__()

    def to_dict(self, chat: str) -> dict[str, Any]:
        """Return the settings that every row of a results file shares."""
        names = ("limit", "protocol", "windows", "copies", "passkeys", "seed")
        rules = "authors" if self.authors else "upstream"
        return {"chat": chat, "chat_rules": rules, **{name: getattr(self, name) for name in names}, **self.fixed}
