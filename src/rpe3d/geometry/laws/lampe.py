"""LaMPE (arXiv 2508.02308; repository scar-on/LaMPE, llama_cache1.py): three position granularities in a text.

In a text of n tokens, with m(p) = floor(p U / (n - 1)) and U = U(n) the mapping length, a pair at distance d is shown

    f = d                      for d < head,
    f = m(q) - m(k) + b_1      from there on,       b_1 = head - 1 - m(head),
    f = d - b_2                for d >= n - T,      b_2 = (n - 1 - T) - m(n - 1 - T) - b_1,

where T is the last token that m maps to the same position as token `tail`. Without a tail (0) there are two
granularities, as in llama_sw_map.py, which the authors' RULER script runs. Below 2 `head` tokens everything is plain
RoPE. Cos and sin are multiplied by 0.1 ln 2 + 1. The authors fitted U(n) = C / (1 + exp(-(a n + b))) for four models
(`FITS`). For another model we use the fit of the nearest pretrained length, with all lengths in units of the pretrained
one, which gives the published numbers if the pretrained length is a published one. No position beyond about
U + head + T is shown, and T is at least n / U: that is within the pretrained length of real models, though not of toys.

The positions depend on the length of the text, so n is a parameter: by default the context, which `compare` sets to the
length that it measures. A shorter prompt is then read with the positions of the longer text, and caches, pieces and
padded batches stay exact. For the positions of one particular prompt, extend the model for it: `length` is its n, and
`context` leaves room for the answer.

Departures. Upstream counts pairs at the distances `head` and n - T twice in a prompt, under both positions; here they
are counted once, as in its decoding. In its decoding, the queries of the middle stay at m(n - 1), and after `head`
tokens it fails (llama_sw_map.py: n grows with every token and U does not); here m continues with the same n. It
computes m in float32, which can lose a position; here m is a whole number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rpe3d.config import ConfigError, choice, real, whole
from rpe3d.drawing.palette import DOTTED, GREEN, Style
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.region import Region, Steps, Turn


class Fit(NamedTuple):
    """U(n) = C / (1 + exp(-(a n + b))) of a model; a text below `short` tokens has `least` instead."""

    pretrained: int
    a: float
    b: float
    c: float
    short: int = 8192
    least: int = 1536

    def mapped(self, length: int, pretrained: int) -> int:
        """Return U for a text of `length` tokens, with every length in units of the pretrained one."""
        unit = pretrained / self.pretrained
        if length < self.short * unit:
            return int(self.least * unit)
        return int(self.c * unit / (1 + math.exp(-(self.a * length / unit + self.b))))


FITS = {
    "llama-2": Fit(4096, 8.673006440952035e-05, -0.648012322406978, 2489.1055552214357),
    "llama-3": Fit(8192, 0.00010493097327094324, -2.466638011138158, 6204.409324666837),
    "mistral": Fit(32768, 0.00010493097327094324, -2.466638011138158, 24576),
    "llama-3.1": Fit(131072, 4.505261149632588e-05, -2.788576860718702, 82358.52413056031, short=0),
}


@dataclass(frozen=True, kw_only=True)
class Lampe(Law):
    """Show near pairs their distance, pack the middle into a length that grows with the text, and end in unit steps."""

    name: ClassVar[str] = "lampe"
    summary: ClassVar[str] = "LaMPE: exact head, middle packed into a length that grows with the text, unit-step tail"
    style: ClassVar[Style] = Style(GREEN, DOTTED)

    length: int = parameter(None, "tokens of the text that positions are made for, n; default: the context")
    like: str = parameter(
        None, f"model whose fit gives the mapping length: {', '.join(FITS)}; default: the nearest pretrained length"
    )
    mapped: int = parameter(None, "mapping length, U; default: as fitted for `like`, in units of the pretrained length")
    head: int = parameter(None, "distances below this are exact RoPE; default 512, or pretrained / 8 if that is less")
    tail: int = parameter(
        None, "first tokens that the last tokens see in unit steps; default 200, or pretrained / 20; 0: none"
    )
    attention_factor: float = parameter(0.1 * math.log(2) + 1, "multiplies cos and sin; default 0.1 ln 2 + 1")

    def check(self) -> dict[str, Any]:
        pretrained = self.pretrained
        length = self.context if self.length is None else whole("length", self.length, least=2, most=self.context)
        like = _nearest(pretrained) if self.like is None else choice("like", self.like, FITS)
        head = max(1, min(512, pretrained // 8)) if self.head is None else self.head
        head = whole("head", head, most=pretrained - 1)
        tail = min(200, pretrained // 20) if self.tail is None else self.tail
        tail = whole("tail", tail, least=0, most=pretrained - 1)
        fitted = max(1, min(FITS[like].mapped(length, pretrained), length - 1))
        mapped = fitted if self.mapped is None else whole("mapped", self.mapped, most=min(length, pretrained) - 1)
        factor = real("attention_factor", self.attention_factor, above=True, most=1e9)
        last = Grains(length, mapped, head, tail).last if tail else 0
        if 2 * head <= length <= head + last:
            raise ConfigError(
                f"head {head} and {last} tokens of tail leave nothing between them in {length} tokens",
                "lower head or tail, or raise length or mapped",
            )
        return {
            "length": length,
            "like": like,
            "mapped": mapped,
            "head": head,
            "tail": tail,
            "attention_factor": factor,
        }

    @property
    def regions(self) -> tuple[Region, ...]:
        if self.length < 2 * self.head:
            return (Region(),)
        up, over = self.mapped, self.length - 1
        grains = Grains(self.length, self.mapped, self.head, self.tail)
        near = Region(last=self.head - 1)
        query, key = Steps(up=up, over=over, start=float(grains.middle_shift)), Steps(up=up, over=over)
        if not self.tail:
            return (near, Region(first=self.head, query=query, key=key))
        border = self.length - grains.last
        return (
            near,
            Region(first=self.head, last=border - 1, query=query, key=key),
            Region(first=border, query=Turn(start=-float(grains.tail_shift))),
        )

    @property
    def attention_scaling(self) -> float:
        return super().attention_scaling * self.attention_factor


@dataclass(frozen=True)
class Grains:
    """The whole numbers that define the three granularities, for a text of `length` tokens."""

    length: int
    mapped: int
    head: int
    tail: int

    def position(self, p: int) -> int:
        """Return m(p) = floor(p U / (n - 1))."""
        return p * self.mapped // (self.length - 1)

    @property
    def last(self) -> int:
        """T, the last token with m(T) = m(tail)."""
        after = -(-(self.position(self.tail) + 1) * (self.length - 1) // self.mapped)  # the first token beyond
        return min(after, self.length) - 1

    @property
    def middle_shift(self) -> int:
        """Offset b_1 of the middle part."""
        return self.head - 1 - self.position(self.head)

    @property
    def tail_shift(self) -> int:
        """Offset b_2 of the tail."""
        first = self.length - 1 - self.last
        return first - self.position(first) - self.middle_shift


def _nearest(pretrained: int) -> str:
    """Return the model of `FITS` whose pretrained length is nearest, by ratio."""
    return min(FITS, key=lambda name: abs(math.log(pretrained / FITS[name].pretrained)))
