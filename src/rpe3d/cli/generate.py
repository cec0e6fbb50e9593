"""`rpe3d generate`: ask a model about a document longer than its context, under a law."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import law, need, note_unused, size
from rpe3d.cli.extend import add_law_arguments, law_given, law_parameters
from rpe3d.cli.model import MODEL, add_model_arguments, check_law, load_model, summary
from rpe3d.cli.terminal import STDOUT, detail, note, progress_bar
from rpe3d.config import MOST, ConfigError, real, whole

if TYPE_CHECKING:
    from rpe3d.geometry import Law, LawSpec

ROOM = 1024
"""Contexts are rounded up to a multiple of this, so that prompts of nearly the same length share a law."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("prompt", metavar="PROMPT", help="what to ask; - reads it from stdin")
    add("--document", metavar="FILE", type=Path, help="text to put before the prompt, plain or .xz, .gz, .bz2")
    add("--law", help="law name, name:parameter=value, or law file; default: the model's own, else 3d-rpe")
    add("--context", metavar="N", type=size, help="target context length; default: what prompt and answer need")
    add_law_arguments(parser)
    add("--ask", metavar="LAW", help="another 3d-rpe for prompt and answer, after the document; default --law")
    add("--max-new", metavar="N", type=int, default=256, help="maximum tokens in the answer; default 256")
    add("--temperature", metavar="X", type=float, default=0.0, help="0 (default) always picks the likeliest token")
    add("--seed", metavar="N", type=int, help="sampling seed, for a temperature above 0; default 0")
    add(
        "--piece", metavar="N", type=size, default="32k", help="read the prompt this many tokens at a time; default 32k"
    )
    add("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    add_model_arguments(parser)


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    most, seed = whole("--max-new", arguments.max_new), whole("--seed", arguments.seed or 0, least=0)
    growth, piece = real("--temperature", arguments.temperature, most=100.0), whole("--piece", arguments.piece)
    if not growth:
        note_unused(arguments, {"seed": "a --temperature above 0"})
    asked = bool(arguments.law or law_parameters(arguments) or arguments.context)
    given = law_given(arguments.law or "3d-rpe", arguments)
    if arguments.context is not None:
        check_law(arguments, given, arguments.context)
    asking = _asking(arguments, given)
    document, question = _prompt(arguments)
    import torch

    from rpe3d.models import extend, law_of

    loaded = load_model(arguments)
    if loaded.tokenizer is None:
        raise ConfigError(f"{arguments.model} has no tokenizer", "pass a model that has one")
    text, how = _as_read(loaded.tokenizer, document + question, raw=arguments.raw)
    ids = torch.tensor([loaded.tokenizer(text, **how).input_ids])
    asked = asked or (asking is not None and law_of(loaded.model) is None)
    _put_under(loaded.model, given if asked else None, arguments.context, ids.shape[1] + most)
    later = left = None
    if asking is not None:
        later = _law_like(loaded.model, asking)
        left = _question_tokens(loaded.tokenizer, document, question, raw=arguments.raw)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if growth:
        sampling = {"do_sample": True, "temperature": growth}
    from transformers import TextStreamer

    detail(f"{ids.shape[1]} tokens in the prompt")
    ids = ids.to(loaded.model.device)
    begun = time.perf_counter()
    with torch.inference_mode():
        cache = _read(loaded.model, ids, piece, left)
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
    """Return the law of --ask; refuse it without a document, or if it would rotate the cached keys differently."""
    if arguments.ask is None:
        return None
    asking = law(arguments.ask)
    _check_shared("--law is", given.name)
    _check_shared("--ask is", asking.name)
    if arguments.document is None:
        raise ConfigError("--ask is for the prompt after a document", "add --document, or leave --ask out")
    check_law(arguments, asking, arguments.context or MOST)
    return asking


def _check_shared(what: str, name: str) -> None:
    """Refuse a law that does not leave the keys of a cache as stock RoPE rotated them."""
    if name != "3d-rpe":
        hint = "use 3d-rpe with other parameters, e.g. --ask 3d-rpe:far=2048"
        raise ConfigError(f"--ask is for 3d-rpe, but {what} {name}", hint)


def _prompt(arguments: Namespace) -> tuple[str, str]:
    """Return the text before the question (the document, or nothing) and the question."""
    asked = str(sys.stdin.read() if arguments.prompt == str(STDOUT) else arguments.prompt)
    if not asked.strip():
        raise ConfigError("the prompt is empty", "say what to ask")
    if arguments.document is None:
        return "", asked
    from rpe3d.evaluate import read_texts

    (text,) = read_texts([arguments.document])
    return f"{text.content.strip()}\n\n", asked


def _read(model: Any, ids: Any, piece: int, left: int | None) -> Any:
    """Read a long prompt in pieces with a progress bar; the last `left` tokens, or the last piece, stay unread."""
    from rpe3d.models.pieces import read, refusal

    if left is None and ids.shape[1] <= piece:
        return None
    if reason := refusal(model):
        if left is not None:
            raise ConfigError(f"the document cannot be read before the question: {reason}", "leave --ask out")
        detail(f"the prompt is read in one piece: {reason}")
        return None
    with progress_bar() as progress:
        return read(model, ids, piece, lambda done: progress("reading", done, ids.shape[1]), left=left)


def _law_like(model: Any, asking: LawSpec) -> Law:
    """Make the law of --ask for the context that the model was extended to."""
    from rpe3d.geometry import make_law
    from rpe3d.models import law_of
    from rpe3d.models.extend import check_layers

    own = law_of(model)
    assert own is not None
    _check_shared("the checkpoint's own law is", own.name)
    asking.check(own.pretrained)
    made = make_law(**{k: v for k, v in own.to_dict().items() if k not in own.own}, **asking.parameters)
    check_layers(model, made)
    note(f"asked under {summary(made)}")
    return made


def _as_read(tokenizer: Any, prompt: str, *, raw: bool) -> tuple[str, dict[str, Any]]:
    """Return the prompt in the model's chat template, if it has one, and the keywords to tokenize it with."""
    if raw or not tokenizer.chat_template:
        return prompt, {"verbose": False}
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": prompt}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        hint = "pass --raw, which continues the text as it is"
        raise ConfigError(f"the model's chat template rejects the prompt: {error}", hint) from None
    return text, {"verbose": False, "add_special_tokens": False}


def _question_tokens(tokenizer: Any, document: str, question: str, *, raw: bool) -> int:
    """Return the number of tokens of the question, with whatever the chat template puts after it.

    A marker character before the question finds where it begins; a template that changes the prompt is refused.
    """
    text, how = _as_read(tokenizer, document + question, raw=raw)
    mark = next(x for x in map(chr, range(0xE000, 0xF8FF)) if x not in text)
    marked, _ = _as_read(tokenizer, document + mark + question, raw=raw)
    at = marked.find(mark)
    if marked.replace(mark, "", 1) != text:
        raise ConfigError(
            "the model's chat template changes the prompt, so the question cannot be told apart from the document",
            "pass --raw, or leave --ask out",
        )
    try:
        ends = [end for _, end in tokenizer(text, return_offsets_mapping=True, **how).offset_mapping]
    except NotImplementedError:  # a tokenizer in Python
        return len(tokenizer(text, **how).input_ids) - len(tokenizer(text[:at], **how).input_ids)
    return len(ends) - next(i for i, end in enumerate(ends) if end > at)


def _put_under(model: Any, given: LawSpec | None, context: int | None, needed: int) -> None:
    """Put the model under the requested law; without one, only if prompt and answer need a longer context."""
    from rpe3d.models import extend, law_of, pretrained_length

    own, pretrained = law_of(model), pretrained_length(model)
    if given is None:
        if own is not None and needed > own.context:
            note(
                f"prompt and answer are {needed} tokens, but the checkpoint's law is for {own.context}; "
                "--context N replaces it with 3d-rpe for N tokens"
            )
        if own is not None or needed <= pretrained:
            return
        given = law("3d-rpe")
    wanted = context or max(pretrained, -(-needed // ROOM) * ROOM)
    if needed > wanted:
        hint = "raise --context, lower --max-new, or pass a shorter document"
        raise ConfigError(f"prompt and answer are {needed} tokens, above the context of {wanted}", hint)
    given.check(pretrained)
    made = law_of(extend(model, given.name, context=wanted, **given.parameters))
    assert made is not None
    if own is not None and own != made:
        note(f"the checkpoint's own law ({summary(own)}) is replaced")
    note(summary(made))
