"""Read a document once and then ask about it: its perplexity and what a model finds in it, in one forward pass.

Three notes are put into a text. The text is read with a cache; every question is then asked after it, from a copy of
that cache, so that a question costs a few tokens instead of the whole document again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.evaluate.likelihood import nll_of
from rpe3d.evaluate.tasks.perplexity import Window, score_losses
from rpe3d.evaluate.tasks.probes import Bench, Found
from rpe3d.evaluate.texts import Tokens
from rpe3d.text import encode

NOTES = (
    (0.03, "The pass key is", " 25248", ". Remember it. 25248 is the pass key."),
    (
        0.12,
        "The best thing to do in San Francisco is",
        " to eat a sandwich and sit in",
        " Dolores Park on a sunny day.",
    ),
    (0.45, "The secret ingredient of my grandmother's apple pie is", " a spoon of black pepper", ", freshly ground."),
)
"""Where a note stands, as a part of the document; how it begins, which is the question; the answer; and how it ends.

The key is Mohtashami and Jaggi's (arXiv 2305.16300), the sandwich Kamradt's needle in a haystack (2023). A note is
asked for by its beginning: a small model continues better than it answers.
"""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note in a document: where it is, what is asked for, and the tokens of the question and the right answer."""

    depth: float
    key: str
    question: list[int]
    answer: list[int]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text with notes in it, as tokens."""

    text: str
    start: int
    tokens: Tensor
    notes: list[Note]


def make_document(tokenizer: Any, texts: Sequence[Tokens], length: int, first: tuple[int, ...] = ()) -> Document:
    """Put `NOTES` into the middle of the longest text. Document, question and answer have at most `length` tokens."""
    text = max(texts, key=lambda text: len(text.ids))
    notes, lines = [], []
    for depth, begins, key, ends in NOTES:
        question = encode(tokenizer, f"\n\n{begins}")
        answer = encode(tokenizer, f"\n\n{begins}{key}")[len(question) :]
        notes.append(Note(depth=depth, key=key.strip(), question=question, answer=answer))
        lines.append(encode(tokenizer, f"\n\n{begins}{key}{ends}\n\n"))
    room = length - len(first) - sum(map(len, lines)) - max(len(n.question) + len(n.answer) for n in notes)
    if room < 1 or len(text.ids) < room:
        raise ConfigError(f"a document of {length} tokens cannot be made from {text.name}", "choose another --length")
    start = (len(text.ids) - room) // 2
    ids, parts, at = text.ids[start : start + room].tolist(), [list(first)], 0
    for note, line in zip(notes, lines, strict=True):
        cut = round(note.depth * room)
        parts += [ids[at:cut], line]
        at = cut
    tokens = torch.tensor([token for part in [*parts, ids[at:]] for token in part])
    return Document(text=text.name, start=start, tokens=tokens, notes=notes)


@torch.no_grad()
def read(model: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    """Read a document, and return the losses of all its tokens but the first, and the cache."""
    tokens = tokens[None].to(model.device)
    seen: list[Any] = []
    hook = model.get_decoder().register_forward_hook(lambda *call: seen.append(call[-1]))
    try:
        out = model(tokens, use_cache=True, logits_to_keep=1)
    finally:
        hook.remove()
    return nll_of(model, seen[0], tokens)[0].double().cpu(), out.past_key_values


@torch.no_grad()
def ask(model: Any, cache: Any, note: Note) -> list[int]:
    """Return the greedy answer about a document, up to its first wrong token; the cache is left unchanged.

    It runs one forward pass over question and right answer, as `passkey_found` does: as long as the model agrees, that
    is what it says.
    """
    tokens = torch.tensor([note.question + note.answer[:-1]], device=model.device)
    logits = model(tokens, past_key_values=copy.deepcopy(cache), use_cache=True).logits
    said: list[int] = logits[0, -len(note.answer) :].argmax(-1).tolist()
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, note.answer, strict=True)))
    return said[: right + 1]


def read_and_ask(bench: Bench, length: int) -> Found:
    """Measure `ppl` and `passkey` of a comparison on one document, as the demo does."""
    document = make_document(bench.tokenizer, bench.texts, length, bench.first)
    began = time.perf_counter()
    losses, cache = read(bench.model, document.tokens)
    seconds = (time.perf_counter() - began) / len(document.tokens)
    window = Window(
        text=document.text, start=document.start, ids=document.tokens, first=(), scored=len(document.tokens) - 1
    )
    found: Found = {
        "windows": [(0, document.text, document.start, score_losses(losses, window, length))],
        "seconds_per_token": [seconds],
        "passkeys": [],
    }
    for number, note in enumerate(document.notes):
        said = ask(bench.model, cache, note)
        answer = bench.tokenizer.decode(said).strip()
        found["passkeys"].append((number, note.depth, note.key, answer, said == note.answer))
    return found
