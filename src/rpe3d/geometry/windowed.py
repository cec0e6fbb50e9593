"""Laws that show near pairs their true distance and far ones an invented one: the peers of 3D-RPE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import LONGEST, ConfigError, real, whole
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.plan import Phase, Region, Turn


def default_reach(pretrained: int) -> int:
    """5/8 of the pretrained length: real models use less context than they were trained with (docs/log.md)."""
    return max(2, 5 * pretrained // 8)


def default_group(pretrained: int, context: int, window: int) -> int:
    """The fewest tokens that have to share a far position so that all positions stay below the default reach."""
    return math.ceil(context / max(1, default_reach(pretrained) - window))


def dual_chunk_regions(chunk: int, window: int, phase: Phase | None = None) -> tuple[Region, ...]:
    """Dual chunk attention (An et al. 2024, arXiv 2402.17463), with an optional phase on the far pairs.

    Keys stand at n; queries at m for their own chunk, at min(m + c, w) for the previous one, at w for all farther ones.
    Only differences count, and a chunk or two away whole chunks can be added to both sides: so the first two regions
    leave the keys where stock RoPE has them, with the query at i c + m and at i c + min(m, w - c).
    """
    following = Turn(chunk=chunk, offset=1.0, ceiling=float(window - chunk), stride=float(chunk))
    far_query = Turn(chunk=chunk, stride=0.0, start=float(window), phase=phase)
    far_key = Turn(chunk=chunk, offset=1.0, stride=0.0, phase=phase)
    return (
        Region(unit=chunk, last=0),
        Region(unit=chunk, first=1, last=1, query=following),
        Region(unit=chunk, first=2, query=far_query, key=far_key),
    )


def check_dual_chunk(law: Law, chunk: object, window: object) -> tuple[int, int]:
    """Chunk and largest shown position as ChunkLlama sets them: w = 3/4 L_p, c = w - L_p / 16."""
    largest = max(1, law.pretrained * 3 // 4) if window is None else whole("window", window)
    if largest >= law.pretrained:
        raise ConfigError(
            f"window is {largest}, but {law.name} shows position {largest} itself and the model has seen "
            f"only {law.pretrained}",
            f"lower window below {law.pretrained}",
        )
    size = max(1, largest - law.pretrained // 16) if chunk is None else whole("chunk", chunk)
    if size > largest:
        raise ConfigError(
            f"chunk is {size}, above window {largest}, so far keys would come after the query",
            f"lower chunk to at most {largest}, or raise window",
        )
    return size, largest


@dataclass(frozen=True, kw_only=True)
class Dca(Law):
    """Dual chunk attention as ChunkLlama publishes it."""

    name: ClassVar[str] = "dca"
    summary: ClassVar[str] = "dual chunk attention (ChunkLlama): chunks restart, far queries stand at one position"

    chunk: int = parameter(None, "tokens in a chunk, c; default window - pretrained / 16")
    window: int = parameter(None, "the largest position shown, w; default 3/4 of pretrained")

    def check(self) -> dict[str, Any]:
        chunk, window = check_dual_chunk(self, self.chunk, self.window)
        return {"chunk": chunk, "window": window}

    @property
    def endless(self) -> bool:
        return True

    @property
    def regions(self) -> tuple[Region, ...]:
        return dual_chunk_regions(self.chunk, self.window)


@dataclass(frozen=True, kw_only=True)
class Window(Law):
    """Laws that are exact RoPE below a distance `window`."""

    window: int = parameter(None, "distances below this are exact RoPE; default pretrained / 8")

    def check(self) -> dict[str, Any]:
        window = max(1, self.pretrained // 8) if self.window is None else self.window
        return {"window": whole("window", window, most=self.pretrained - 1)}

    @property
    def near(self) -> Region:
        return Region(last=self.window - 1)


@dataclass(frozen=True, kw_only=True)
class SelfExtend(Window):
    """Self-Extend (Jin et al. 2024, arXiv 2401.01325): far positions are floored to groups."""

    name: ClassVar[str] = "self-extend"
    summary: ClassVar[str] = "Self-Extend: exact window, far positions floored to groups"

    group: int = parameter(None, "tokens that share a far position, G; default: the fewest that stay below 5/8 L_p")

    def check(self) -> dict[str, Any]:
        parameters = super().check()
        window = parameters["window"]
        default = default_group(self.pretrained, self.context, window)
        group = default if self.group is None else whole("group", self.group)
        largest = (self.context - 1) // group + window - window // group
        if largest >= self.pretrained:
            raise ConfigError(
                f"group {group} with window {window} shows position {largest} at context {self.context}, beyond "
                f"the pretrained length {self.pretrained}",
                "raise group or lower window",
            )
        return parameters | {"group": group}

    @property
    def regions(self) -> tuple[Region, ...]:
        start = float(self.window - self.window // self.group)
        far_query = Turn(chunk=self.group, start=start)
        return (self.near, Region(first=self.window, query=far_query, key=Turn(chunk=self.group)))


@dataclass(frozen=True, kw_only=True)
class ReRope(Window):
    """ReRoPE (Su 2023): every distance from `window` on is shown as `window`."""

    name: ClassVar[str] = "rerope"
    summary: ClassVar[str] = "ReRoPE: exact window, all farther keys at one distance"

    @property
    def endless(self) -> bool:
        return True

    @property
    def regions(self) -> tuple[Region, ...]:
        return leaky_regions(self.window, slope=0.0)


@dataclass(frozen=True, kw_only=True)
class LeakyReRope(Window):
    """Leaky ReRoPE (Su 2023): beyond `window` the distance goes on growing with `slope`."""

    name: ClassVar[str] = "leaky-rerope"
    summary: ClassVar[str] = "Leaky ReRoPE: exact window, farther distances grow at a small slope"

    slope: float = parameter(None, "growth per token beyond the window; default: reaches 5/8 L_p at the context")

    def check(self) -> dict[str, Any]:
        parameters = super().check()
        window = parameters["window"]
        slope = self.slope
        if slope is None:
            slope = max(0, default_reach(self.pretrained) - 1 - window) / (self.context - window)
        return parameters | {"slope": real("slope", slope, most=1.0)}

    @property
    def endless(self) -> bool:
        return self.slope == 0

    @property
    def regions(self) -> tuple[Region, ...]:
        return leaky_regions(self.window, self.slope)


def leaky_regions(window: int, slope: float) -> tuple[Region, ...]:
    """f = p_q - p_k below `window`, then window + slope (p_q - p_k - window)."""
    far_query = Turn(stride=slope, start=window * (1 - slope))
    return (Region(last=window - 1), Region(first=window, query=far_query, key=Turn(stride=slope)))


@dataclass(frozen=True, kw_only=True)
class StreamingLlm(Window):
    """StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): the last tokens and the first few; the rest unseen.

    Positions count inside the cache, so the first tokens always stand right before the window.
    """

    name: ClassVar[str] = "streaming-llm"
    summary: ClassVar[str] = "StreamingLLM: the last tokens and the first few (sinks), nothing between"

    window: int = parameter(None, "last tokens that are seen; default pretrained / 2 - sinks")
    sinks: int = parameter(None, "first tokens that are always seen; default 4")

    def check(self) -> dict[str, Any]:
        sinks = min(4, self.pretrained - 1) if self.sinks is None else self.sinks
        sinks = whole("sinks", sinks, least=0, most=self.pretrained - 1)
        window = max(1, self.pretrained // 2 - sinks) if self.window is None else whole("window", self.window)
        if window + sinks > self.pretrained:
            raise ConfigError(
                f"window {window} and {sinks} sinks are more than the pretrained length {self.pretrained}",
                "lower window or sinks",
            )
        return {"sinks": sinks, "window": window}

    @property
    def endless(self) -> bool:
        return True

    @property
    def regions(self) -> tuple[Region, ...]:
        if not self.sinks:
            return (self.near,)
        far_query = Turn(chunk=LONGEST, offset=1.0, ceiling=float(self.sinks + self.window - 1))
        return (self.near, Region(first=self.window, keys=self.sinks, query=far_query))


@dataclass(frozen=True, kw_only=True)
class String(Law):
    """STRING (An et al. 2024, arXiv 2410.18745): f = d below S, and d - S + W from there on, at every length.

    Positions that training saw often take the place of the last third, which it saw rarely: so it is of use within the
    pretrained length, too. Beyond 2 L_p - W tokens either S - 1 or L - 1 - S + W is an unseen position: nothing is
    published for longer texts, and it goes the way of stock RoPE. Keys stay as stock RoPE turns them.

    The published code has S = int(0.33 L_p), W = 128 and an `attention_factor` of 0.1 ln 2 + 1 = 1.0693, which changes
    short prompts, too, and is therefore left to the user. In a prompt it counts pairs at distance S twice, as S and as
    W; here they are counted once, as W, which is what it does when it decodes.
    """

    name: ClassVar[str] = "string"
    summary: ClassVar[str] = "STRING: exact up to a distance, farther pairs shifted down to positions seen more often"

    shift: int = parameter(
        None, "distances below this are exact RoPE, S; default context - 0.67 L_p, or half of the context where less"
    )
    local: int = parameter(None, "what distance S is shown as, W; default 128, or pretrained / 16 where that is less")
    attention_factor: float = parameter(1.0, "multiplies cos and sin; the published code has 1.0693")

    def check(self) -> dict[str, Any]:
        longest, context = self.pretrained, self.context
        local = min(128, longest // 16) if self.local is None else self.local
        local = whole("local", local, least=0, most=longest - 1)
        # As many positions are dropped as at the pretrained length, until the near pairs would show more than the far.
        dropped = max(1, 33 * longest // 100, local)
        default = min(dropped + context - longest, (context + local + 1) // 2)
        shift = default if self.shift is None else whole("shift", self.shift, least=max(1, local))
        factor = real("attention_factor", self.attention_factor, above=True, most=1e9)
        return {"shift": shift, "local": local, "attention_factor": factor}

    @property
    def attention_scaling(self) -> float:
        return super().attention_scaling * self.attention_factor

    @property
    def regions(self) -> tuple[Region, ...]:
        far_query = Turn(start=float(self.local - self.shift))
        return (Region(last=self.shift - 1), Region(first=self.shift, query=far_query))
