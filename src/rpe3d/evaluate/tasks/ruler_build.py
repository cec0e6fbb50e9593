"""Build RULER's synthetic tasks offline from a tokenizer and word lists: needles, variables, words.

Every draw is upstream's, in its order, so that with its word lists (the package wonderwords) the samples match
upstream's byte for byte. Two things are not available offline and differ: the essays of the haystack are the user's
text, and its sentences, between which needles are put, end at a full stop, question mark or exclamation mark.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.chat import TEMPLATE, Chat

CONFIG: dict[str, Any] = json.loads((files(__package__) / "data" / "ruler.json").read_text(encoding="utf-8"))
SAMPLES = 500
FEWEST = 50
"""Minimum words of a haystack for its depths to differ."""
SEED = 42
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40))]
MARK = "\x1a"  # no white space to `str.strip`, as \x1f is: many chat templates trim what they are given

Made = tuple[str, list[str]]
"""A prompt and its answers."""


@cache
def word_lists() -> dict[str, list[str]]:
    """Read wonderwords' nouns, adjectives and verbs."""
    try:
        place = files("wonderwords.assets")
    except ModuleNotFoundError:
        raise ConfigError("RULER's words need wonderwords", "pip install 'rpe3d[eval]'") from None
    names = {"nouns": "nounlist.txt", "adjectives": "adjectivelist.txt", "verbs": "verblist.txt"}
    texts = {kind: (place / name).read_text(encoding="utf-8") for kind, name in names.items()}
    return {kind: [line.rstrip() for line in text.splitlines()] for kind, text in texts.items()}


class Compounds(Sequence[str]):
    """Every adjective with every noun, sorted: millions of keys for needles, made on demand."""

    def __init__(self, adjectives: list[str], nouns: list[str]) -> None:
        self.nouns = sorted(set(nouns))
        self.blocks: list[list[str]] = []
        for adjective in sorted(set(adjectives), key=lambda word: f"{word}-"):
            if self.blocks and adjective.startswith(f"{self.blocks[-1][0]}-"):  # well-known among what follows well-
                self.blocks[-1].append(adjective)
            else:
                self.blocks.append([adjective])
        self.mixed = {i: self._sorted(block) for i, block in enumerate(self.blocks) if len(block) > 1}
        self.ends = list(accumulate(len(self.mixed.get(i, self.nouns)) for i in range(len(self.blocks))))

    def _sorted(self, adjectives: list[str]) -> list[str]:
        return sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in self.nouns})

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: Any) -> Any:
        block = bisect_right(self.ends, index)
        within = index - (self.ends[block - 1] if block else 0)
        if block in self.mixed:
            return self.mixed[block][within]
        return f"{self.blocks[block][0]}-{self.nouns[within]}"


@cache
def compounds() -> Compounds:
    """Return every adjective with every noun of wonderwords' lists."""
    lists = word_lists()
    return Compounds(lists["adjectives"], lists["nouns"])


@dataclass(kw_only=True)
class Builder:
    """Build the samples of one length. `random` and `numpy` are reseeded for every task, as in upstream's processes."""

    chat: Chat
    length: int
    essay: str
    depths: Sequence[float] = ()
    """Depth of each sample's needle among the sentences, in percent; drawn if empty, as upstream does."""
    depth: float | None = field(default=None, init=False)

    def build(self, task: str, count: int) -> list[tuple[str, list[str], int]]:
        """Return `count` prompts with their answers, and the number of tokens of prompt and longest answer."""
        self.draw = random.Random(SEED)
        self.numbers = np.random.RandomState(SEED)
        settings = dict(CONFIG["tasks"][task])
        family = settings.pop("family")
        self.config = CONFIG["families"][family]
        makers: dict[str, Callable[..., Iterator[Made]]] = {
            "niah": self._needles,
            "vt": self._variables,
            "cwe": self._common_words,
            "fwe": self._frequent_words,
        }
        made = makers[family](count, **settings)
        return [(prompt, answers, self._tokens(prompt) + self.config["max_new"]) for prompt, answers in made]

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """What the chat puts before and after a task's words, ready for `str.format`."""
        spaced = f" {MARK} " if self.chat.form == "llama2" else MARK
        before, after = self.chat.wrap(spaced).split(MARK)
        return tuple(part.replace("{", "{{").replace("}", "}}") for part in (before, after))  # type: ignore[return-value]

    @property
    def _template(self) -> str:
        before, after = self._frame
        return before + str(self.config["template"]) + after + str(self.config["prefix"])

    @property
    def _singular(self) -> str:
        """The task's words for one needle. Upstream also changes its chats' words; a model's own template stays."""
        if self.chat.form != TEMPLATE:
            return _one(self._template)
        before, after = self._frame
        return before + _one(str(self.config["template"])) + after + _one(str(self.config["prefix"]))

    def _tokens(self, text: str) -> int:
        return len(self.chat.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _fitting(self, make: Callable[[int], Made], size: int, step: int, least: int, extra: int = 0) -> Made:
        """Make a sample with `size` units, or with the most that leave room for the answer."""
        while size >= least:
            prompt, answers = make(size)
            if self._tokens(prompt) + self.config["max_new"] + extra <= self.length:
                return prompt, answers
            size -= step
        raise self._no_room()

    def _no_room(self) -> ConfigError:
        return ConfigError(f"a RULER task does not fit into {self.length} tokens of this tokenizer", "raise --length")

    # --- needles in a haystack

    def _needles(
        self, count: int, *, haystack: str, key: str, value: str, keys: int, values: int, queries: int
    ) -> Iterator[Made]:
        keys = max(keys, queries)
        step = 500 if haystack == "essay" else 25 if self.length >= 4096 else 5

        def make(size: int) -> Made:
            return self._haystack(size, haystack, key, value, keys, values, queries)

        def most(step: int) -> int:
            size, tokens, room = step, 0, self.config["max_new"]
            while tokens + room < self.length:
                prompt, answers = make(size)
                tokens = self._tokens(prompt + " ".join(answers))
                size += -step if tokens + room > self.length else step
            return int(size)

        size = most(step)
        if self.depths and size < step:  # without a haystack all depths are one
            step = FEWEST
            size = most(step)
            if size < step:
                raise self._no_room()
        least = 1 if haystack == "essay" else keys * values
        for number in range(count):
            self.depth = self.depths[number] if self.depths else None
            yield self._fitting(make, max(size, least), step, least)

    def _haystack(self, size: int, haystack: str, key: str, value: str, keys: int, values: int, queries: int) -> Made:
        names, hidden, needles = [], [], []
        for _ in range(keys):
            names.append(self._drawn(key))
            hidden.append([self._drawn(value) for _ in range(values)])
            needles += [NEEDLE.format(kind=value, key=names[-1], value=one) for one in hidden[-1]]
        random.Random(SEED).shuffle(needles)
        if haystack == "essay":
            context = self._among_sentences(size, needles)
        else:
            lines = [GRASS] * size
            if haystack == "needle":
                lines = [NEEDLE.format(kind=value, key=self._drawn(key), value=self._drawn(value)) for _ in range(size)]
            places = sorted(self.draw.sample(range(size), len(needles)), reverse=True)
            for place, needle in zip(places, needles, strict=True):
                lines.insert(place, needle)
            context = "\n".join(lines)
        asked = self.draw.sample(range(keys), queries)
        wanted = [names[i] for i in asked]
        query = ", ".join(wanted[:-1]) + ", and " + wanted[-1] if len(wanted) > 1 else wanted[0]
        alone = queries * values == 1
        template = self._singular if alone else self._template
        prompt = template.format(type_needle_v=value[:-1] if alone else value, context=context, query=query)
        return prompt, [answer for i in asked for answer in hidden[i]]

    def _drawn(self, kind: str) -> str:
        if kind == "numbers":
            return str(self.draw.randint(10**6, 10**7 - 1))
        if kind == "words":
            return str(self.draw.choice(compounds()))
        return str(uuid.UUID(int=self.draw.getrandbits(128), version=4))

    def _among_sentences(self, size: int, needles: list[str]) -> str:
        sentences = self._sentences(size)
        depths = self.draw.sample(DEPTHS, len(needles)) if self.depth is None else [self.depth]
        places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
        parts = []
        for i, (begin, end) in enumerate(pairwise(places)):
            parts += [" ".join(sentences[begin:end]), *needles[i : i + 1]]
        return " ".join(parts)

    def _sentences(self, words: int) -> list[str]:
        """Return the sentences of the essay's first words; the essay repeats where it ends."""
        if words not in self._split:
            repeated = self._essay * math.ceil(words / len(self._essay))
            self._split[words] = re.split(r"(?<=[.!?]) +", " ".join(repeated[:words]))
        return self._split[words]

    @cached_property
    def _split(self) -> dict[int, list[str]]:
        return {}

    @cached_property
    def _essay(self) -> list[str]:
        return self.essay.split()

    # --- chains of variables

    def _variables(self, count: int) -> Iterator[Made]:
        whole, self.length = self.length, 500
        prompt, answers = next(self._chains(1, step=5, example=None))
        self.length = whole
        yield from self._chains(count, step=10, example=f"{prompt} {' '.join(answers)}\n\n")

    def _chains(self, count: int, step: int, example: str | None) -> Iterator[Made]:
        extra = 0 if example is None else self._tokens(example)
        room = self.config["max_new"] + extra

        def make(size: int) -> Made:
            return self._chain(size, short=example is None)

        size, tokens = step, 0
        while tokens + room < self.length:
            prompt, answers = make(size)
            tokens = self._tokens(f"{prompt} {answers}")
            size += -step if tokens + room > self.length else step
        for _ in range(count):
            prompt, answers = self._fitting(make, max(size, 1), step, 1, extra)
            if example is not None:
                place = prompt.index(self.config["template"][:20])
                prompt = f"{prompt[:place]} {example}\n\n{prompt[place:]}"
            yield prompt, answers

    def _chain(self, noise: int, short: bool) -> Made:
        """Make five variables, each set to the one before, among filler lines; `short` is the leading example."""
        drawn: list[str] = []
        while len(set(drawn)) < 5:
            drawn.append("".join(self.draw.choices(string.ascii_uppercase, k=3 if short else 5)))
        names = list(dict.fromkeys(drawn))
        value = str(self.numbers.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before} " for before, name in pairwise(names))]
        lines = [GRASS + "\n"] * noise
        if len(lines) <= len(chain):
            lines = [part + "." if part.strip() else part for line in lines for part in line.split(".")]
        places = sorted(self.draw.sample(range(len(lines)), len(chain)))
        for j, (place, line) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + j, line)
        context = " ".join(lines).replace(". \n", ".\n")
        template = self._bare_template() if short else self._template
        return template.format(context=context, query=value, num_v=5), names

    def _bare_template(self) -> str:
        """Return the task's words without the chat's. Upstream drops the word before the answer, whatever it is."""
        template = self._template
        begin = template.index(self.config["template"][:20])
        end = template.index(self.config["prefix"][:10])
        return " ".join(template[begin:end].split()[:-1]) + template[end:]

    # --- words

    def _common_words(self, count: int) -> Iterator[Made]:
        words = sorted({word for words in word_lists().values() for word in words})
        random.Random(SEED).shuffle(words)
        short = self.length < 4096

        def listed(size: int, common: int, rare: int) -> tuple[str, list[str]]:
            drawn = self.draw.sample(words, size)
            every = drawn[:10] * common + drawn[10:] * rare
            random.Random(SEED).shuffle(every)
            return _numbered(every), drawn[:10]

        def make(size: int) -> Made:
            example, shown = listed(20, 3, 1) if short else listed(40, 10, 3)
            context, answers = listed(size, 6, 1) if short else listed(size, 30, 3)
            first = self._template.format(context=example, query="") + _numbered(shown)
            return f"{first}\n{self._template.format(context=context, query='')}", answers

        size, tokens, room = 10, 0, self.config["max_new"]
        while tokens + room < self.length:
            prompt, answers = make(size)
            tokens = self._tokens(f"{prompt} {_numbered(answers)}")
            if tokens + room > self.length:
                size -= 10
                break
            size += 10
            if size > len(words):
                size = len(words)
                break
        for _ in range(count):
            yield self._fitting(make, max(size, 10), 10, 10)

    def _frequent_words(self, count: int) -> Iterator[Made]:
        """Make coded words whose counts fall as 1 / rank², the first being dots. The answer has no room reserved."""
        kinds, step = self.length // 50, max(1, self.length // 32)

        def vocabulary() -> list[str]:
            drawn: list[str] = []
            while len(drawn) < kinds or len(set(drawn)) < kinds:
                drawn.append("".join(self.draw.choices(string.ascii_lowercase, k=6)))
            drawn = sorted(set(drawn))
            random.Random(SEED).shuffle(drawn)
            return ["...", *drawn[1:]]

        def text(words: int, coded: list[str]) -> str:
            numbers = words * (np.arange(1, len(coded) + 1) ** -2.0) / (math.pi**2 / 6)
            every = [word for word, n in zip(coded, numbers.astype(int), strict=True) for _ in range(n)]
            random.Random(SEED).shuffle(every)
            return self._template.format(context=" ".join(every), query="")

        coded = vocabulary()
        most = self.length // 6
        while self._tokens(text(most, coded)) < self.length:
            most += step
        most -= step
        for _ in range(count):
            coded, words = vocabulary(), most
            while words > 0 and self._tokens(text(words, coded)) > self.length:
                words -= step
            if words <= 0:
                raise self._no_room()
            yield text(words, coded), coded[1:4]


def _one(words: str) -> str:
    for many, one in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        words = words.replace(many, one)
    return words


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
