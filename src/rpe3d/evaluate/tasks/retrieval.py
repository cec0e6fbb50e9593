"""Test whether a model still finds what it read long ago: a passage to repeat, and a key hidden in filler text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.evaluate.likelihood import head_in_pieces, token_nll
from rpe3d.evaluate.texts import Tokens
from rpe3d.models.pieces import continued, read_long
from rpe3d.text import encode

PASSAGE = 512

# Mohtashami and Jaggi 2023 (arXiv 2305.16300), as their repository epfml/landmark-attention words it.
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LINE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST_KEY = 49999


def passage_of(length: int) -> int:
    """Return the number of repeated tokens: 512, or a quarter of a window shorter than 2048."""
    return min(PASSAGE, length // 4)


def make_copy(texts: Sequence[Tokens], length: int, seed: int, first: tuple[int, ...] = ()) -> Tensor:
    """Make a window [length] of a passage, unrelated text, and the passage again.

    All texts form one ring. The unrelated text starts anywhere on it, and the passage lies half-way round from there.
    """
    ring = torch.cat([text.ids for text in texts])
    passage = passage_of(length)
    between = length - len(first) - 2 * passage
    spare = len(ring) - between - passage
    if spare < 0:
        raise ConfigError(
            f"the texts have {len(ring)} tokens, too few for a copy test of {length}", "pass longer files to --texts"
        )
    turned = ring.roll(-random.Random(seed).randrange(len(ring)))
    again = turned[between + spare // 2 :][:passage]
    return torch.cat([torch.tensor(first, dtype=ring.dtype), again, turned[:between], again])


def copy_nll(model: Any, trials: Tensor) -> list[float]:
    """Return the mean loss of the last 7/8 of each repetition (448 of 512), for trials [b, length] of `make_copy`."""
    losses = token_nll(model, trials, passage_of(trials.shape[1]) * 7 // 8)
    return [float(x) for x in losses.double().mean(1).cpu()]


@dataclass(frozen=True, kw_only=True)
class Passkey:
    """A prompt with a key in it, and the tokens of the right answer."""

    depth: float
    key: int
    prompt: Tensor
    answer: list[int]


def make_passkey(tokenizer: Any, length: int, depth: float, seed: int, first: tuple[int, ...] = ()) -> Passkey:
    """Make a prompt and its answer, `length` tokens together; the share `depth` of the filler comes before the key."""
    key = random.Random(seed).randint(1, LARGEST_KEY)
    question = encode(tokenizer, "\n" + QUESTION)
    answer = encode(tokenizer, f"\n{QUESTION} {key}")[len(question) :]
    task, line = encode(tokenizer, TASK + "\n"), encode(tokenizer, "\n" + LINE.format(key=key) + "\n")
    room = length - len(first) - len(task) - len(line) - len(question) - len(answer)
    if room < 0:
        raise ConfigError(f"a passkey does not fit into {length} tokens of this tokenizer", "raise --lengths")
    patch = encode(tokenizer, " " + GRASS)
    grass = encode(tokenizer, " ".join([GRASS] * (room // len(patch) + 2)))
    before = round(depth * room)
    prompt = [*first, *task, *grass[:before], *line, *grass[: room - before], *question]
    return Passkey(depth=depth, key=key, prompt=torch.tensor(prompt), answer=answer)


@torch.no_grad()
def passkey_found(model: Any, trial: Passkey) -> list[int]:
    """Return the greedy answer up to its first wrong token, in one forward pass over prompt and right answer.

    As long as the model agrees, that answer is what it has said, so its next token is that of `passkey`. Decoding would
    take a step for every token instead, most of the time of a short prompt.
    """
    tokens = torch.cat([trial.prompt, torch.tensor(trial.answer[:-1], dtype=trial.prompt.dtype)])[None].to(model.device)
    last = {"logits_to_keep": len(trial.answer)} if head_in_pieces(model) else {}
    logits = model(**continued(tokens, read_long(model, tokens[:, : len(trial.prompt)])), **last).logits
    said: list[int] = logits[0, -len(trial.answer) :].argmax(-1).tolist()
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, trial.answer, strict=True)))
    return said[: right + 1]


@torch.no_grad()
def passkey(model: Any, trial: Passkey) -> list[int]:
    """Return the greedy answer, with as many tokens as the right one, decoded with a cache."""
    last = {"logits_to_keep": 1} if head_in_pieces(model) else {}
    out = model(trial.prompt[None].to(model.device), use_cache=True, **last)
    said = [out.logits[:, -1].argmax(-1, keepdim=True)]
    for _ in trial.answer[1:]:
        out = model(said[-1], past_key_values=out.past_key_values, use_cache=True)
        said.append(out.logits[:, -1].argmax(-1, keepdim=True))
    return [int(token) for token in torch.cat(said, dim=1)[0].cpu()]
