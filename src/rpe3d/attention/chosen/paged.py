# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""The decoding step of a chosen far field over a paged cache: the kernels of `step`, and summaries kept by page.

One set of launches takes sequences of any lengths, and nothing is read from the device: a captured step serves any
batch of its size.

What is kept of a page depends on the keys up to its end alone. Sequences share a page only if they agree up to its
end, so what one of them keeps there is right for all. Two things make it so:

- A summary depends on its block, on half a block before it, and on the mean of the first F keys (at most a chunk),
  which a page among those first keys does not determine: two texts may share it and differ in the next. So the summary
  of block m is kept with block m + F / size, whose page ends after the first F keys.
- The mean itself is spread over the pages after the first F keys, a few numbers in each, since every text that has
  such a mean has those pages.

When a page may be read, it has been written. The summary of block m is made when block m + F / size is complete, at
most a chunk after block m. A query chooses from chunks that lie more than `near` (at least 1) before its own, and so
comes later; and it comes after the pages that hold the mean (`Layout`).

When a page is written again, so is what is kept of it. A page that a server gives to another sequence holds none of
its keys at first. Whoever writes the last key of a block must call `Steps.summarize` for it before the next step; a
block without its last key is never read. What fills pages in another way (a transfer from another machine) leaves the
summaries of an earlier text behind: `serve.checks` refuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float32
from torch import Tensor

from rpe3d.attention.chosen import WIDEST, law_refusal
from rpe3d.attention.chosen.bare import _kept_centre, _mean, _store3, _summary
from rpe3d.attention.chosen.search import TOGETHER
from rpe3d.attention.chosen.select import Selection
from rpe3d.attention.chosen.sizes import PROGRAMS, turns
from rpe3d.attention.chosen.step import Launches
from rpe3d.attention.chosen.vectors import _halves
from rpe3d.attention.decode.loop import _cdiv, _processors
from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.rotation.launch import Bound, Launcher

SPREAD = 32
"""Pages that hold the mean of the first keys, at most."""
ALIGNED = 128
"""Bytes of which a page takes a multiple: vLLM's own kernels read pages in pieces of 16."""
WAVES = 8
"""Programs that score, per multiprocessor: more let one long sequence among many use more of a GPU."""


class Kept(NamedTuple):
    """What is kept of the pages of one layer; page numbers are those of the cache, which may hold both (`Layout`)."""

    summaries: BFloat16[Tensor, "pages blocks g d"]
    centres: Float32[Tensor, "pages g each"]


@dataclass(frozen=True)
class Layout:
    """Where summaries and the mean of the first keys are kept, by page."""

    page: int
    size: int
    first: int
    """Keys of which the mean is taken."""
    start: int
    """The first page that holds numbers of that mean."""
    spread: int
    """How many do."""
    each: int
    """Numbers of the mean in one page, of each key head."""

    @classmethod
    def of(cls, law: Law, page: int, dim: int) -> Layout:
        """Return the layout for a law that nothing refuses."""
        selection = Selection(law, 16, torch.device("cpu"))
        first = min(selection.choice.centre, selection.region.unit)
        start = first // page
        spread = min(SPREAD, (selection.near + 1) * selection.region.unit // page - start)
        return cls(page, selection.choice.size, first, start, spread, _cdiv(dim, max(1, spread)))

    @property
    def blocks(self) -> int:
        """Return the blocks of a page."""
        return self.page // self.size

    @property
    def edge(self) -> int:
        """Return the position before which the mean is not kept yet."""
        return (self.start + self.spread) * self.page

    def shapes(self, groups: int, dim: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Return the shapes of what is kept of one page: summaries in bfloat16, the mean in float32."""
        return (self.blocks, groups, dim), (groups, self.each)

    def nbytes(self, groups: int, dim: int) -> int:
        """Return the bytes that one page of one layer takes."""
        return 2 * self.blocks * groups * dim + 4 * groups * self.each

    def padded(self, cache: int, groups: int, dim: int) -> int:
        """Return the bytes of a page that holds `cache` bytes of keys and values, and what is kept behind them."""
        return _cdiv(_aligned(cache) + self.nbytes(groups, dim), ALIGNED) * ALIGNED

    def behind(self, cache: Tensor, nbytes: int, groups: int, dim: int) -> Kept:
        """Return what is kept behind the keys and values of every page, which take so many bytes of it."""
        whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        summaries, centres = self.shapes(groups, dim)
        start = cache.storage_offset() * cache.element_size() + _aligned(nbytes)
        stride, pages = cache.stride(0) * cache.element_size(), cache.shape[0]
        kept = []
        for shape, dtype, size in ((summaries, torch.bfloat16, 2), (centres, torch.float32, 4)):
            inner = [1]
            for n in shape[:0:-1]:
                inner.insert(0, inner[0] * n)
            room = whole.view(dtype) if whole.numel() % size == 0 else whole[: -(whole.numel() % size)].view(dtype)
            kept.append(room.as_strided((pages, *shape), (stride // size, *inner), start // size))
            start += size * inner[0] * shape[0]
        return Kept(*kept)

    def empty(self, pages: int, groups: int, dim: int, device: torch.device) -> Kept:
        """Return room for so many pages, apart from the cache."""
        summaries, centres = self.shapes(groups, dim)
        return Kept(
            torch.empty(pages, *summaries, dtype=torch.bfloat16, device=device),
            torch.empty(pages, *centres, dtype=torch.float32, device=device),
        )


def _aligned(nbytes: int) -> int:
    return _cdiv(nbytes, 16) * 16


def refusal(law: Law, page: int, dim: int) -> str | None:
    """Say why the kernels do not run a law over pages of so many tokens; None if they do."""
    if not law.chooses:
        return "no query has a choice of keys"
    if reason := law_refusal(law):
        return reason
    if dim > WIDEST:
        return f"heads have {dim} dimensions, more than {WIDEST}"
    selection = Selection(law, 16, torch.device("cpu"))
    if page % selection.choice.size:
        return f"pages of {page} tokens are not whole blocks of {selection.choice.size} keys"
    if selection.near < 1 or Layout.of(law, page, dim).spread < 1:
        return f"pages of {page} tokens are longer than what a query sees without a choice"
    return None


@triton.jit
@no_type_check
def _is_written(slots, token, pages, p, PAGE: tl.constexpr):
    """Say whether a token's key was written, and to the page where its position belongs; padding has slot -1."""
    slot = tl.load(slots + token).to(tl.int64)
    return (slot >= 0) & (slot // PAGE == tl.load(pages + p // PAGE).to(tl.int64))


@triton.jit
@no_type_check
def _keep_centre(centres, pages, x, place, live, centre_p, group, START: tl.constexpr, EACH: tl.constexpr):
    """Write numbers of the mean of the first keys to the pages that hold them: see `_kept_centre`."""
    page = tl.load(pages + START + place // EACH, mask=live, other=0).to(tl.int64)
    tl.store(centres + page * centre_p + group * EACH + place % EACH, x, mask=live)


@triton.jit(
    do_not_specialize=["pages_b", "starts_b", "lengths_b"],
    do_not_specialize_on_alignment=["pages", "starts", "lengths", "slots"],
)
@no_type_check
def _written_kernel(
    k, summaries, centres, pages, starts, lengths, slots, pages_b, starts_b, lengths_b, table, scaling,
    k_p, k_h, k_s, summary_p, centre_p,
    CENTRE: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, LEAD: tl.constexpr, FIRST: tl.constexpr,
    START: tl.constexpr, SPREAD: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Keep what the keys written last make known of one key head of one sequence.

    Its new tokens are those from starts[b] on, and its last of lengths[b]. With CENTRE, the mean of the first keys of
    a sequence that fills the pages which hold it; else the summaries of blocks, a block at a time, and as long as a
    sequence has not outgrown those pages their part of the mean.

    Of two sequences that a server computes in one batch, the second may begin with pages of the first. It may then
    take the mean that a launch with CENTRE has made of the first, which therefore comes before.
    """
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    EDGE: tl.constexpr = (START + SPREAD) * PAGE
    LATER: tl.constexpr = FIRST // SIZE
    stop = tl.load(lengths + b * lengths_b).to(tl.int32)
    token = tl.load(starts + b * starts_b).to(tl.int32)
    begin = stop - (tl.load(starts + (b + 1) * starts_b).to(tl.int32) - token)
    pages += b * pages_b
    k += group * k_h
    one, two, rest, pairs, others = _halves(DIM, PAIRS, HALF, REST, INTERLEAVED)
    turn = tl.load(table + tl.arange(0, HALF)[None, :], mask=pairs, other=0.0)
    if CENTRE:
        if (begin < EDGE) & (stop >= EDGE):  # noqa: SIM102 (the second question reads what the first says is there)
            if _is_written(slots, token + EDGE - 1 - begin, pages, EDGE - 1, PAGE):
                x, y, z = _mean(
                    k, k_p, k_s, pages, 0, FIRST, turn, scaling, one, two, rest, pairs, others,
                    HALF, REST, ROTATED, PAGE,
                )  # fmt: skip
                _keep_centre(centres, pages, x, one, pairs, centre_p, group, START, EACH)
                _keep_centre(centres, pages, y, two, pairs, centre_p, group, START, EACH)
                if not ROTATED:
                    _keep_centre(centres, pages, z, rest, others, centre_p, group, START, EACH)
    else:
        n = tl.maximum(begin // SIZE, LATER) + tl.program_id(0)
        if n < stop // SIZE:
            if stop > EDGE:
                middle_x = _kept_centre(centres, pages, one, pairs, centre_p, group, START, EACH)
                middle_y = _kept_centre(centres, pages, two, pairs, centre_p, group, START, EACH)
                middle_z = tl.zeros_like(middle_x)
                if not ROTATED:
                    middle_z = _kept_centre(centres, pages, rest, others, centre_p, group, START, EACH)
            else:
                middle_x, middle_y, middle_z = _mean(
                    k, k_p, k_s, pages, 0, FIRST, turn, scaling, one, two, rest, pairs, others,
                    HALF, REST, ROTATED, PAGE,
                )  # fmt: skip
            for m in range(n, stop // SIZE, tl.num_programs(0)):
                last = (m + 1) * SIZE - 1
                if _is_written(slots, token + last - begin, pages, last, PAGE):
                    if stop <= EDGE:
                        own = last // PAGE - START
                        mine = pairs & (one // EACH == own)
                        _keep_centre(centres, pages, middle_x, one, mine, centre_p, group, START, EACH)
                        mine = pairs & (two // EACH == own)
                        _keep_centre(centres, pages, middle_y, two, mine, centre_p, group, START, EACH)
                        if not ROTATED:
                            mine = others & (rest // EACH == own)
                            _keep_centre(centres, pages, middle_z, rest, mine, centre_p, group, START, EACH)
                    block = m - LATER
                    x, y, z = _mean(
                        k, k_p, k_s, pages, tl.maximum(block * SIZE - LEAD, 0), (block + 1) * SIZE, turn, scaling,
                        one, two, rest, pairs, others, HALF, REST, ROTATED, PAGE,
                    )  # fmt: skip
                    x, y, z = _summary(x, y, z, middle_x, middle_y, middle_z, ROTATED, WIDEN)
                    page = tl.load(pages + last // PAGE).to(tl.int64)
                    within = (m % (PAGE // SIZE)) * tl.num_programs(1) + group
                    _store3(
                        summaries + page * summary_p + within * DIM, x, y, z, True, one, two, rest, pairs, others,
                        ROTATED,
                    )  # fmt: skip


_written = Launcher(_written_kernel)
INTERPRETED = _written.interpreted


class Steps:
    """Decoding steps over one paged cache, for the vectors of any layer and for batches of any size.

    longest: tokens of a sequence, at most; page: tokens of a page. What launches need besides vectors is made once and
    kept, and all launches share it since they run one after the other: a CUDA graph that captured them stays valid.
    """

    def __init__(
        self,
        law: Law,
        device: torch.device,
        *,
        sequences: int,
        heads: int,
        groups: int,
        longest: int,
        page: int,
        splits: int | None = None,
        waves: int = WAVES,
    ) -> None:
        dim = law.rotary.head_dim
        if reason := refusal(law, page, dim):
            raise ConfigError(
                f"the paged kernels cannot run {law.name}: {reason}", "gather the keys and call `attention`"
            )
        device = torch.empty(0, device=device).device  # with its number, as tables are kept by it
        self.law, self.device, self.longest, self.splits, self.waves = law, device, longest, splits, waves
        self.heads, self.groups, self.layout = heads, groups, Layout.of(law, page, dim)
        self.selection = Selection(law, 16, device)
        turns(law, longest // self.selection.region.unit + 1, device)  # before a graph is captured
        self.room = torch.empty(
            room(law, sequences, heads, groups, longest, device, splits), dtype=torch.uint8, device=device
        )
        self.arrivals = torch.zeros(sequences * groups, dtype=torch.int32, device=device)
        self._steps: dict[tuple[object, ...], _Step] = {}
        self._updates: dict[tuple[object, ...], tuple[Bound, Bound]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        kept: Kept,
        *,
        pages: Tensor,
        lengths: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from the last token of every sequence to all of it.

        Write the output to `out` [b, h, 1, d]; return the log-sum-exp [b, h, 1], valid until the next call. q is
        [b, h, 1, d]; k and v are the cache [pages, tokens per page, g, d], turned by stock RoPE, and `kept` what
        `summarize` has made of its pages. `pages` [b, n] holds the page numbers of every sequence and `lengths` [b]
        its tokens, that of the query included (0 for a row that is not in use).
        """
        strides = (q.stride(), k.stride(), v.stride(), out.stride(), lengths.stride())
        key = (q.shape, k.shape[1:], *strides, q.dtype, scale)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = _Step(self, q, k, v, out, lengths, scale)
        return found(q, k, v, out, kept, pages, lengths, None if sinks is None else sinks.contiguous())

    def summarize(
        self, k: Tensor, kept: Kept, *, pages: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, most: int
    ) -> None:
        """Keep summaries of the blocks whose last keys have just been written to the cache k.

        Sequence b has lengths[b] tokens; the last of them are the new ones, from starts[b] to starts[b + 1] of the
        batch, `most` at most. `slots` says where each was written, as page · tokens per page + place, or -1.
        """
        strides = (k.stride(), kept.summaries.stride(), kept.centres.stride())
        sequences, programs = starts.shape[0] - 1, 1 if most == 1 else min(SPREAD, most // self.layout.size + 1)
        key = (*strides, k.dtype, sequences, programs)
        found = self._updates.get(key)
        if found is None:
            found = self._updates[key] = self._bind(k, kept, sequences, programs)
        given = (k, *kept, pages, starts, lengths, slots, pages.stride(0), starts.stride(0), lengths.stride(0))
        centre, blocks = found
        if most > 1:  # with one new token each, none that begins with pages of another completes a block
            centre(*given)
        blocks(*given)

    def _bind(self, k: Tensor, kept: Kept, sequences: int, programs: int) -> tuple[Bound, Bound]:
        choice, layout = self.selection.choice, self.layout
        arguments = (
            self.selection.table, 1 / self.law.attention_scaling, k.stride(0), k.stride(2), k.stride(1),
            kept.summaries.stride(0), kept.centres.stride(0),
        )  # fmt: skip
        constants = {
            "PAGE": layout.page, "SIZE": layout.size, "LEAD": choice.lead, "FIRST": layout.first,
            "START": layout.start, "SPREAD": layout.spread, "EACH": layout.each,
            **self.selection.vectors(k.shape[3]), "WIDEN": INTERPRETED,
        }  # fmt: skip
        centre, blocks = (
            _written.bind(self.device, (n, k.shape[2], sequences), arguments, given | constants, {"num_warps": 4})
            for n, given in ((1, {"CENTRE": True}), (programs, {"CENTRE": False}))
        )
        return centre, blocks


class _Step:
    """The launches of a step for batches of one shape, and their room."""

    def __init__(self, steps: Steps, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor, scale: float):
        b, h, t, d = q.shape
        g, page = k.shape[2], k.shape[1]
        if t != 1 or page != steps.layout.page or any(x.stride(-1) != 1 for x in (q, k, v, out)):
            raise ConfigError(
                "the paged kernels take one query per sequence, and vectors that are contiguous",
                f"pass steps over pages of {steps.layout.page} tokens",
            )
        layout = steps.layout
        paged = {
            "PAGE": page, "LATER": layout.first // layout.size, "START": layout.start, "EACH": layout.each,
        }  # fmt: skip
        places = (None, None, 0, 0, lengths.stride(0), 0, 0, 0)
        keys, values = k.transpose(1, 2), v.transpose(1, 2)  # strides of a page, a head and a key
        self.made = made = Launches(
            steps.law, q, keys, values, out, places, groups=g, keys=steps.longest, scale=scale, splits=steps.splits,
            paged=paged, waves=steps.waves,
        )  # fmt: skip
        self.arrivals = steps.arrivals[: b * g]
        if _nbytes(made, b, h, g, d) > steps.room.numel() or b * g > steps.arrivals.numel():
            raise ConfigError("a step is larger than announced", "raise `sequences`")
        self.results = _carve(steps.room, made, b, h, g, d)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        kept: Kept,
        pages: Tensor,
        lengths: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        made, (levels, highest, picked, lists, counts, lse, parts, logs) = self.made, self.results
        by_page = (kept.summaries.stride(0), kept.centres.stride(0), pages, pages.stride(0))
        made.score(q, k, levels, highest, kept.summaries, None, kept.centres, None, 0, *by_page, made.table, lengths)
        made.choose(levels, highest, picked, counts, lists, None, lengths)
        arrivals = None if parts is None else self.arrivals
        made.attend(
            q, k, v, out, lse, parts, logs, arrivals, sinks, picked, counts, pages, pages.stride(0), made.turns, lengths
        )
        log: Tensor = lse.transpose(1, 2)
        return log


def _sizes(made: Launches, b: int, h: int, g: int, d: int) -> list[tuple[torch.dtype, int]]:
    """Return types and numbers of what a step writes besides its output."""
    rows, split = b * g, made.splits if made.splits > 1 else 0
    return [
        (torch.int16, rows * made.stride), (torch.int16, rows * made.stride // made.together),
        (torch.int32, rows * made.most), (torch.int32, rows * made.most), (torch.int32, rows),
        (torch.float32, b * h), (torch.float32, b * h * split * d), (torch.float32, b * h * split),
    ]  # fmt: skip


def _nbytes(made: Launches, b: int, h: int, g: int, d: int) -> int:
    return sum(_aligned(dtype.itemsize * n) for dtype, n in _sizes(made, b, h, g, d))


def _carve(room: Tensor, made: Launches, b: int, h: int, g: int, d: int) -> list[Any]:
    found: list[Any] = []
    start = 0
    for dtype, n in _sizes(made, b, h, g, d):
        found.append(room[start : start + dtype.itemsize * n].view(dtype) if n else None)
        start += _aligned(dtype.itemsize * n)
    found[5] = found[5].view(b, 1, h)
    return found


def room(
    law: Law, sequences: int, heads: int, groups: int, longest: int, device: torch.device, splits: int | None = None
) -> int:
    """Return the bytes that steps of at most so many sequences write besides their output."""
    selection = Selection(law, 16, torch.device("cpu"))
    stride = _cdiv(max(1, selection.choosable(longest - 1)), 128) * 128
    rows, dim = sequences * groups, law.rotary.head_dim
    parts = PROGRAMS * _processors(device) * (heads // groups) if splits is None else sequences * heads * splits
    numbers = rows * (2 * selection.choice.most + 1) + sequences * heads + parts * (dim + 1)
    together = math.gcd(TOGETHER, selection.region.unit // selection.choice.size)
    return 2 * rows * (stride + stride // together) + 4 * numbers + 8 * 16
