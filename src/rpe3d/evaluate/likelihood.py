"""Compute the likelihood of the tokens that a model reads, without holding the logits of a whole window in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rpe3d.models.pieces import continued, read_long

PIECE = 2**27  # logits in memory at once, 512 MiB in float32
_CHECKED = "_rpe3d_head_in_pieces"


@torch.no_grad()
def token_nll(model: Any, tokens: Tensor, last: int | None = None) -> Tensor:
    """Return the negative log-likelihood of each row's last `last` tokens (None: all but the first), float32 [b, n].

    The decoder runs once, without a cache. The model's own head then runs on a piece of the window at a time.
    """
    tokens = tokens.to(model.device)
    last = tokens.shape[1] - 1 if last is None else last
    if not head_in_pieces(model):
        return _nll(model(tokens, use_cache=False).logits[:, -last - 1 : -1], tokens[:, -last:])
    piece = max(1, PIECE // (len(tokens) * _vocabulary(model)))
    return _in_pieces(model, _hidden(model, tokens), tokens, last, piece)


def nll_of(model: Any, seen: Any, tokens: Tensor) -> Tensor:
    """Return the negative log-likelihood of all tokens but the first, float32 [b, n - 1], from the decoder's output."""
    return _in_pieces(model, seen, tokens, tokens.shape[1] - 1, max(1, PIECE // (len(tokens) * _vocabulary(model))))


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float()
    return logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]


def _in_pieces(model: Any, seen: Any, tokens: Tensor, last: int, piece: int) -> Tensor:
    """Run the head on `piece` tokens of each row at a time; the decoder's output replaces the decoder."""
    end = tokens.shape[1]
    parts = []
    for start in range(end - last, end, piece):
        stop = min(start + piece, end)
        stand_in = copy.copy(seen)
        stand_in.last_hidden_state = seen.last_hidden_state[:, start - 1 : stop - 1]
        with _replaced(model.get_decoder(), lambda *_, made=stand_in, **__: made):
            logits = model(tokens[:, start - 1 : stop - 1], use_cache=False).logits
        parts.append(_nll(logits, tokens[:, start:stop]))
    return torch.cat(parts, dim=1)


def _hidden(model: Any, tokens: Tensor) -> Any:
    """Return the decoder's output from inside the model's own forward, so that nothing before or around it is left out.

    A window that is too long to be read at once is read in pieces, and their outputs are joined.
    """
    seen: list[Any] = []
    hook = model.get_decoder().register_forward_hook(lambda *call: seen.append(call[-1]))
    try:
        model(**continued(tokens, read_long(model, tokens)), logits_to_keep=1)
    finally:
        hook.remove()
    if len(seen) == 1:
        return seen[0]
    joined = copy.copy(seen[-1])
    joined.last_hidden_state = torch.cat([part.last_hidden_state for part in seen], dim=1)
    joined.past_key_values = None
    return joined


@contextmanager
def _replaced(module: Any, forward: Any) -> Iterator[None]:
    """Replace `forward` of this instance for a while, and put back what was there before (a device map's hook)."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@torch.no_grad()
def head_in_pieces(model: Any) -> bool:
    """Return whether running the head in pieces gives the model's own result, tried once per model on a few tokens."""
    if _CHECKED not in model.__dict__:
        tokens = torch.arange(24, device=model.device)[None] % _vocabulary(model)
        whole = _nll(model(tokens, use_cache=False).logits[:, :-1], tokens[:, 1:])
        try:
            parts = _in_pieces(model, _hidden(model, tokens), tokens, 23, 10)
            same = torch.allclose(parts, whole, rtol=0.02, atol=0.02)
        except (TypeError, AttributeError, IndexError, RuntimeError):
            same = False  # a model that is built otherwise: no logits_to_keep, no decoder of its own
        model.__dict__[_CHECKED] = same
    return bool(model.__dict__[_CHECKED])
