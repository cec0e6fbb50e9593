"""What a comparison measures, as one checked value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpe3d.config import ConfigError, choice, freeze, whole
from rpe3d.evaluate.perplexity import PROTOCOLS, WINDOWS
from rpe3d.geometry import LawSpec

MEASURES = ("ppl", "copy", "passkey")
SHORTEST = 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which laws at which lengths, how much of each measure, and the seed. Laws are names or specs."""

    laws: Sequence[str | LawSpec]
    lengths: Sequence[int]
    windows: int | None = None
    """Windows of text per row; None: 4, or all of them in the published protocols."""
    copies: int = 4
    passkeys: int = 10
    measures: Sequence[str] = MEASURES
    protocol: str = "windows"
    seed: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        entries = [LawSpec(label=law, name=law, parameters={}) if isinstance(law, str) else law for law in self.laws]
        for i, entry in enumerate(entries):
            if entry.label in [other.label for other in entries[:i]]:
                raise ConfigError(f"law {entry.label!r} is given twice", "give it once, or rename the law file")
        protocol = choice("protocol", self.protocol, PROTOCOLS)
        default = WINDOWS if protocol == "windows" else None
        freeze(
            self,
            laws=tuple(entries),
            lengths=tuple(dict.fromkeys(whole("length", length, least=SHORTEST) for length in self.lengths)),
            windows=default if self.windows is None else whole("windows", self.windows),
            copies=whole("copies", self.copies),
            passkeys=whole("passkeys", self.passkeys),
            measures=tuple(
                name for name in MEASURES if name in [choice("measure", m, MEASURES) for m in self.measures]
            ),
            protocol=protocol,
            seed=whole("seed", self.seed, least=0),
            batch=whole("batch", self.batch),
        )
        for name in ("laws", "lengths", "measures"):
            if not getattr(self, name):
                raise ConfigError(f"no {name} are given", f"give at least one of {name}")

    @property
    def entries(self) -> tuple[LawSpec, ...]:
        return tuple(law for law in self.laws if isinstance(law, LawSpec))

    def to_dict(self) -> dict[str, Any]:
        """As the results file has it."""
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
        }
