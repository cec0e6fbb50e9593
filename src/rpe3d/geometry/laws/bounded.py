"""3D-RPE, bounded: the two coordinates of 3D-RPE (eq. 5 of arXiv 2406.09897), made to hold on a pretrained model.

    f = (m - n) + c [ r a + (1 - r) min(a, A) ],   a = i - j,   A = w / c,   r = (R - c - w) / (L - w)

for a query at offset m of chunk i and a key at offset n of chunk j. Departs from the paper: the second coordinate is a
bounded position instead of the phase φ, so a pair within the window w is exact RoPE, and no pair is shown a relative
position of R or more. Far keys of a query beyond R fade (`Fade`), or only some of them are seen (`Choice`); in the
layers named by `full`, all of them are seen beside these, faded. The paper has neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from rpe3d.config import ConfigError, real, whole
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.region import Choice, Fade, Region, Turn

BLOCK = 16
FIRST = 128
DECAY = 0.9
"""Level with 0.8 on one small model and better on another; a larger one may find more with 0.8 (docs/log.md)."""
ALL, MOST_LAYERS = "all", 1000
FOCUS, FADE = 2.0, 0.125
"""Defaults for the weight of far keys when there are more than the model knows, measured on two models (log.md)."""


@dataclass(frozen=True, kw_only=True)
class Bounded(Law):
    """3D-RPE that keeps its promises on a pretrained model: exact near pairs, never an unseen position far away."""

    name: ClassVar[str] = "3d-rpe"
    summary: ClassVar[str] = "3D-RPE, bounded: exact window, far chunks packed into a reach the model has seen"

    chunk: int = parameter(None, "tokens per chunk, c; default pretrained / 16")
    window: int = parameter(None, "exact RoPE up to this distance, w, a multiple of chunk; default 5/16 of pretrained")
    reach: int = parameter(None, "every pair is shown a relative position below this, R; default half of pretrained")
    focus: float = parameter(
        None,
        "sharpens the far scores of a query at p > R by (log p / log R)^focus; default 2, or 0 with far",
    )
    fade: float = parameter(
        None, "multiplies the far weight of a query at p > R by (R / p)^fade; default 1/8, or 0 with far"
    )
    sinks: int = parameter(0, "first tokens that do not fade, at most a chunk; `rpe3d tune` finds whether 1 is better")
    far: int = parameter(
        None, "far blocks that a query attends to, chosen by content; default 0: all", later=True, unsaid=0
    )
    block: int | None = parameter(
        None, "with far: keys per far block, a divisor of chunk; default gcd(16, chunk)", later=True
    )
    first: int | None = parameter(
        None,
        "with far: first keys that every query sees, at least one block and at most far / 8 blocks; default 128",
        later=True,
    )
    decay: float = parameter(
        DECAY,
        "with far: weight of a recent key in the search, relative to the next; default 0.9. Lower finds names, higher "
        "finds passages",
        later=True,
    )
    full: tuple[int, ...] | str = parameter(
        None,
        "with far: layers of the model (18-20 are three, 3+18 two, or all) in which a query also sees all far keys, "
        "faded by focus and fade (2 and 1/8 if both are 0), with 1/e of their weight; default none",
        later=True,
        unsaid=(),
    )

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
                "lower reach (and window + chunk with it): the model has seen no positions beyond that",
            )
        given = {"focus": self.focus, "fade": self.fade}
        far = 0 if self.far is None else whole("far", self.far, least=0)
        default = dict.fromkeys(given, 0.0) if far else {"focus": FOCUS, "fade": FADE}
        weights = {
            name: default[name] if value is None else real(name, value, least=0.0, most=8.0)
            for name, value in given.items()
        }
        sinks = whole("sinks", self.sinks, least=0, most=chunk)
        if sinks and far and not any(weights.values()):
            raise ConfigError(
                f"sinks is {sinks}, but chosen far keys do not fade: focus and fade are 0",
                f"leave sinks out, and give first={sinks} to keep the first keys in sight",
            )
        block = math.gcd(BLOCK, chunk) if self.block is None and far else self.block
        if block is not None and chunk % (block := whole("block", block)):
            near = max(n for n in range(1, min(block, chunk) + 1) if chunk % n == 0)
            raise ConfigError(f"block is {block}, which does not divide chunk {chunk}", f"choose block {near}")
        first = FIRST if self.first is None and far else self.first
        if first is not None:
            first = whole("first", first, least=0)
        decay = real("decay", self.decay, most=1.0, above=True)
        full = _layers(self.full)
        if not far:
            own_decay, layers = None if decay == DECAY else decay, self.full if full else None
            for name, value in {"block": block, "first": first, "decay": own_decay, "full": layers}.items():
                if value is not None and self.far is None:
                    raise ConfigError(
                        f"{name} is {value}, but far is not given, so a query does not choose its far keys",
                        f"give far as well, e.g. far=64, or leave {name} out",
                    )
            block, first, decay, full = None, None, DECAY, ()  # far=0 turns the choice off, and its parameters with it
        own = {"chunk": chunk, "window": window, "reach": reach, **weights, "sinks": sinks}
        return {**own, "far": far, "block": block, "first": first, "decay": decay, "full": full}

    @classmethod
    def as_saved(cls, own: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in parameters that are newer than a file, with the values that keep the file's meaning.

        A file without `focus` and `fade` leaves far keys at full weight; without `first` a query always sees one block.
        Parameters without effect, such as `block` without `far`, were once accepted and are dropped.
        """
        saved = {"focus": 0.0, "fade": 0.0, **({"first": 0} if own.get("far") else {}), **own}
        idle = ["block", "first", "decay", "full"]
        if saved.get("far"):
            idle = [] if saved["focus"] or saved["fade"] else ["sinks"]
        return {name: value for name, value in saved.items() if name not in idle}

    @property
    def regions(self) -> tuple[Region, ...]:
        faded = self.fade or self.focus
        fade = Fade(rate=self.fade, focus=self.focus, span=float(self.reach)) if faded else None
        choice = None
        if self.far and self.block:
            choice = Choice(most=self.far, size=self.block, first=self.first or 0, decay=self.decay)
        return bounded_regions(self.chunk, self.near_chunks, self.slope, fade, self.sinks, choice)

    @property
    def layers(self) -> dict[int, Law]:
        if not self.full or self.full == ALL:
            return {}
        return dict.fromkeys(map(int, self.full), replace(self, full=ALL))

    @cached_property
    def both(self) -> tuple[Law, Law] | None:
        """The choice, and all far keys, faded, beside it; in the layers of `full`, whose law has `ALL`."""
        if self.full != ALL:
            return None
        focus, fade = (self.focus, self.fade) if self.focus or self.fade else (FOCUS, FADE)
        rest = FarAlone(
            pretrained=self.pretrained,
            context=self.context,
            rotary=self.rotary,
            chunk=self.chunk,
            window=self.window,
            reach=self.reach,
            focus=focus,
            fade=fade,
            sinks=self.sinks,
        )
        return replace(self, full=()), rest

    @property
    def near_chunks(self) -> int:
        """A: pairs at most this many chunks apart are exact RoPE."""
        return self.window // self.chunk

    @property
    def slope(self) -> float:
        """r = (R - c - w) / (L - w): the fraction of a far distance that is kept."""
        return (self.reach - self.chunk - self.window) / (self.context - self.window)

    @property
    def endless(self) -> bool:
        return self.slope == 0

    @property
    def chunk_in_use(self) -> int:
        return self.chunk


class FarAlone(Bounded):
    """The far keys of 3D-RPE without the near ones: what stands beside a choice of them, never a law by itself.

    Under the name that files and compiled graphs have of it there is no law: read back, it would have near keys.
    """

    @property
    def regions(self) -> tuple[Region, ...]:
        return super().regions[1:]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"name": f"{self.name}, far keys alone"}


def _layers(given: Any) -> tuple[int, ...] | str:
    """Parse numbers of layers, from a sequence, a number, or text such as 18-20 or 3+18-20; or all."""
    if given == ALL:
        return ALL
    hint = "pass numbers of layers, from 0 on: 18, 18-20 for 18 to 20, or 3+18-20; or all"
    said, refused = repr(given), ConfigError(f"full is {given!r}, which does not name layers", hint)
    if isinstance(given, str):
        given = given.split("+")
    layers: list[int] = []
    for item in given if isinstance(given, list | tuple) else () if given is None else [given]:
        ends = item.split("-") if isinstance(item, str) else [item, item]
        if len(ends) > 2 or not all(re.fullmatch("[0-9]{1,9}", str(end)) for end in ends):
            raise refused
        first, last = int(ends[0]), int(ends[-1])
        if first > last or last - first > MOST_LAYERS:
            raise refused
        layers += range(first, last + 1)
    if len({*layers}) < len(layers):
        raise ConfigError(f"full names a layer twice: {said}", hint)
    return tuple(sorted(layers))


def bounded_regions(
    chunk: int,
    near_chunks: int,
    slope: float,
    fade: Fade | None = None,
    sinks: int = 0,
    choice: Choice | None = None,
) -> tuple[Region, ...]:
    """Return the regions of f = (m - n) + c [ r a + (1 - r) min(a, A) ]: a pair's two coordinates, a = i - j (eq. 5).

    Plain RoPE up to chunk distance A; beyond it a query stands at m + c (r i + (1 - r) A), a key at n + c r j. Far keys
    fade, but for the first `sinks` of all; or a query has a choice of them.
    """
    far_query = Turn(chunk=chunk, offset=1.0, stride=chunk * slope, start=chunk * (1 - slope) * near_chunks)
    far_key = Turn(chunk=chunk, offset=1.0, stride=chunk * slope)
    first = near_chunks + 1
    near = Region(unit=chunk, last=near_chunks)
    if fade is None or not sinks:
        far = Region(unit=chunk, first=first, query=far_query, key=far_key, fade=fade, choice=choice)
        return (near, far)
    return (
        near,
        Region(unit=chunk, first=first, keys=sinks, query=far_query, key=far_key),
        Region(unit=chunk, first=first, start=sinks, query=far_query, key=far_key, fade=fade, choice=choice),
    )
