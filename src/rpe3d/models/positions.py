"""Find where the tokens of a forward pass stand, from the cache's offset, the position ids and the padding mask.

A forward pass brings t queries, in slots offset, offset + 1 ... of the cache, and is passed the keys of all slots so
far. The queries have position ids. Those of earlier forward passes were not kept, but positions are consecutive within
a text. They count in one of two ways, which differ only if padding lies between tokens: from token to token, as in
`generate`, or from slot to slot, as in a model that gets a mask and no position ids. The queries show which way it is.
Positions that count in neither way, or that are ambiguous, are refused.

A text whose first token has the number of its slot as its position is left-padded and counted by a model that got no
position ids. Scores under RoPE do not depend on where a text begins, so its tokens are placed as they are alone: from
position 0 on. Position ids that happen to be the numbers of slots cannot be told from these, and mean the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from rpe3d.attention import Shared
from rpe3d.attention.decode import MOST_QUERIES
from rpe3d.attention.problem import Placed, Run
from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.geometry.region import STOCK
from rpe3d.rotation import cos_sin, rotate

TOKEN, HERE = 1, 2
"""Bits of the layers' mask, one byte per slot: the slot holds a token; the slot belongs to this forward pass."""

_last = threading.local()
_MOST_STARTS = 4096
_lock = threading.Lock()
_starts: dict[int, None] = {0: None}
"""Positions at which texts have begun, newest last: if a text does not begin at 0, only its first forward shows it.
That positions are consecutive is taken on trust only for texts that begin at slot 0 or position 0."""


def layer_mask(
    mask: Bool[Tensor, "b n"] | None, b: int, t: int, s: int, offset: Any, device: Any
) -> UInt8[Tensor, "b 1 1 s"]:
    """Return the mask for the layers: `coded`, in four dimensions, which transformers passes on untouched."""
    return coded(mask, b, t, s, offset, device)[:, None, None]


def coded(mask: Bool[Tensor, "b n"] | None, b: int, t: int, s: int, offset: Any, device: Any) -> UInt8[Tensor, "b s"]:
    """Mark which of `s` slots hold tokens, and which are the `t` slots from `offset` on."""
    slots = torch.arange(s, device=device)
    here = (slots >= offset) & (slots < offset + t)
    if mask is None:
        whole: Tensor = torch.where(here, HERE | TOKEN, (slots < offset) * TOKEN).to(torch.uint8)
        return whole.expand(b, s)
    known = torch.nn.functional.pad(mask, (0, s - mask.shape[1])) if mask.shape[1] < s else mask[:, :s]
    tokens = known & (slots < offset + t)  # a mask as long as a static cache says nothing of slots that are still empty
    code: Tensor = tokens.to(torch.uint8) * TOKEN + here.to(torch.uint8) * HERE
    return code


@dataclass(frozen=True)
class Layout:
    """Arguments of `attention`, and the vectors that they describe."""

    queries: Tensor | range | Placed
    keys: range | Placed
    query_mask: Tensor | None
    key_mask: Tensor | None
    keys_used: int
    """Number of slots used, from the first on: a static cache has more."""
    query_slots: Int[Tensor, "b n"] | None = None
    """Indices of the queries among those given, tokens first; None: as given."""
    key_slots: Int[Tensor, "b n"] | None = None
    end: int | None = None
    """Position after the last token; None in a graph."""
    sound: Tensor | None = None
    """In a graph, which cannot refuse: whether the keys are where `keys` says. If False, the output is NaN."""
    moved: Int[Tensor, " b"] | None = None
    """Number of positions by which each row is placed earlier than its vectors were rotated; None if none is, and in a
    graph."""
    from_zero: Tensor | None = None
    """In a graph: whether the tokens of every row are at 0, 1, 2 ..., as a choice of keys requires."""
    shared: Shared | None = None
    """Attention for the layers of this forward pass; None in a graph."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        return {
            "query_positions": self.queries,
            "key_positions": self.keys,
            "query_mask": self.query_mask,
            "key_mask": self.key_mask,
            "rotated": True,
        }

    def gathered(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vectors that `arguments` describes."""
        if self.key_slots is not None:
            key, value = (_picked(x, self.key_slots) for x in (key, value))
        elif self.keys_used < key.shape[2]:
            key, value = key[:, :, : self.keys_used], value[:, :, : self.keys_used]
        return query if self.query_slots is None else _picked(query, self.query_slots), key, value

    def turned_back(self, x: Tensor, law: Law) -> Tensor:
        """Rotate vectors [b, h, n, d] from the positions that they were given to those where they are placed.

        Scores need no such rotation, but a choice of keys rounds vectors without their positions.
        """
        if self.moved is None:
            return x
        theta = law.kept(("frequencies", x.device), lambda: law.frequencies().to(x.device))
        angles = -STOCK.angle(self.moved.to(x.device)[:, None].expand(-1, x.shape[2]), theta)
        cos, sin = cos_sin(angles, dtype=torch.promote_types(x.dtype, torch.float32))
        return rotate(x, None, cos, sin, interleaved=law.rotary.interleaved)[0]

    def returned(self, out: Tensor, chosen: bool = False) -> Tensor:
        """Return the output in the order of the given queries; `chosen` is for a law that chooses far keys."""
        if self.query_slots is not None:  # all of them, in another order
            index = self.query_slots[:, None, :, None].expand_as(out)
            out = torch.zeros_like(out).scatter(2, index, out)
        if self.sound is None:
            return out
        sound = self.sound & self.from_zero if chosen and self.from_zero is not None else self.sound
        return torch.where(sound, out, torch.nan)


def layout(
    query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None, layer: int, model: Any = None
) -> Layout:
    """Return the layout of a forward pass, which its first layer makes and the other layers share.

    `model` is any object that the layers of one model share. Their indices increase within a forward pass, except when
    checkpointing recomputes layers for their gradients.
    """
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if torch.compiler.is_compiling():
        return _layout(*shape, mask, position_ids)
    state = (shape, id(model), _queue(query), _changes(mask), _changes(position_ids))
    made = getattr(_last, "made", None)
    if made is not None and made[0] is mask and made[1] is position_ids and made[2] == state:
        kept: Layout = made[4]
        if layer > made[3] or (torch.is_grad_enabled() and None not in state):  # or runs again for its gradients
            _last.made = (mask, position_ids, state, layer, kept)
            return kept
    result = _layout(*shape, mask, position_ids)
    _last.made = (mask, position_ids, state, layer, result)
    return result


def _queue(x: Tensor) -> tuple[int, bool] | tuple[()]:
    """Return the stream that operations on a tensor go to, and whether they become part of a CUDA graph.

    Layers on different streams must not share memory. What was read from a device is not part of a graph, nor the
    reverse.
    """
    return (torch.cuda.current_stream(x.device).stream_id, capturing(x)) if x.is_cuda else ()


def _changes(x: Tensor | None) -> int | None:
    """Return how often a tensor was changed in place, or None in inference mode, where that is not counted.

    In inference mode, only consecutive layers count as one forward pass.
    """
    if x is None:
        return 0
    return None if x.is_inference() else x._version


def _layout(b: int, t: int, s: int, mask: Tensor | None, position_ids: Tensor | None) -> Layout:
    if position_ids is None:
        raise ConfigError("this model passes no position ids to its attention", "rpe3d cannot extend it")
    if mask is not None:
        if mask.dtype != torch.uint8 or mask.shape != (b, 1, 1, s):
            raise ConfigError(
                f"the attention mask is {tuple(mask.shape)} {mask.dtype}, but a law is causal and takes only padding",
                "pass the padding mask [batch, tokens]",
            )
        mask = mask[:, 0, 0]
    positions = position_ids.expand(b, t)
    if torch.compiler.is_compiling() or capturing(positions):
        return _in_a_graph(s, mask, positions)
    if mask is None:
        rows = _unpadded(position_ids, s)
    else:
        # A prompt is looked at on the host, all of it at once; a step asks its device for few numbers.
        here = (x.cpu() if t > MOST_QUERIES or s == t else x for x in (mask, positions))
        rows = [Row(*numbers) for numbers in torch.cat(_facts(*here), 1).tolist()]
    for row in rows:
        row.note()
    return _arranged(b, mask, positions, rows * b if len(rows) < b else rows)


def capturing(x: Tensor) -> bool:
    """Return whether operations on a tensor become part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _unpadded(positions: Int[Tensor, "b t"], s: int) -> list[Row]:
    """Return `_facts` for rows in which every slot holds a token; position ids of one row stand for all."""
    t = positions.shape[1]
    if t <= MOST_QUERIES:  # a step compares numbers sooner than tensors
        given = positions.tolist()
        steady = [row == list(range(row[0], row[0] + t)) for row in given]
        starts = [row[0] - (s - t) for row in given]
    else:
        positions = positions.cpu()
        steady = (positions - positions[:, :1] == torch.arange(t, device="cpu")).all(1).tolist()
        starts = (positions[:, 0] - (s - t)).tolist()
    every = {
        "offset": s - t,
        "first_query": 0,
        "last_query": t - 1,
        "queries": t,
        "begin": 0,
        "last": s - 1,
        "tokens": s,
    }
    return [
        Row(**every, slot_start=start, token_start=start, by_slot=even, by_token=even)
        for start, even in zip(starts, steady, strict=True)
    ]


def _in_a_graph(s: int, mask: Tensor | None, positions: Tensor) -> Layout:
    """Place keys from slot to slot, as the first query has it; the device checks whether they do count that way."""
    b, t = positions.shape
    coding = coded(None, b, t, s, s - t, positions.device) if mask is None else mask
    row = _facts(coding, positions)
    first, fresh = row.slot_start + row.begin, row.begin == row.offset + row.first_query
    gapless = row.last - row.begin + 1 == row.tokens
    begun = (row.slot_start == 0) | ((first == 0) & gapless) | ((first >= 0) & fresh)  # `_starts` is not at hand
    sound = ((row.by_slot & begun) | (row.queries == 0)).all()
    moved = torch.where(row.slot_start == 0, row.begin, 0)
    from_zero = (((first == moved) & gapless) | (row.queries == 0)).all()
    slots = torch.arange(s, device=positions.device)
    starts = row.slot_start - moved
    keys = Placed((starts + slots).clamp(min=0), starts=starts[:, 0])
    positions = (positions - moved).clamp(min=0)
    if mask is None:
        return Layout(positions, keys, None, None, s, sound=sound, from_zero=from_zero)
    tokens = coding % HERE == TOKEN
    here = tokens.gather(1, row.offset + slots[:t])
    return Layout(positions, keys, here, tokens, s, sound=sound, from_zero=from_zero)


class Facts(NamedTuple):
    """Facts about rows, as columns [b, 1]. Slots count from the first of the cache, queries from their own first."""

    offset: Any
    """Slot of the first query."""
    first_query: Any
    last_query: Any
    queries: Any
    """Number of queries that are tokens; with none, the other numbers about queries are meaningless."""
    begin: Any
    """Slot of the first token."""
    last: Any
    tokens: Any
    slot_start: Any
    """Position of slot 0 if positions count from slot to slot."""
    token_start: Any
    """Position of the first token if positions count from token to token."""
    by_slot: Any
    """Whether all queries that are tokens count from slot to slot."""
    by_token: Any


def _facts(coding: UInt8[Tensor, "b s"], positions: Int[Tensor, "b t"]) -> Facts:
    t = positions.shape[1]
    slots = torch.arange(coding.shape[1], device=coding.device)
    tokens = coding % HERE == TOKEN
    offset = (coding >= HERE).int().argmax(1, keepdim=True)
    rows = offset + slots[:t]
    here, count = tokens.gather(1, rows), tokens.cumsum(1)
    before = count.gather(1, rows) - 1
    first = here.int().argmax(1, keepdim=True)
    at = positions.gather(1, first)
    slot_start, token_start = at - rows.gather(1, first), at - before.gather(1, first)
    return Facts(
        offset=offset,
        first_query=first,
        last_query=(here * slots[:t]).amax(1, keepdim=True),
        queries=here.sum(1, keepdim=True),
        begin=tokens.int().argmax(1, keepdim=True),
        last=(tokens * slots).amax(1, keepdim=True),
        tokens=count[:, -1:],
        slot_start=slot_start,
        token_start=token_start,
        by_slot=((positions - rows == slot_start) | ~here).all(1, keepdim=True),
        by_token=((positions - before == token_start) | ~here).all(1, keepdim=True),
    )


class Row(Facts):
    """The facts of one sequence as numbers on the host, and what follows from them."""

    @property
    def gapless(self) -> bool:
        """Whether there is no padding between tokens, so that both ways of counting agree."""
        return bool(self.last - self.begin + 1 == self.tokens)

    @property
    def fresh(self) -> bool:
        """Whether there is no token from an earlier forward pass."""
        return bool(self.begin == self.offset + self.first_query)

    @cached_property
    def closed_up(self) -> bool:
        """Whether positions skip the padding between tokens; refuses if that cannot be known."""
        if not self.queries:
            return False
        slots = self.by_slot and self._begun(self.slot_start + self.begin, self.slot_start == 0)
        if self.gapless:
            ways = [False] if slots else []
        else:
            tokens = self.by_token and self._begun(self.token_start, False)
            ways = [way for way, possible in ((False, slots), (True, tokens)) if possible]
        if len(ways) == 1:
            return ways[0]
        if ways:
            raise ConfigError(
                f"the position ids of a row with padding between its {self.tokens} tokens are ambiguous",
                "count its tokens from 0 (attention_mask.cumsum(1) - 1)",
            )
        if self.by_slot or self.by_token:
            raise ConfigError(
                f"position ids do not continue from the {self.tokens - self.queries} cached tokens of a row",
                "continue the positions in the cache, which begin at 0 unless a forward pass has shown otherwise",
            )
        raise ConfigError(
            "position ids restart or skip within a row",
            "pass one sequence per row, with its padding mask and consecutive positions",
        )

    def _begun(self, position: int, sure: bool) -> bool:
        """Return whether a first token can be there: at 0, where a text was seen to begin, or where it begins now."""
        return position >= 0 and (sure or self.fresh or position in _starts)

    @property
    def given_start(self) -> int:
        """Position that the first token was given."""
        return int(self.token_start if self.closed_up else self.slot_start + self.begin)

    @property
    def moved(self) -> int:
        """Number of positions by which the text is placed earlier than given: the padding before it, if counted."""
        return int(self.begin) if self.queries and self.given_start == self.begin else 0

    @property
    def start(self) -> int:
        """Position of slot 0, or of the first token if padding is skipped."""
        return int(self.token_start if self.closed_up else self.slot_start) - self.moved

    def note(self) -> None:
        """Remember the beginning of a text whose slot 0 is not position 0."""
        if self.queries and self.fresh and self.slot_start:
            with _lock:
                _starts.pop(self.given_start, None)
                _starts[self.given_start] = None
                if len(_starts) > _MOST_STARTS:
                    del _starts[next(start for start in _starts if start)]

    def query_run(self) -> Run | None:
        """Return the slots and positions of the queries; None if their slots are not consecutive."""
        if not self.queries:
            return slice(0, 0), range(0)
        first = 0 if self.closed_up else self.first_query
        if not self.closed_up and self.last_query - first + 1 != self.queries:
            return None
        position = self.start + (self.tokens - self.queries if self.closed_up else self.offset + first)
        return slice(first, first + self.queries), range(position, position + self.queries)

    def key_run(self) -> Run | None:
        """Return the slots and positions of the keys; None if their slots are not consecutive."""
        if not self.queries:
            return slice(0, 0), range(0)
        if self.closed_up:
            return slice(0, self.tokens), range(self.start, self.start + self.tokens)
        if not self.gapless:
            return None
        return slice(self.begin, self.last + 1), range(self.start + self.begin, self.start + self.last + 1)


def _arranged(b: int, mask: Tensor | None, positions: Tensor, rows: list[Row]) -> Layout:
    """Arrange sequences as runs of tokens: one run for all if they share it, else one each."""
    t, row, device = positions.shape[1], rows[0], positions.device
    used = row.offset + t
    if all(x == row for x in rows) and row.queries == t and row.tokens == used:
        places = range(row.start, row.start + used)
        queries = places[row.offset :]
        shared = Shared(query_positions=queries, key_positions=places, rotated=True)
        return Layout(queries, places, None, None, used, end=places.stop, shared=shared)
    closed = [x.closed_up for x in rows]
    tokens = torch.ones(b, used, dtype=torch.bool, device=device) if mask is None else (mask % HERE == TOKEN)[:, :used]
    here = tokens[:, row.offset :]
    query_slots = key_slots = None
    if any(closed):
        up = torch.tensor(closed, device=device)[:, None]
        longest = max(x.tokens if x.closed_up else used for x in rows)
        key_slots = _tokens_first(tokens, up)[:, :longest]
        query_slots = _tokens_first(here, up)
        tokens, here, positions = (
            x.gather(1, i) for x, i in ((tokens, key_slots), (here, query_slots), (positions, query_slots))
        )
    moved = torch.tensor([x.moved for x in rows], device=device) if any(x.moved for x in rows) else None
    if moved is not None:
        positions = (positions - moved[:, None]).clamp(min=0)
    starts = torch.tensor([x.start for x in rows], device=device)
    keys = (starts[:, None] + torch.arange(tokens.shape[1], device=device)).clamp(min=0)
    result = Layout(
        Placed(positions, tuple(x.query_run() for x in rows)),
        Placed(keys, tuple(x.key_run() for x in rows), starts),
        here,
        tokens,
        used,
        query_slots,
        key_slots,
        end=max((run[1].stop for row in rows if (run := row.key_run()) is not None), default=None),
        moved=moved,
    )
    return replace(result, shared=Shared(**result.arguments))


def _tokens_first(tokens: Bool[Tensor, "b n"], up: Bool[Tensor, "b 1"]) -> Int[Tensor, "b n"]:
    """Put the tokens of some rows before their padding, in order; the other rows stay as they are."""
    return (~tokens & up).to(torch.uint8).argsort(dim=1, stable=True)


def _picked(x: Tensor, slots: Int[Tensor, "b n"]) -> Tensor:
    return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
