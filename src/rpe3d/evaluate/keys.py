"""Find the key tokens of LongPPL once for all laws of a comparison, or read them from a file.

By default the evaluator is the compared model itself. loss_short is its loss with stock RoPE on a truncated context
within its pretrained length. loss_full is taken under each compared law that reads the whole text, and a token is key
if it is key under any of them. A single law as the evaluator would have every key token below 2 nats by construction,
and so beat all others. Similar laws still share their key tokens: compare few variants of one law.

Key tokens, in the "keys" of results and of a keys file: {length: {"by": {"model", "weights": digest,
"laws"}, "alpha", "beta", "short", "step", "left_out": laws that ran out of memory, "windows": [{"text", "start",
"keys": numbers of tokens in the window, which count its BOS token}]}}. A keys file, schema 1: {"schema": 1, "kind":
"keys", "tokenizer": digest, "texts": {name: sha256}, "keys"}, in which a length also has "spans": {name of a text:
[[first character of a run of key tokens, the one after the last]]}, if the tokenizer reports them. For a model with
another tokenizer, the tokens within spans of the file's longest windows are key at every length, as upstream does it,
and "by" also has the "length" of those windows. With fixed key tokens, the same holds for any model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpe3d import files
from rpe3d.config import ConfigError
from rpe3d.evaluate import spans
from rpe3d.evaluate.memory import within_memory
from rpe3d.evaluate.tasks.longppl import (
    ALPHA,
    BETA,
    Truncation,
    check_far,
    is_key,
    mean_loss,
    truncated_nll,
    truncation,
    whole_nll,
)
from rpe3d.evaluate.tasks.perplexity import Window
from rpe3d.evaluate.tasks.probes import Bench
from rpe3d.evaluate.texts import Text, Tokens
from rpe3d.evaluate.under import Cell, under
from rpe3d.geometry import Law

Keys = dict[str, Any]
"""Key tokens by length, which is a string as in JSON."""
FIND = "find them with `rpe3d compare MODEL --lengths N --measures longppl --keys FILE`"
ANOTHER = "pass another file to --keys, which is written if it does not exist"


def reads_all(law: Law) -> bool:
    """Return whether the last query attends to every token of the context; streaming-llm's does not."""
    key = torch.arange(law.context)
    query = torch.full_like(key, law.context - 1)
    return bool(torch.stack([region.contains(query, key) for region in law.regions]).any(0).all())


def evaluators(laws: Mapping[str, Law | ConfigError]) -> dict[str, Law]:
    """Return the laws that find key tokens at a length; refuse if none reads the whole text."""
    able = {label: law for label, law in laws.items() if not isinstance(law, ConfigError) and reads_all(law)}
    if not able:
        raise ConfigError(
            f"key tokens cannot be found: none of {', '.join(laws)} reads the whole text",
            "add a law that does, such as 3d-rpe, or pass a file of key tokens to --keys",
        )
    return able


@dataclass(kw_only=True)
class KeyTokens:
    """The key tokens of a comparison: where they are stored, and which are still to be found."""

    bench: Bench
    laws: Mapping[Cell, Law | ConfigError]
    pretrained: int
    results: dict[str, Any]
    texts: Sequence[Text]
    file: Path | None
    fixed: bool = False
    """Whether the characters that are key in the file's longest windows are key at every length."""
    waiting: dict[int, dict[str, Law]] = field(default_factory=dict)
    """Lengths whose key tokens are not known, with the laws that find them."""
    unwritten: bool = False

    @property
    def cut(self) -> Truncation:
        return truncation(self.pretrained)

    @property
    def by(self) -> dict[str, str]:
        """The model that finds key tokens here."""
        model = self.results["model"]
        return {"model": model["name"], "weights": model["fingerprint"]["weights"]}

    @property
    def origin(self) -> dict[str, Any]:
        """Origin of key tokens: a tokenizer and texts."""
        texts = {text["name"]: text["sha256"] for text in self.results["texts"]}
        return {"tokenizer": self.results["model"]["fingerprint"]["tokenizer"], "texts": texts}

    def read(self) -> Keys:
        """Return the key tokens of the file; refuse those that do not fit this comparison."""
        lengths = self.results["settings"]["lengths"]
        check_far(lengths, self.cut)
        windows = {length: self.bench.whole_windows(length) for length in lengths}
        if self.fixed:
            check_fixed(self.file)
        convert = partial(self._taken, windows)
        keys = None if self.file is None else read_keys(self.file, self.origin, convert, self.fixed)
        self.unwritten = self.file is not None and keys is None
        check_keys(keys or {}, windows, self.by)
        return keys or {}

    @cached_property
    def offsets(self) -> dict[str, Tensor | None]:
        """Character offsets of the tokens of each text."""
        return offsets_of(self.bench.tokenizer, self.texts, self.bench.texts)

    def _taken(self, windows: Mapping[int, Sequence[Window]], keys: Keys) -> Keys | None:
        return taken(keys, windows, self.offsets, self.cut.short)

    def spanned(self) -> Keys:
        """Return the key tokens with the characters that they stand for, if the tokenizer reports them."""
        if None in self.offsets.values():
            return dict(self.results["keys"])
        return {length: {**found, "spans": self._spans(found)} for length, found in self.results["keys"].items()}

    def _spans(self, found: Mapping[str, Any]) -> dict[str, spans.Spans]:
        tokens: dict[str, set[int]] = {}
        before = len(self.bench.first)
        for window in found["windows"]:
            of = tokens.setdefault(window["text"], set())
            of |= {window["start"] + key - before for key in window["keys"]}
        made = {}
        for text, of in tokens.items():
            at = self.offsets[text]
            assert at is not None
            made[text] = spans.joined(at, sorted(of))
        return made

    def prepare(self, rows: Sequence[Cell]) -> None:
        """Plan the search for what neither the file nor an earlier run has found, and count its work."""
        for length in dict.fromkeys(length for _, length in rows):
            if str(length) not in self.results["keys"]:
                able = evaluators({label: law for (label, at), law in self.laws.items() if at == length})
                self.waiting[length] = able
                self.bench.finders |= {(label, length) for label in able}
                self.bench.total += self.bench.finding_work(length, len(able))

    def find(self, write: Callable[[], None]) -> None:
        """Find the planned key tokens, and store them in the results and in the file."""

        def keep() -> None:
            write()
            if self.file is not None and self.bench.ranks.first:
                write_keys(self.file, self.origin, self.spanned())

        for length, able in self.waiting.items():
            self.results["keys"][str(length)] = find(self.bench, able, length, self.cut, self.by)
            self.bench.ranks.together(keep)
        if self.unwritten and not self.waiting:  # all of them are those of an earlier run
            self.bench.ranks.together(keep)
        self.bench.keys = positions(self.results["keys"])


def offsets_of(tokenizer: Any, texts: Sequence[Text], tokens: Sequence[Tokens]) -> dict[str, Tensor | None]:
    """Return where the tokens of each text stand in it."""
    counts = {text.name: len(text.ids) for text in tokens}
    return {text.name: spans.offsets(tokenizer, text.content, counts[text.name]) for text in texts}


def longest(keys: Keys) -> tuple[int, dict[str, Any]]:
    """Return the length of the longest windows and what was found in them; 0 and nothing if there are none."""
    length = max(keys, key=int, default="0")
    return int(length), keys.get(length, {})


def taken(
    keys: Keys, windows: Mapping[int, Sequence[Window]], offsets: Mapping[str, Tensor | None], short: int
) -> Keys | None:
    """Return key tokens that another tokenizer's model found, as this one's; None where that cannot be told.

    None of the first `short` tokens of a window is key. Where windows overlap, a token is key in the first of them
    alone: it counts once, with the most text before it.
    """
    of_length, found = longest(keys)
    if "spans" not in found or None in offsets.values():
        return None
    said = {"by": {**found["by"], "length": of_length}}
    said |= {name: found[name] for name in ("alpha", "beta", "short", "step", "left_out")}

    def of(window: Window, seen: set[int]) -> list[int]:
        at = offsets[window.text]
        assert at is not None
        key = spans.within(at[window.start :][: len(window.ids)], found["spans"].get(window.text, []))
        numbers = (key.nonzero().flatten() + len(window.first)).tolist()
        before = window.start - len(window.first)
        mine = [number for number in numbers if number >= short and before + number not in seen]
        seen.update(before + number for number in mine)
        return mine

    made: Keys = {}
    for length, cut in windows.items():
        seen: dict[str, set[int]] = {one.text: set() for one in cut}
        each = {i: of(cut[i], seen[cut[i].text]) for i in sorted(range(len(cut)), key=lambda i: cut[i].start)}
        rows = [{"text": one.text, "start": one.start, "keys": each[i]} for i, one in enumerate(cut)]
        made[str(length)] = {**said, "windows": rows}
    return made


def find(bench: Bench, laws: Mapping[str, Law], length: int, cut: Truncation, by: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key tokens of all windows of a length, and keep each law's losses of them for its row.

    The model is stock. A law that runs out of memory finds none; the truncated contexts must fit.
    """
    windows = bench.whole_windows(length)
    mine = bench.ranks.share(windows)
    batch = bench.settings.batch
    bench.what = f"key tokens at {length}"
    bench.advance()
    short = _everywhere(bench, lambda: [truncated_nll(bench.model, window, cut, batch) for _, window in mine])
    if short is None:
        raise ConfigError(
            f"memory ran out on truncated contexts of {cut.short + cut.step} tokens",
            "lower --batch, or leave longppl out of --measures",
        )
    bench.advance(len(mine) * bench.truncated_work(length))
    full: dict[str, list[Tensor]] = {}
    for label, law in laws.items():
        losses = _everywhere(bench, partial(_under, bench, law, [window for _, window in mine]))
        if losses is not None:
            full[label] = losses
        bench.advance(len(mine) * bench.forward_work(length))
    keys: list[list[int]] = []
    for i, less in enumerate(short):
        key = torch.zeros(len(less), dtype=torch.bool)
        for losses in full.values():
            key |= is_key(losses[i][-len(less) :], less)
        keys.append((key.nonzero().flatten() + length - len(less)).tolist())
    for label, losses in full.items():
        bench.key_losses[label, length] = [
            (number, window.text, window.start, len(of), mean_loss(loss, of))
            for (number, window), loss, of in zip(mine, losses, keys, strict=True)
        ]
    parts = bench.ranks.gather([(number, of) for (number, _), of in zip(mine, keys, strict=True)])
    ordered = [of for _, of in sorted(item for part in parts for item in part)]
    return {
        "by": {**by, "laws": list(laws)},
        "alpha": ALPHA,
        "beta": BETA,
        "short": cut.short,
        "step": cut.step,
        "left_out": [label for label in laws if label not in full],
        "windows": [
            {"text": window.text, "start": window.start, "keys": of}
            for window, of in zip(windows, ordered, strict=True)
        ],
    }


def _under(bench: Bench, law: Law, windows: Sequence[Window]) -> list[Tensor]:
    with under(bench.model, law):
        return whole_nll(bench.model, windows, bench.settings.batch)


def _everywhere(bench: Bench, work: Any) -> Any:
    """Return this process's result, or None if memory ran out in any process."""
    made = within_memory(work)
    return made if all(bench.ranks.gather(made is not None)) else None


def check_fixed(file: Path | None) -> None:
    """Refuse fixed key tokens without a file that holds them."""
    if file is None:
        raise ConfigError("--fixed-keys is given without --keys", "add --keys FILE, or leave --fixed-keys out")
    if not file.exists():
        raise ConfigError(f"{file} does not exist, and --fixed-keys finds no key tokens", FIND)


def read_keys(
    path: Path,
    origin: Mapping[str, Any],
    taken: Callable[[Keys], Keys | None] = lambda keys: None,
    fixed: bool = False,
) -> Keys | None:
    """Read a keys file, or return None if there is none yet; refuse one for other texts: `fixed` ones may be of more.

    `taken` converts another tokenizer's key tokens to this one's, and `fixed` ones of any tokenizer; they are refused
    if it returns nothing.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent}", "make it, or pass another file to --keys") from None
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", ANOTHER) from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or (content.get("kind"), content.get("schema")) != ("keys", 1):
        raise ConfigError(f"{path} exists but does not hold key tokens", ANOTHER)
    if not _are_keys(content.get("keys")):
        raise ConfigError(f"{path} is damaged: its key tokens are not as they were written", ANOTHER)
    known = content.get("texts")
    has_more = fixed and isinstance(known, dict) and origin["texts"].items() <= known.items()
    if known != origin["texts"] and not has_more:
        raise ConfigError(f"{path} holds key tokens of other texts", ANOTHER)
    if fixed and not any(longest(content["keys"])[1].get("spans", {}).values()):
        raise ConfigError(
            f"{path} marks no characters as key in its longest windows",
            "find key tokens anew with another file, or leave --fixed-keys out",
        )
    if content.get("tokenizer") == origin["tokenizer"] and not fixed:
        return {length: {k: v for k, v in of.items() if k != "spans"} for length, of in content["keys"].items()}
    made = taken(content["keys"])
    if made is None:
        raise ConfigError(f"{path} holds key tokens of another tokenizer", ANOTHER)
    return made


def _are_keys(keys: Any) -> bool:
    """Say whether what a file holds has the form of key tokens."""
    try:
        return all(
            length.isdigit()
            and of.keys() >= {"by", "alpha", "beta", "short", "step", "left_out", "windows"}
            and of["by"].keys() >= {"model", "weights", "laws"}
            and all(one.keys() >= {"text", "start", "keys"} for one in of["windows"])
            and all(type(key) is int for one in of["windows"] for key in one["keys"])
            and all(len(span) == 2 for some in of.get("spans", {}).values() for span in some)
            for length, of in keys.items()
        )
    except (AttributeError, TypeError):
        return False


def write_keys(path: Path, origin: Mapping[str, Any], keys: Keys) -> None:
    """Write a keys file atomically."""
    with files.refusing(f"cannot write {path}", "pass a writable file to --keys"):
        files.write_json(path, {"schema": 1, "kind": "keys", **origin, "keys": keys})


def positions(keys: Keys) -> dict[int, list[list[int]]]:
    """Return the key tokens of each window, by length."""
    return {int(length): [window["keys"] for window in found["windows"]] for length, found in keys.items()}


def check_keys(keys: Keys, windows: Mapping[int, Sequence[Window]], by: Mapping[str, Any] | None = None) -> None:
    """Refuse key tokens of other windows, and lengths without any that cannot be added.

    Only the model that found the others can add a length; without a model (`by`) none can.
    """
    for length, cut in windows.items():
        if str(length) not in keys:
            if by is None:
                raise ConfigError(f"--keys holds no key tokens of windows of {length} tokens", FIND)
            if any(found["by"]["weights"] != by["weights"] for found in keys.values()):
                raise ConfigError(
                    f"--keys holds no key tokens of windows of {length} tokens, and those it holds are from another "
                    "model",
                    f"add {length} with that model, or pass another file to --keys",
                )
            continue
        found = keys[str(length)]["windows"]
        if [(one["text"], one["start"]) for one in found] != [(one.text, one.start) for one in cut]:
            raise ConfigError(
                f"the key tokens at {length} come from other windows", "pass the --windows that they were found with"
            )
        if any(not 0 < key < length for one in found for key in one["keys"]):
            raise ConfigError(f"some key tokens at {length} lie outside their windows", ANOTHER)
