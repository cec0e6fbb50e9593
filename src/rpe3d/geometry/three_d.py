"""3D-RPE in its three forms: as defined, as its authors' code computes it, and bounded (the default)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import ConfigError, flag, real, whole
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.plan import Fade, Phase, Region, Turn
from rpe3d.geometry.windowed import check_dual_chunk, dual_chunk_regions

FOCUS, FADE = 2.0, 0.125
"""How far keys weigh when there are more of them than the model knows; measured on two models (docs/log.md)."""


def bounded_regions(
    chunk: int, near_chunks: int, slope: float, fade: Fade | None = None, sinks: int = 0
) -> tuple[Region, ...]:
    """f = (m - n) + c [ r a + (1 - r) min(a, A) ]: the pair's own two coordinates, a = i - j (eq. 5).

    Plain RoPE up to chunk distance A; beyond it a query stands at m + c (r i + (1 - r) A), a key at n + c r j. Far keys
    fade, but for the first `sinks` of all.
    """
    far_query = Turn(chunk=chunk, offset=1.0, stride=chunk * slope, start=chunk * (1 - slope) * near_chunks)
    far_key = Turn(chunk=chunk, offset=1.0, stride=chunk * slope)
    first = near_chunks + 1
    near = Region(unit=chunk, last=near_chunks)
    if fade is None or not sinks:
        return (near, Region(unit=chunk, first=first, query=far_query, key=far_key, fade=fade))
    return (
        near,
        Region(unit=chunk, first=first, keys=sinks, query=far_query, key=far_key),
        Region(unit=chunk, first=first, start=sinks, query=far_query, key=far_key, fade=fade),
    )


@dataclass(frozen=True, kw_only=True)
class Bounded(Law):
    """3D-RPE that keeps its promises on a pretrained model: exact near, and never an unseen position far."""

    name: ClassVar[str] = "3d-rpe"
    summary: ClassVar[str] = "3D-RPE, bounded: exact window, far chunks packed into a reach the model has seen"

    chunk: int = parameter(None, "tokens in a chunk, c; default pretrained / 16")
    window: int = parameter(None, "exact RoPE up to here, w, a multiple of chunk; default 5/16 of pretrained")
    reach: int = parameter(None, "no pair is shown this relative position or more, R; default half of pretrained")
    focus: float = parameter(
        None, "a query at p > R takes far keys (log p / log R)^focus times sharper; default 2, with your own reach 0"
    )
    fade: float = parameter(None, "and gives them (R / p)^fade of their weight; default 1/8, with your own reach 0")
    sinks: int = parameter(0, "first tokens that do not fade, at most a chunk; `rpe3d tune` tells whether 1 is better")

    def check(self) -> dict[str, Any]:
        longest = self.pretrained
        # Half of the pretrained length at most, so that one exact and one far chunk always fit into the reach.
        chunk = whole("chunk", max(1, longest // 16) if self.chunk is None else self.chunk)
        if 2 * chunk > longest:
            raise ConfigError(
                f"chunk is {chunk}, above half of the pretrained length {longest}",
                f"lower chunk to at most {longest // 2}: the window needs one chunk and the far part another",
            )
        if self.window is None:
            room = (longest if self.reach is None else whole("reach", self.reach, least=2)) - chunk
            window = max(1, min(5 * longest // 16, room) // chunk) * chunk
        else:
            window = whole("window", self.window)
        if window % chunk:
            raise ConfigError(
                f"window is {window}, not a multiple of chunk {chunk}",
                f"choose window {max(chunk, window // chunk * chunk)}, or a chunk that divides it",
            )
        reach = max(longest // 2, window + chunk) if self.reach is None else whole("reach", self.reach)
        if reach < window + chunk:
            raise ConfigError(
                f"reach is {reach}, below window + chunk = {window + chunk}",
                "raise reach, or lower window or chunk",
            )
        if reach > longest:
            raise ConfigError(
                f"reach is {reach}, above the pretrained length {longest}",
                "lower reach (and window + chunk with it): the model has seen no position beyond",
            )
        given = {"focus": self.focus, "fade": self.fade}
        default = {"focus": FOCUS, "fade": FADE} if self.reach is None else dict.fromkeys(given, 0.0)
        weights = {
            name: default[name] if value is None else real(name, value, least=0.0, most=8.0)
            for name, value in given.items()
        }
        sinks = whole("sinks", self.sinks, least=0, most=chunk)
        return {"chunk": chunk, "window": window, "reach": reach, **weights, "sinks": sinks}

    @property
    def near_chunks(self) -> int:
        """A: pairs at most this many chunks apart are exact RoPE."""
        return self.window // self.chunk

    @property
    def slope(self) -> float:
        """r = (R - c - w) / (L - w): what is left of a far distance."""
        return (self.reach - self.chunk - self.window) / (self.context - self.window)

    @property
    def endless(self) -> bool:
        return self.slope == 0

    @property
    def regions(self) -> tuple[Region, ...]:
        faded = self.fade or self.focus
        fade = Fade(rate=self.fade, focus=self.focus, span=float(self.reach)) if faded else None
        return bounded_regions(self.chunk, self.near_chunks, self.slope, fade, self.sinks)


def interpolated_chunk(pretrained: int, context: int, chunk: int) -> int:
    """Theorem 1: the n = ceil(L_p / c) chunks stay, and each grows to c' = ceil(L / n) tokens."""
    return math.ceil(context / math.ceil(pretrained / chunk))


@dataclass(frozen=True, kw_only=True)
class _Phased(Law):
    """The forms whose second coordinate is a phase φ_j = base^(-j) of the chunk, as the paper prints it."""

    single_position: ClassVar[bool] = False

    chunk: int = parameter(None, "tokens in a chunk, c; default 3/4 of pretrained, fewer where interpolation needs it")
    phi_base: float = parameter(10000.0, "base of the chunk's phase, φ_j = base^(-j)")
    interpolate: bool = parameter(False, "Theorem 1: keep the number of chunks and let each grow to c' = ceil(L / n)")

    @property
    def chunk_in_use(self) -> int:
        """c, or c' where the law interpolates."""
        return self._grown(self.chunk, self.interpolate)

    def _grown(self, chunk: int, interpolate: bool) -> int:
        return interpolated_chunk(self.pretrained, self.context, chunk) if interpolate else chunk

    def _check_phase(self, chunk: int, largest: int) -> dict[str, Any]:
        """The shared parameters; `largest` is the most tokens that a chunk in use may have."""
        interpolate = flag("interpolate", self.interpolate)
        if chunk > largest:
            raise ConfigError(f"chunk is {chunk}, above {largest}", f"lower chunk to at most {largest}")
        grown = self._grown(chunk, interpolate)
        if grown > largest:
            least = math.ceil(self.context / largest)
            raise ConfigError(
                f"interpolation grows chunk {chunk} to {grown}, above {largest} (Theorem 1 needs c' <= L_p)",
                f"lower chunk to at most {max(1, self.pretrained // least)}, or lower context",
            )
        base = real("phi_base", self.phi_base, least=1.0, most=1e100, above=True)
        return {"chunk": chunk, "phi_base": base, "interpolate": interpolate}

    def _fitting(self, chunk: int, largest: int) -> int:
        """A default chunk: `chunk`, or the largest whose interpolation stays within `largest`."""
        if self.interpolate is not True or self._grown(chunk, True) <= largest:
            return chunk
        return max(1, self.pretrained // math.ceil(self.context / largest))


@dataclass(frozen=True, kw_only=True)
class Definition(_Phased):
    """Definition 1 to the letter: h~ = e^{i m θ} (cos φ_j h⊥ + sin φ_j h), one turn by m θ + π/2 - φ_j (eq. 4)."""

    name: ClassVar[str] = "3d-rpe-definition"
    summary: ClassVar[str] = "3D-RPE to the letter of Definition 1: offsets restart, chunks differ by a phase"

    def check(self) -> dict[str, Any]:
        if self.chunk is None:
            return self._check_phase(self._fitting(max(1, 3 * self.pretrained // 4), self.pretrained), self.pretrained)
        return self._check_phase(whole("chunk", self.chunk), self.pretrained)

    @property
    def regions(self) -> tuple[Region, ...]:
        phase = Phase(base=self.phi_base, sign=-1, constant=math.pi / 2)
        turn = Turn(chunk=self.chunk_in_use, offset=1.0, stride=0.0, phase=phase)
        return (Region(query=turn, key=turn),)


@dataclass(frozen=True, kw_only=True)
class DualChunk(_Phased):
    """What the authors' code computes: dual chunk attention with the phase +φ of the chunk on far pairs.

    Theirs turns keys by a phase that depends on the prompt's length, in prefill only; here it depends on the
    key's position alone, so that cached decoding equals the full forward.
    """

    name: ClassVar[str] = "3d-rpe-dual-chunk"
    summary: ClassVar[str] = "3D-RPE as its authors' code computes it: dual chunk attention with a chunk phase"

    chunk: int = parameter(None, "tokens in a chunk, c; default window - pretrained / 16")
    window: int = parameter(None, "the largest position shown, w; default 3/4 of pretrained")

    def check(self) -> dict[str, Any]:
        chunk, window = check_dual_chunk(self, self.chunk, self.window)
        if self.chunk is None:
            chunk = self._fitting(chunk, window)
        return self._check_phase(chunk, window) | {"window": window}

    @property
    def endless(self) -> bool:
        return True

    @property
    def regions(self) -> tuple[Region, ...]:
        return dual_chunk_regions(self.chunk_in_use, self.window, Phase(base=self.phi_base, sign=+1))
