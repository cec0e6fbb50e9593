"""`rpe3d generate`: ask a model, under a law, about a document that is longer than its context."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import law, need, size
from rpe3d.cli.extend import add_law_arguments, law_given, law_parameters
from rpe3d.cli.model import MODEL, add_model_arguments, check_law, load_model, summary
from rpe3d.cli.terminal import STDOUT, detail, note, progress_bar
from rpe3d.config import ConfigError, real, whole

if TYPE_CHECKING:
    from rpe3d.geometry import Law, LawSpec

ROOM = 1024
"""Contexts are rounded up to a multiple of it, so that prompts of nearly the same length have the same law."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("prompt", metavar="PROMPT", help="what to ask; - reads it from stdin")
    add("--document", metavar="FILE", type=Path, help="a text to put before the prompt, plain or as .xz, .gz, .bz2")
    add("--law", help="the law, name:parameter=value, or a law file; default: the model's own, else 3d-rpe")
    add("--context", metavar="N", type=size, help="target context length; default: what prompt and answer need")
    add_law_arguments(parser)
    add("--ask", metavar="LAW", help="another 3d-rpe for the prompt and the answer, after the document; default: --law")
    add("--max-new", metavar="N", type=int, default=256, help="tokens of the answer at most; default 256")
    add("--temperature", metavar="X", type=float, default=0.0, help="0 (default) always takes the likeliest token")
    add("--seed", metavar="N", type=int, default=0, help="seed of a temperature above 0; default 0")
    add("--piece", metavar="N", type=size, default="32k", help="read the prompt so many tokens at a time; default 32k")
    add("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    add_model_arguments(parser)


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    most, seed = whole("--max-new", arguments.max_new), whole("--seed", arguments.seed, least=0)
    warmth, piece = real("--temperature", arguments.temperature, most=100.0), whole("--piece", arguments.piece)
    asked = bool(arguments.law or law_parameters(arguments) or arguments.context)
    given = law_given(arguments.law or "3d-rpe", arguments)
    if arguments.context is not None:
        check_law(arguments, given, arguments.context)
    asking = _asking(arguments, given)
    prompt, question = _prompt(arguments)
    import torch

    from rpe3d.models import extend

    loaded = load_model(arguments)
    if loaded.tokenizer is None:
        raise ConfigError(f"{arguments.model} has no tokenizer", "give a model with one")
    ids, tail = _tokens(loaded.tokenizer, prompt, question, raw=arguments.raw)
    _put_under(loaded.model, given if asked or asking else None, arguments.context, ids.shape[1] + most)
    later = _law_like(loaded.model, asking) if asking else None
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if warmth:
        sampling = {"do_sample": True, "temperature": warmth}
    from transformers import TextStreamer

    detail(f"{ids.shape[1]} tokens in the prompt")
    ids = ids.to(loaded.model.device)
    begun = time.perf_counter()
    with torch.inference_mode():
        cache = _read(loaded.model, ids, piece, tail if later else None)
        if later is not None:
            extend(loaded.model, later)
        made = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=most,
            pad_token_id=loaded.tokenizer.pad_token_id or loaded.tokenizer.eos_token_id,
            streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
        )
    new, seconds = made.shape[1] - ids.shape[1], time.perf_counter() - begun
    peak = f"; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if ids.is_cuda else ""
    detail(f"{ids.shape[1]} tokens read and {new} written in {seconds:.1f} s{peak}")
    return 0


def _asking(arguments: Namespace, given: LawSpec) -> LawSpec | None:
    """Return the law of --ask; refuse one whose keys would lie in the cache otherwise, or without a document."""
    if arguments.ask is None:
        return None
    asking = law(arguments.ask)
    for option, spec in (("--law", given), ("--ask", asking)):
        if spec.name != "3d-rpe":
            hint = "give 3d-rpe with other parameters, e.g. --ask 3d-rpe:far=2048"
            raise ConfigError(f"--ask is for 3d-rpe, and {option} is {spec.name}", hint)
    if arguments.document is None:
        raise ConfigError("--ask is for what comes after a document", "give --document, or leave --ask out")
    return asking


def _prompt(arguments: Namespace) -> tuple[str, str]:
    """Join the document, if there is one, and the question after it; return both together, and the question."""
    asked = str(sys.stdin.read() if arguments.prompt == str(STDOUT) else arguments.prompt)
    if not asked.strip():
        raise ConfigError("the prompt is empty", "say what to ask")
    if arguments.document is None:
        return asked, asked
    from rpe3d.evaluate import read_texts

    (text,) = read_texts([arguments.document])
    return f"{text.content.strip()}\n\n{asked}", asked


def _read(model: Any, ids: Any, piece: int, left: int | None) -> Any:
    """Read a long prompt in pieces and show how far it is; `left` last tokens stay unread, or the last piece."""
    from rpe3d.models.pieces import read, refusal

    if left is None and ids.shape[1] <= piece:
        return None
    if reason := refusal(model):
        if left is not None:
            raise ConfigError(f"the document cannot be read before the question: {reason}", "leave --ask out")
        detail(f"the prompt is read at once: {reason}")
        return None
    with progress_bar() as progress:
        return read(model, ids, piece, lambda done: progress("reading", done, ids.shape[1]), left=left)


def _law_like(model: Any, asking: LawSpec) -> Law:
    """Make the law of --ask for the context that the model has been put under."""
    from rpe3d.geometry import make_law
    from rpe3d.models import law_of

    own = law_of(model)
    assert own is not None
    asking.check(own.pretrained)
    made = make_law(**{k: v for k, v in own.to_dict().items() if k not in own.own}, **asking.parameters)
    note(f"asked under {summary(made)}")
    return made


def _tokens(tokenizer: Any, prompt: str, question: str, *, raw: bool) -> tuple[Any, int]:
    """Tokenize the prompt as the model reads it, in its chat template where it has one; count the question's tokens.

    The question's are those from its beginning on, the end of the template included.
    """
    import torch

    text, special = prompt, {}
    if tokenizer.chat_template and not raw:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        special = {"add_special_tokens": False}
    ids = tokenizer(text, verbose=False, **special).input_ids
    at = text.rfind(question.strip())
    tail = question if at < 0 else text[at:]
    return torch.tensor([ids]), len(tokenizer(tail, add_special_tokens=False, verbose=False).input_ids)


def _put_under(model: Any, given: LawSpec | None, context: int | None, needed: int) -> None:
    """Put the model under the law that is asked for; without one, only where prompt and answer need more room."""
    from rpe3d.models import extend, law_of, pretrained_length

    own, pretrained = law_of(model), pretrained_length(model)
    if given is None:
        if own is not None and needed > own.context:
            note(
                f"prompt and answer are {needed} tokens, and the checkpoint's law is for {own.context}; "
                "--context N replaces it by 3d-rpe for all of them"
            )
        if own is not None or needed <= pretrained:
            return
        given = law("3d-rpe")
    wanted = context or max(pretrained, -(-needed // ROOM) * ROOM)
    if needed > wanted:
        hint = "raise --context, lower --max-new, or give a shorter document"
        raise ConfigError(f"prompt and answer are {needed} tokens, above the context of {wanted}", hint)
    given.check(pretrained)
    made = law_of(extend(model, given.name, context=wanted, **given.parameters))
    assert made is not None
    if own is not None and own != made:
        note(f"the checkpoint's own law ({summary(own)}) is replaced")
    note(summary(made))
