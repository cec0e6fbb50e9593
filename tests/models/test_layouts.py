"""Masks, caches, pieces, offsets and batches at random: every row is what it is alone, unpadded, or is refused.

The oracle knows where tokens stand because it put them there: it runs each row by itself, in one forward without a
cache, with the specification of attention in the place of the registered function.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

import rpe3d
from rpe3d import ConfigError
from rpe3d.attention import attention
from rpe3d.geometry import LAWS
from rpe3d.models.carried import module_law
from rpe3d.models.positions import _starts
from tiny_models import make

LAW = {"chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}
OWN = {"dpe": {"scales": (3, 16, 1, 11)}, "string": {"context": 124}}
STEADY = [name for name, law in LAWS.items() if not law.grows]  # whose cached keys would be of earlier frequencies
ORACLE = "oracle"
CASES = 6


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


@dataclass
class Row:
    """One text: its tokens so far, and where each stands."""

    kind: str
    start: int
    ids: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Whether each slot holds a token."""

    def push(self, pattern, draw):
        """A piece: ids and positions of its slots."""
        ids, positions = [], []
        for token in pattern:
            position = self.start + (len(self.ids) if self.kind == "token" else len(self.slots))
            ids.append(draw.randrange(3, 97) if token else 0)
            positions.append(position if token or self.kind == "slot" else draw.choice([0, 1, position]))
            self.slots.append(int(token))
            if token:
                self.ids.append(ids[-1])
                self.at.append(position)
        return ids, positions

    def crop(self, slots):
        del self.slots[slots:]
        del self.ids[sum(self.slots) :], self.at[sum(self.slots) :]

    @property
    def plain(self):
        """Whether positions say of themselves where everything stands: no gap, or counted from 0."""
        held = [n for n, token in enumerate(self.slots) if token]
        return not held or held[-1] - held[0] + 1 == len(held) or self.start == 0


def alone(model, row):
    """The logits of a row by the specification."""

    def attend(module, query, key, value, mask, scaling=None, position_ids=None, softcap=None, s_aux=None, **_):
        if getattr(module, "sliding_window", None) is not None:
            raise NotImplementedError
        out, _ = attention(query, key, value, module_law(module), query_positions=at, key_positions=at, scale=scaling,
                           softcap=softcap, sinks=s_aux, rotated=True, impl="reference")  # fmt: skip
        return out.transpose(1, 2), None

    AttentionInterface.register(ORACLE, attend)
    AttentionMaskInterface.register(ORACLE, lambda *_, **__: None)
    padding = row.slots.index(1) if row.at[0] == row.slots.index(1) else 0  # counted by slot: alone, it begins at 0
    config, at = model.config, torch.tensor([row.at], device=model.device) - padding
    before, config._attn_implementation = config._attn_implementation, ORACLE
    try:
        return model(torch.tensor([row.ids], device=at.device), position_ids=at, use_cache=False).logits[0]
    finally:
        config._attn_implementation = before


def pattern(draw, length):
    """Which slots of a piece hold tokens."""
    cut = draw.randrange(length + 1)
    return draw.choice(
        [
            [1] * length,
            [0] * cut + [1] * (length - cut),
            [1] * cut + [0] * (length - cut),
            [1] * (length - cut) + [0] * cut if draw.random() < 0.5 else [0] * length,
            [draw.random() < 0.7 for _ in range(length)],
        ]
    )


def one_case(model, draw):
    """Some pieces of a batch; the number of forwards that were compared, and of those that were refused."""
    _starts.clear()  # as in a process that has seen no other text
    _starts[0] = None
    batch = draw.randrange(1, 4)
    padded = draw.random() < 0.8
    shift = draw.random() < 0.3
    rows = [Row(draw.choice(["token", "slot"]), draw.randrange(1, 40) if shift else 0) for _ in range(batch)]
    pieces = [draw.choice([1, 1, 2, 5, 16, 17, 30]) for _ in range(draw.randrange(1, 5))]
    static = draw.random() < 0.3
    room = sum(pieces) + draw.randrange(0, 30)
    cache = StaticCache(config=model.config, max_cache_len=room) if static else DynamicCache(config=model.config)
    compared = refused = 0
    for n, length in enumerate(pieces):
        patterns = [pattern(draw, length) if padded else [1] * length for _ in rows]
        if n == 0:  # a row without a token has nothing to say, and stock models divide by zero
            patterns = [p if any(p) else [*p[:-1], 1] for p in patterns]
        slots = len(rows[0].slots)
        given = [row.push(p, draw) for row, p in zip(rows, patterns, strict=True)]
        ids, positions = (torch.tensor(x) for x in zip(*given, strict=True))
        mask = torch.tensor([row.slots for row in rows])
        arguments = {"attention_mask": mask, "position_ids": positions}
        if mask.all() and draw.random() < 0.5:
            del arguments["attention_mask"]
        elif static and draw.random() < 0.3:  # as long as the cache
            arguments["attention_mask"] = torch.nn.functional.pad(mask, (0, room - mask.shape[1]), value=1)
        if all(row.kind == "slot" and row.start == 0 for row in rows) and draw.random() < 0.7:
            del arguments["position_ids"]
        arguments = {name: x.to(model.device) for name, x in arguments.items()}
        try:
            logits = model(ids.to(model.device), past_key_values=cache, **arguments).logits
        except ConfigError:
            refused += 1
            assert not all(row.plain for row in rows), f"{rows} need not be refused"
            break
        for b, row in enumerate(rows):
            here = [i for i, token in enumerate(patterns[b]) if token]
            if here:
                expected = alone(model, row)[-len(here) :]
                error = (logits[b, here] - expected).abs().max() / expected.abs().max()
                assert error < 1e-3, f"piece {n} of row {b} is {float(error):.0%} off: {row} after {slots} slots"
        compared += 1
        if not static and n + 1 < len(pieces) and draw.random() < 0.3:
            kept = draw.randrange(1, len(rows[0].slots) + 1)
            if all(any(row.slots[:kept]) for row in rows):
                if kept < len(rows[0].slots):
                    cache.crop(kept - len(rows[0].slots))
                for row in rows:
                    row.crop(kept)
        if draw.random() < 0.2:
            order = [draw.randrange(batch) for _ in rows]
            cache.reorder_cache(torch.tensor(order, device=model.device))
            rows = [
                Row(rows[i].kind, rows[i].start, *(list(x) for x in (rows[i].ids, rows[i].at, rows[i].slots)))
                for i in order
            ]
    return compared, refused


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt_oss", "smollm3"])
def test_every_row_is_what_it_is_alone_or_is_refused(family, mode, fuzz, device):
    parameters = {"layer_types": ["full_attention"] * 2} if family in ("gemma2", "gpt_oss") else {}
    model = rpe3d.extend(make(family, **parameters).to(device), context=512, **LAW)
    compared = refused = 0
    for seed in range(CASES * fuzz):
        with mode():
            done = one_case(model, random.Random(f"{family} {mode.__name__} {seed}"))
        compared, refused = compared + done[0], refused + done[1]
    assert compared > refused


@pytest.mark.parametrize("length", [24, 90])  # within window + chunk, and beyond it
@pytest.mark.parametrize("name", STEADY)
def test_padding_before_a_text_changes_nothing_where_no_position_ids_are_given(name, length, device):
    """As of a stock model, which counts the padding: RoPE knows distances alone. The oracle is the row, unpadded."""
    own = {"sinks": 2, **LAW} if name == "3d-rpe" else {}
    model = rpe3d.extend(make("llama").to(device), name, **{"context": 512} | OWN.get(name, {}) | own)
    ids = torch.tensor([random.Random(0).choices(range(3, 97), k=length)], device=device)
    padded, mask = (torch.nn.functional.pad(x, (13, 0)) for x in (ids, torch.ones_like(ids)))
    padded, mask = (torch.cat([x, x.roll(-13, 1)]) for x in (padded, mask))  # padding before it, and behind it
    with torch.no_grad():
        alone = model(ids).logits[0]
        both = model(padded, attention_mask=mask).logits
        cache = DynamicCache(config=model.config)
        cut = length // 2
        pieces = [
            model(padded[:, :cut], attention_mask=mask[:, :cut], past_key_values=cache).logits,
            model(padded[:, cut:], attention_mask=mask, past_key_values=cache).logits,
        ]
    for found in (both, torch.cat(pieces, 1)):
        torch.testing.assert_close(found[0, 13:], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1, :length], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STEADY)
def test_every_row_is_what_it_is_alone_under_any_law(name, fuzz, device):
    model = rpe3d.extend(make("llama").to(device), name, **{"context": 512} | OWN.get(name, {}))
    with torch.no_grad():
        done = [one_case(model, random.Random(f"{name} {seed}")) for seed in range(2 * fuzz)]
    assert sum(compared for compared, _ in done) > sum(refused for _, refused in done)
