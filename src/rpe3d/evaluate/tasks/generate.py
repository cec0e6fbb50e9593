"""Generate greedy answers with a Hugging Face model, in padded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpe3d.evaluate.memory import out_of_memory
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.models.pieces import read_long

Generator = Callable[[Sequence[str], int, bool], list[str]]
"""Returns answers to prompts, of at most so many tokens, cut at the first line break if asked: any engine will do."""


def generator(model: Any, chat: Chat) -> Generator:
    """Return greedy `model.generate` with the model's end-of-text tokens. A batch too large for memory is halved."""

    def generate(prompts: Sequence[str], max_new: int, line_only: bool) -> list[str]:
        try:
            return _answers(model, chat, prompts, max_new, line_only)
        except Exception as error:
            if len(prompts) == 1 or not out_of_memory(error):
                raise
        torch.cuda.empty_cache()
        half = len(prompts) // 2
        return [answer for part in (prompts[:half], prompts[half:]) for answer in generate(part, max_new, line_only)]

    return generate


@torch.no_grad()
def _answers(model: Any, chat: Chat, prompts: Sequence[str], max_new: int, line_only: bool) -> list[str]:
    tokenizer = chat.tokenizer
    rows = [chat.encode(prompt) for prompt in prompts]
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    if line_only:
        ends = [tokenizer.eos_token_id, tokenizer.encode("\n", add_special_tokens=False)[-1]]
        ends = [end for end in ends if end is not None]
    first_end = ends[0] if isinstance(ends, list) else ends
    pad = next((token for token in (tokenizer.pad_token_id, first_end) if token is not None), 0)
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # a checkpoint's own would do nothing but warn
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=read_long(model, ids) if bool(mask.all()) else None,
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new,
        min_new_tokens=1 if line_only else None,
        eos_token_id=ends,
        pad_token_id=pad,
        **neutral,
    )
    return [chat.cleaned(tokenizer.decode(row, skip_special_tokens=True)) for row in out[:, width:]]
