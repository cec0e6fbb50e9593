"""Needles in one very long text: read once under a law, asked for under others, on the same cache.

    python benchmarks/needles.py --model qwen2.5-coder.gguf --text BOOK... --length 1040000 --context 1m \\
        --read 3d-rpe:far=512,decay=.8 --ask 3d-rpe:far=512,decay=.8,3d-rpe:far=2048,decay=.8 --out DIR

Reading is what costs, so that one reading answers many questions. A passkey and five numbers with names lie at depths
from 8 to 93 % of the text. For each law of --ask a row says of how many needles every digit was the likeliest, each
after the right ones; the loss per digit of all and of the passkey; and what the model answers, token by token, when it
is asked for the passkey in its chat template (without one, after the bare question). All laws are forms of 3d-rpe: they
leave the keys of a cache as stock RoPE rotated them. Writes needles-<device>.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune_results import Table
from limit import command
from rpe3d import extend
from rpe3d.cli.arguments import size
from rpe3d.cli.terminal import progress_bar
from rpe3d.config import ConfigError, whole
from rpe3d.evaluate.texts import read_texts
from rpe3d.geometry import LawSpec, parse_laws
from rpe3d.models import pieces
from rpe3d.models.load import load
from rpe3d.text import opening
from stamp import stamp

COLUMNS = (
    "model", "tokens", "context", "read", "read_s", "peak_gib", "ask", "found", "of", "nats", "passkey_nats", "answer",
)  # fmt: skip
ANSWER = 16  # tokens of an answer
MARK = "\N{REPLACEMENT CHARACTER}"


class Needle(NamedTuple):
    """Where in the text a sentence stands, the sentence, its digits, and the question that they follow."""

    depth: float
    sentence: str
    digits: str
    question: str


def named(depth: float, name: str, digits: str) -> Needle:
    """Return a number with a name, in the words of RULER."""
    asked = f"the special magic number for {name} mentioned in the provided text"
    question = f"\n\nWhat is {asked}? T{asked[1:]} is:"
    return Needle(depth, f"One of the special magic numbers for {name} is: {digits}.", digits, question)


PASSKEY = Needle(
    0.30,
    "The pass key is 71432. Remember it. 71432 is the pass key.",
    "71432",
    "\n\nWhat is the pass key? The pass key is",
)
NEEDLES = (
    named(0.08, "amber", "8214753"),
    PASSKEY,
    named(0.45, "boris", "5930274"),
    named(0.62, "canyon", "6178942"),
    named(0.81, "dahlia", "3409187"),
    named(0.93, "ember", "9271630"),
)


class Reader:
    """A model with what it has read."""

    def __init__(self, model: Any, tokenizer: Any, context: int) -> None:
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.opening, self.closing = self._template()
        self.cache: Any = None

    def _template(self) -> tuple[str, str]:
        """Return what stands before and after a user's words in the chat template; nothing where there is none."""
        if not self.tokenizer.chat_template:
            return "", ""
        turns = [{"role": "user", "content": MARK}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition(MARK)
        return before, after

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    def under(self, law: LawSpec) -> None:
        extend(self.model, law.name, context=self.context, **law.parameters)

    def hide(self, text: str, length: int) -> Tensor:
        """Return so many tokens of a text with the needles in it."""
        begin = self.tokens(self.opening) or list(opening(self.tokenizer))
        hidden = [self.tokens(f"\n{needle.sentence}\n") for needle in NEEDLES]
        room = length - len(begin) - sum(map(len, hidden))
        body = self.tokens(text)[:room]
        if len(body) < room or room < 100:
            raise ConfigError(f"the texts have {len(body)} tokens, and {room} are needed", "change --length or --text")
        made, last = list(begin), 0
        for needle, sentence in zip(NEEDLES, hidden, strict=True):
            cut = int(needle.depth * room)
            made += body[last:cut] + sentence
            last = cut
        return torch.tensor([made + body[last:]], device=self.model.device)

    def read(self, ids: Tensor, told: Any) -> None:
        """Read all of it in pieces."""
        last = ids[:, -1:]
        self.cache = pieces.read(self.model, ids, told=told, left=1)
        if self.cache is None:
            raise ConfigError(f"the text cannot be read in pieces: {pieces.refusal(self.model)}", "give another law")
        self.forward(last, 1)

    def forward(self, ids: Tensor, kept: int) -> Tensor:
        given = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": kept}
        logits: Tensor = self.model(ids, **given).logits[0]
        return logits

    def forget(self, length: int) -> None:
        """Cut the cache back to so many tokens, without copying it."""
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    def loss(self, needle: Needle) -> tuple[float, bool]:
        """Return the loss per digit of an answer, and whether every digit was the likeliest."""
        length, digits = self.cache.get_seq_length(), self.tokens(f" {needle.digits}")
        ids = torch.tensor([self.tokens(needle.question) + digits], device=self.model.device)
        logits = self.forward(ids, len(digits) + 1)[:-1].float()
        self.forget(length)
        count = len(needle.digits)  # without the space before them
        target = ids[0, -len(digits) :]
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")[-count:]
        return losses.mean().item(), bool((logits.argmax(-1) == target)[-count:].all())

    def answer(self) -> str:
        """Return what the model says when it is asked for the passkey."""
        length = self.cache.get_seq_length()
        ids = torch.tensor([self.tokens(PASSKEY.question + self.closing)], device=self.model.device)
        said: list[int] = []
        ends = {self.tokenizer.eos_token_id}
        for _ in range(ANSWER):
            ids = self.forward(ids, 1)[-1:].argmax(-1)[None]
            if ids.item() in ends:
                break
            said.append(int(ids.item()))
        self.forget(length)
        text: str = self.tokenizer.decode(said, skip_special_tokens=True)
        return text


def work(reader: Reader, ids: Tensor, reading: LawSpec, asking: Sequence[LawSpec], name: str, table: Table) -> None:
    """Read the text under a law and ask under the others, a row for each."""
    cuda = ids.is_cuda
    reader.under(reading)
    begun = time.perf_counter()
    with progress_bar() as progress:
        reader.read(ids, lambda done: progress("reading", done, ids.shape[1]))
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    print(f"{ids.shape[1]} tokens read under {reading.label} in {seconds:.1f} s; peak {peak:.1f} GiB", flush=True)
    about = {"model": name, "tokens": ids.shape[1], "context": reader.context, "read": reading.label}
    about |= {"read_s": f"{seconds:.1f}", "peak_gib": f"{peak:.1f}"}
    for law in asking:
        reader.under(law)
        found = [reader.loss(needle) for needle in NEEDLES]
        right, nats = sum(is_right for _, is_right in found), statistics.fmean(loss for loss, _ in found)
        passkey, answer = found[NEEDLES.index(PASSKEY)][0], " ".join(reader.answer().split())
        print(f"{law.label}: {right} of {len(found)}, {nats:.3f} nats, passkey {passkey:.3f}: {answer}", flush=True)
        numbers = {"found": right, "of": len(found), "nats": f"{nats:.4f}", "passkey_nats": f"{passkey:.4f}"}
        table.append(about | {"ask": law.label, **numbers, "answer": answer})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face name or folder, a .gguf file, or `default`")
    parser.add_argument("--text", nargs="+", required=True, help="texts, joined in this order")
    parser.add_argument("--length", type=size, required=True, help="tokens of the text, needles included")
    parser.add_argument("--context", type=size, required=True, help="what the laws are made for")
    parser.add_argument("--read", required=True, metavar="LAW", help="the law of the reading")
    parser.add_argument("--ask", required=True, metavar="LAWS", help="the laws of the questions")
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV, which rows are added to")
    given = parser.parse_args()
    given.read, given.ask = parse_laws(given.read), parse_laws(given.ask)
    if len(given.read) != 1:
        raise ConfigError(f"--read has {len(given.read)} laws", "give one; --ask takes several")
    for law in (*given.read, *given.ask):
        if law.name != "3d-rpe":
            raise ConfigError(f"{law.label} is not a 3d-rpe", "give forms of 3d-rpe: they share a cache")
    whole("length", given.length, most=given.context - 200)
    return given


def main() -> int:
    given = arguments()
    text = "\n\n".join(one.content for one in read_texts(given.text))
    loaded = load(given.model)
    reader = Reader(loaded.model, loaded.tokenizer, given.context)
    ids = reader.hide(text, given.length)
    for law in given.ask:  # a wrong one is refused before the reading
        reader.under(law)
    given.out.mkdir(parents=True, exist_ok=True)
    cuda = ids.is_cuda
    table = Table(given.out / f"needles-{'cuda' if cuda else 'cpu'}.csv", stamp(cuda=cuda), COLUMNS)
    with torch.inference_mode():
        work(reader, ids, given.read[0], given.ask, Path(given.model).name, table)
    print(f"wrote {table.path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    command(main)
