"""What `pretrain.py` measures on a trained model: loss, copying by distance and attention by distance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpe3d.evaluate.likelihood import token_nll

AT_ONCE = 2**16  # tokens in one forward
WATCHED = "rpe3d-watched"  # transformers parses names of attentions: none of "flash", "sdpa", "flex" may be in it


class Number(NamedTuple):
    """One measured number: its measure, where it was taken (a distance or a step; 0: nowhere), its value and count."""

    measure: str
    at: int
    value: float
    n: int


def measured(model: Any, windows: Tensor, trained: int) -> list[Number]:
    """Measure a model under its law on windows [n, length] of a text that it was not trained on."""
    return [*losses(model, windows, trained), *copying(model, windows, trained), *attention(model, windows[:8])]


def losses(model: Any, windows: Tensor, trained: int) -> list[Number]:
    """Measure the loss of all tokens, and that of the last half of the trained length in each window."""
    nll = nll_of(model, windows)
    tail = nll[:, -trained // 2 :]
    return [Number("loss", 0, nll.mean().item(), nll.numel()), Number("tail_loss", 0, tail.mean().item(), tail.numel())]


def nll_of(model: Any, windows: Tensor, last: int | None = None) -> Tensor:
    """Return the loss of each window's last tokens, float32 on the CPU."""
    rows = max(1, AT_ONCE // windows.shape[1])
    return torch.cat([token_nll(model, part, last).cpu() for part in windows.split(rows)])


# --- copying


def copying(model: Any, windows: Tensor, trained: int) -> list[Number]:
    """Measure the loss of a passage that also stands so many tokens before, and the loss of the same passage alone.

    The last seven eighths of the passage count: its beginning says which passage it is.
    """
    passage = trained // 16
    counted = passage - passage // 8
    told = []
    for distance in (0, *distances(windows.shape[1], passage)):
        nll = nll_of(model, with_passage(windows, passage, distance), counted)
        told.append(Number("copy_loss" if distance else "passage_loss", distance, nll.mean().item(), nll.numel()))
    return told


def distances(length: int, passage: int) -> list[int]:
    """Return distances from a passage to its copy: doubling, up to the farthest that the window holds."""
    far = length - passage
    found: list[int] = []
    while (distance := passage * 2 ** len(found)) < far:
        found.append(distance)
    return [*found, far]


def with_passage(windows: Tensor, passage: int, distance: int) -> Tensor:
    """Return the windows, each ending with a passage of another one, which also stands `distance` tokens before.

    A distance of 0: it stands at the end alone.
    """
    made, end = windows.clone(), windows.shape[1]
    made[:, end - passage :] = windows.roll(1, 0)[:, :passage]
    if distance:
        made[:, end - passage - distance : end - distance] = windows.roll(1, 0)[:, :passage]
    return made


# --- attention


def attention(model: Any, windows: Tensor) -> list[Number]:
    """Measure the mean weight that a query gives a key, by distance: of all layers, heads and later half of queries.

    `at` is the least distance of a bucket; buckets double.
    """
    length, dim = windows.shape[1], model.config.head_dim
    block = -(-length // dim)
    blocks = length // block
    totals, counts = torch.zeros(2, blocks, dtype=torch.float64)
    with watching(model, block) as seen, torch.no_grad():
        model(windows.to(model.device), use_cache=False, logits_to_keep=1)
    for masses in seen:  # [length, dim]: of each query, the weight of each block of keys
        # The last query of a block: its own block lies at distances 0 to block - 1, and so on.
        for query, weights in enumerate(masses[block - 1 :: block, :blocks]):
            if query >= blocks // 2:
                totals[: query + 1] += weights[: query + 1].flip(0)
                counts[: query + 1] += block
    edges = [0, *(2**i for i in range((blocks - 1).bit_length() + 1) if 2**i < blocks), blocks]
    return [
        Number("attention", first * block, (totals[first:last].sum() / counts[first:last].sum()).item(), len(windows))
        for first, last in pairwise(edges)
    ]


@contextmanager
def watching(model: Any, block: int) -> Iterator[list[Tensor]]:
    """Yield a list that gets, from each layer of a forward, the mean weight of every block of keys for every query.

    The model's own attention runs a second time with values that say which block a key lies in, so the weights are
    those of its law, with everything that the law does to them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config, seen = model.config, []
    own = config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[own]

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
        places = torch.arange(key.shape[2], device=key.device) // block
        which = torch.nn.functional.one_hot(places, value.shape[-1]).to(value.dtype).expand_as(value).contiguous()
        masses, _ = attend(module, query, key, which, mask, **given)  # [b, length, heads, dim]
        seen.append(masses.double().mean((0, 2)).cpu())
        return attend(module, query, key, value, mask, **given)

    AttentionInterface.register(WATCHED, watched)
    AttentionMaskInterface.register(WATCHED, ALL_MASK_ATTENTION_FUNCTIONS[own])
    config._attn_implementation = WATCHED
    try:
        yield seen
    finally:
        config._attn_implementation = own
