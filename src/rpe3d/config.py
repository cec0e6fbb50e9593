"""Parameters as frozen values, validated when they are created.

A wrong parameter raises `ConfigError`: one sentence with the value and the rule, and a hint that says what to
do. An accepted value never turns into NaN, a wrong table or a stack trace from inside torch later.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

# Beyond 2^31 a float64 angle p θ is off by more than float32 resolves (2^31 · 2^-53 = 2.4e-7).
LONGEST = 2**31


class ConfigError(ValueError):
    """Raised when a parameter breaks a rule. `str(error)` reads `problem: hint`."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"{problem}: {hint}")
        self.problem = problem
        self.hint = hint


def whole(name: str, value: object, *, least: int = 1, most: int = LONGEST) -> int:
    """Return `value` as an int in [least, most], or raise a ConfigError that names it."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(f"{name} is {value!r}, which is not a whole number", f"pass {name} as an int")
    if not least <= number <= most:
        raise ConfigError(f"{name} is {number}, outside [{least}, {most}]", f"choose {name} in that range")
    return number


def real(name: str, value: object, *, least: float = 0.0, most: float = math.inf, above: bool = False) -> float:
    """Return `value` as a finite float, at least `least` (or above it) and at most `most`, or raise a ConfigError."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    low = number > least if above else number >= least
    if not (math.isfinite(number) and low and number <= most):
        rule = f"{'above' if above else 'at least'} {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
        raise ConfigError(f"{name} is {value!r}, which is not a finite number {rule}", f"choose {name} {rule}")
    return number


UNITS = {"": 1, "k": 1024, "m": 1024**2}
MOST = 2**24
"""Maximum number of tokens: transformers holds positions in float32, where 2^24 and 2^24 + 1 are the same number."""


def size(text: str) -> int:
    """Parse a number of tokens: 65536, 64k or 1M, with k = 1024 and M = 1024 k."""
    match = re.fullmatch(r"([0-9]{1,12})([km]?)", text.strip().lower())
    if not match:
        raise ConfigError(f"{text!r} is not a size", "write it as 65536 or 64k (k = 1024)")
    tokens = int(match[1]) * UNITS[match[2]]
    if tokens > MOST:
        raise ConfigError(f"{text!r} is more than 16m tokens", "stay below: float32 cannot tell positions apart there")
    return tokens


def flag(name: str, value: object) -> bool:
    """Return `value` as a bool, or raise a ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, which is neither True nor False", f"pass {name} as a bool")
    return value


def choice(kind: str, value: object, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`, or raise a ConfigError that suggests the nearest."""
    names = list(known)
    if isinstance(value, str) and value in names:
        return value
    near = get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"{kind} {value!r} is not known", f"{hint}choose one of {', '.join(names)}")


def known_keys(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that `kind` does not have, and name those that it has."""
    names = list(known)
    for key in given:
        if key not in names:
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            raise ConfigError(f"{kind} has no parameter {key!r}", f"{hint}{takes}")


def freeze(value: object, **items: object) -> None:
    """Set validated fields of a frozen dataclass, from its `__post_init__`."""
    for name, item in items.items():
        object.__setattr__(value, name, item)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The model's own frequency scaling, which applies under any law. Subclasses mirror Hugging Face's `rope_type`s."""

    rope_type: ClassVar[str]

    factor: float

    def __post_init__(self) -> None:
        freeze(self, factor=real(f"{self.rope_type} factor", self.factor, least=1.0))

    def to_dict(self) -> dict[str, Any]:
        return {"rope_type": self.rope_type, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Scaling):
    """Divide every frequency by `factor` (position interpolation)."""

    rope_type: ClassVar[str] = "linear"


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Scaling):
    """Llama 3.1: divide slow pairs by `factor` and keep fast ones, with a smooth ramp between."""

    rope_type: ClassVar[str] = "llama3"

    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        low = real("low_freq_factor", self.low_freq_factor, above=True)
        freeze(
            self,
            low_freq_factor=low,
            high_freq_factor=real("high_freq_factor", self.high_freq_factor, least=low, above=True),
            original_max_position_embeddings=whole(
                "original_max_position_embeddings", self.original_max_position_embeddings
            ),
        )


@dataclass(frozen=True, kw_only=True)
class YarnScaling(Scaling):
    """YaRN as a model was trained with it (Peng et al. 2023, arXiv 2309.00071, section 3.2)."""

    rope_type: ClassVar[str] = "yarn"

    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        slow = real("beta_slow", 1.0 if self.beta_slow is None else self.beta_slow, least=1e-9)
        fast = real("beta_fast", 32.0 if self.beta_fast is None else self.beta_fast, least=slow, above=True, most=1e9)
        attention = self.attention_factor
        if attention is None and self.mscale and self.mscale_all_dim:
            attention = _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        elif attention is None:
            attention = _mscale(self.factor, 1.0)
        freeze(
            self,
            beta_slow=slow,
            beta_fast=fast,
            attention_factor=real("attention_factor", attention, above=True, most=1e9),
            original_max_position_embeddings=whole(
                "original_max_position_embeddings", self.original_max_position_embeddings
            ),
            truncate=flag("truncate", self.truncate),
        )


@dataclass(frozen=True, kw_only=True)
class LongropeScaling(Scaling):
    """LongRoPE as Phi-3 and Phi-4-mini carry it (Ding et al. 2024, arXiv 2402.13753): a divisor for every pair.

    Such a model has two sets: `short_factor` for texts of up to the original length, `long_factor` for longer ones.
    Cached keys stay as they were rotated, so a law uses one set for texts of any length, the long one.
    """

    rope_type: ClassVar[str] = "longrope"

    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.long_factor, (list, tuple)):
            raise ConfigError(
                f"long_factor is {self.long_factor!r}, which is not a list of numbers", "pass the model's whole dict"
            )
        given: Iterable[object] = self.long_factor
        original = whole("original_max_position_embeddings", self.original_max_position_embeddings, least=2)
        attention = self.attention_factor
        if attention is None:  # as transformers has it (`_compute_longrope_parameters`)
            attention = math.sqrt(1 + math.log(self.factor) / math.log(original))
        freeze(
            self,
            long_factor=tuple(real("long_factor", one, above=True) for one in given),
            attention_factor=real("attention_factor", attention, above=True, most=1e9),
            original_max_position_embeddings=original,
        )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"long_factor": list(self.long_factor)}


def _mscale(factor: float, weight: object) -> float:
    return 0.1 * real("mscale", weight, above=True) * math.log(factor) + 1.0


SCALINGS: dict[str, type[Scaling]] = {
    s.rope_type: s for s in (LinearScaling, Llama3Scaling, YarnScaling, LongropeScaling)
}


def make_scaling(parameters: Mapping[str, Any] | Scaling | None) -> Scaling | None:
    """Make a `Scaling` from a Hugging Face `rope_parameters` / `rope_scaling` dict; None for plain RoPE.

    The dict may hold `rope_theta` and `partial_rotary_factor`, which are read elsewhere.
    """
    if parameters is None or isinstance(parameters, Scaling):
        return parameters
    if not isinstance(parameters, Mapping):
        raise ConfigError(
            f"rope_scaling is {parameters!r}, which is not a dict", "pass the model's config.rope_parameters"
        )
    given = {k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor")}
    rope_type = given.pop("rope_type", given.pop("type", "default"))
    if rope_type == "default":
        return None
    cls = SCALINGS[choice("rope_type", rope_type, SCALINGS)]
    names = [f.name for f in fields(cls)]
    known_keys(f"rope_type {rope_type!r}", given, names)
    missing = [f.name for f in fields(cls) if f.name not in given and f.default is MISSING]
    if missing:
        raise ConfigError(f"rope_type {rope_type!r} lacks {', '.join(missing)}", "pass the model's whole dict")
    return cls(**given)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How the pretrained model rotates a head vector: base frequencies, and which dimensions form a pair."""

    head_dim: int
    rope_theta: float = 10000.0
    rotary_dim: int | None = None
    """Number of leading dimensions that are rotated; the rest pass through. None: all of them."""
    interleaved: bool = False
    """Pairs (2l, 2l + 1) as in GPT-J instead of (l, l + rotary_dim / 2) as in Llama."""
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        head_dim = _even("head_dim", whole("head_dim", self.head_dim, least=2, most=65536))
        rotary_dim = head_dim if self.rotary_dim is None else whole("rotary_dim", self.rotary_dim, least=2)
        if rotary_dim > head_dim:
            raise ConfigError(
                f"rotary_dim is {rotary_dim}, above head_dim {head_dim}", "lower rotary_dim, or leave it out"
            )
        freeze(
            self,
            head_dim=head_dim,
            rotary_dim=_even("rotary_dim", rotary_dim),
            rope_theta=real("rope_theta", self.rope_theta, least=1.0, most=1e100, above=True),
            interleaved=flag("interleaved", self.interleaved),
            scaling=make_scaling(self.scaling),
        )

    @property
    def pairs(self) -> int:
        """Number of rotated planes, d/2 for a full rotary head."""
        assert self.rotary_dim is not None
        return self.rotary_dim // 2

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict, with the names that `make_law` takes."""
        return {
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "rope_scaling": self.scaling.to_dict() if self.scaling else None,
        }


def _even(name: str, value: int) -> int:
    if value % 2:
        raise ConfigError(
            f"{name} is {value}, which is odd", f"RoPE rotates pairs of dimensions, so {name} must be even"
        )
    return value
