"""Measure ways of choosing a few far blocks of keys: what each keeps of text, of copies, of needles and of passkeys.

    python benchmarks/choosing.py --model default --text FILE --text FILE --length 32k --out DIR
    python benchmarks/choosing.py --model default --text FILE --length 32k --out DIR --only "mean of 16,all keys"
    python benchmarks/choosing.py --model default --passkeys 20 --length 16k --out DIR --only "all keys" --through
    python benchmarks/choosing.py --model default --text FILE --length 16k --out DIR --only published
    python benchmarks/choosing.py --model default --text FILE --length 12k --out DIR --only rests --text-tokens 2048

A prefix with four needles in it is read once under `3d-rpe`, which attends to every far key. Probes follow: the next
tokens of the text, three passages of the prefix, four questions. A probe sees the prefix and itself, and each of its
queries chooses far blocks from what precedes it. The prefix is the same for all ways, so a difference is the choice of
the probes alone. With `--through` every way reads the prefix, too, as it does in use, at many times the cost. Passkeys
are prompts of `rpe3d compare`, one key to a prefix. Vectors of probes are float32. Differences are to `all keys +
faded`, which is the law itself; their standard error is over texts, or passkeys. Writes choosing-<model>.csv after
every text, and keeps rows of other lengths and ways. Beside it, choosing-<model>-windows.csv has the numbers of each
text and passkey: the same command at the same commit resumes after them. At the end, the differences to the way that
ships are shown with 95 % intervals. `--only published` measures that way and the published ones, `--only rests` those
that also see something of the blocks that they do not choose, `--only full` those that also see all far keys in the
layers 18 to 20 of SmolLM2, and `--only layers` finds such layers of a model, three at a time.

`far_nats` is the mean loss of the key tokens of the text probes, by the rule of LongPPL (arXiv 2410.23771): those that
near keys alone (and the first block) make less likely than the whole text does by more than 2 nats, and that the whole
text makes likely, with less than 2 nats. The model itself finds them, under `all keys` and `all keys + faded`: the
lower loss of the two counts. So these two are favoured, since a token on which one of them was lucky is a key token,
and so, a little, are ways that resemble them. The tokens of a text are the same for all ways. It is measured where a
run has these three ways; a text with more key tokens counts more (`far_n`), and intervals are those of a ratio of sums.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from choosing_study import Study
from rpe3d.cli.arguments import size
from rpe3d.config import ConfigError, choice
from rpe3d.evaluate.paired import Difference, mean_difference, paired_shares
from rpe3d.evaluate.tasks.longppl import is_key
from rpe3d.evaluate.tasks.retrieval import QUESTION as ASKED
from rpe3d.evaluate.tasks.retrieval import make_passkey
from rpe3d.evaluate.texts import Text, read_texts
from rpe3d.geometry import make_law
from rpe3d.models import facts
from rpe3d.models.load import load
from rpe3d.text import encode, opening
from stamp import COLUMNS, stamp
from ways import (
    ALL,
    FINDERS,
    FULL,
    NEAR,
    PUBLISHED,
    RESTS,
    SHIPS,
    WAYS,
    Way,
    by_layers,
)

TEXT, COPY, SHOWN = 512, 160, 24  # tokens of text, of a passage, and of a passage before its nats count
NEEDLES, PASSAGES, SPREAD = (0.08, 0.25, 0.42, 0.59), (0.03, 0.17, 0.34), 0.02  # places, as parts of the prefix
WORDS = ("amber", "cobalt", "walnut", "tundra", "velvet", "harbor", "meadow", "lantern", "pepper", "saddle")
NEEDLE = "\nOne of the special magic numbers for {} is: {}.\n"
ABOUT = "the special magic number for {} mentioned in the text above"
QUESTION = f"\n\nQuestion: What is {ABOUT}?\nAnswer: The{ABOUT[3:]} is:"
SEED = 70_000  # of the first passkey; those of the results begin at 0
KINDS = ("text", "copy", "needle", "passkey", "far")
DIFFERENCES = tuple(f"{kind}_{what}" for kind in KINDS for what in ("diff", "se"))
NUMBERS = ("model", "length", "way", "texts", *(f"{kind}_nats" for kind in KINDS), "found", "needles")
PASSKEYS = ("passkeys", "passkeys_told", "passkeys_all", "passkeys_n")  # answered; their digits; by all keys; of
FIELDS = (*COLUMNS, *NUMBERS, *DIFFERENCES, "found_all", "prefix", *PASSKEYS, "far_n")
COUNTS = ("found", "passkeys", "told", "far_n")
ORIGIN = (*COLUMNS, "model", "length", "prefix")
EACH = (*ORIGIN, "excerpt", "way", *KINDS, *COUNTS)  # of a text or a passkey under a way


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Tokens that follow the prefix; the nats of those from `skip` on count, and never that of the first."""

    kind: str
    ids: list[int]
    skip: int = 1


def prefix_and_probes(
    tokenizer: Any, text: Text, length: int, window: int, draw: random.Random, tokens: int = TEXT
) -> tuple[list[int], list[Probe]]:
    """Return a text's first tokens with four needles among them, and the probes that follow."""
    ids = [*opening(tokenizer), *encode(tokenizer, text.content[: 8 * (length + tokens)])]
    following = min(tokens, window)
    if len(ids) < length + following:
        raise ConfigError(f"{text.name} has {len(ids)} tokens, not {length + following}", "give a longer --text")
    magic = {word: str(draw.randrange(10**6, 10**7)) for word in draw.sample(WORDS, len(NEEDLES))}

    def place(part: float) -> int:
        return int(length * (part + SPREAD * draw.random()))

    for part, (word, number) in zip(NEEDLES, magic.items(), strict=True):
        at = place(part)
        ids[at:at] = encode(tokenizer, NEEDLE.format(word, number))
    probes = [Probe(kind="text", ids=ids[length : length + following])]
    for at in map(place, PASSAGES):
        probes.append(Probe(kind="copy", ids=ids[at : at + COPY], skip=SHOWN))
    for word, number in magic.items():
        question, both = (encode(tokenizer, QUESTION.format(word, word) + end) for end in ("", f" {number}"))
        probes.append(Probe(kind="needle", ids=both, skip=len(question)))
    return ids[:length], probes


def passkey_and_probe(tokenizer: Any, length: int, depth: float, seed: int) -> tuple[list[int], list[Probe]]:
    """Return the grass with a key in it, and the question with its answer: `length` tokens together."""
    trial = make_passkey(tokenizer, length, depth, seed, opening(tokenizer))
    question = encode(tokenizer, "\n" + ASKED)
    prompt = trial.prompt.tolist()
    probe = Probe(kind="passkey", ids=[*question, *trial.answer], skip=len(question))
    return prompt[: -len(question)], [probe]


Answers = Sequence[tuple[Tensor, Tensor]]  # of `Study.nats`


def measure(probes: Sequence[Probe], answers: Answers, keys: Tensor | None = None) -> dict[str, float]:
    """Return the mean nats of each kind of probe under a way, and how many needles and passkeys were found.

    `told`: passkeys whose digits were found, also where the model would rather have begun with another word. `far`: the
    mean nats of the text's key tokens, if there are any.
    """
    nats: dict[str, list[float]] = {}
    counts = dict.fromkeys(COUNTS, 0)
    for probe, (each, hit) in zip(probes, answers, strict=True):
        nats.setdefault(probe.kind, []).append(float(each[probe.skip - 1 :].mean()))
        counts["found"] += probe.kind == "needle" and bool(hit[probe.skip - 1 :].all())
        counts["passkeys"] += probe.kind == "passkey" and bool(hit[probe.skip - 1 :].all())
        counts["told"] += probe.kind == "passkey" and bool(hit[probe.skip :].all())
        if probe.kind == "text" and keys is not None and bool(keys.any()):
            nats["far"] = [float(each[keys].mean())]
            counts["far_n"] = int(keys.sum())
    return {kind: statistics.fmean(values) for kind, values in nats.items()} | counts


def key_tokens(near: Tensor, full: Sequence[Tensor]) -> Tensor:
    """Return which tokens need the far text, by their nats with near keys and under each way that finds them."""
    return is_key(torch.stack([*full]).amin(0), near)


def parts_of_mean(numbers: Sequence[tuple[int, float]]) -> list[float]:
    """Return numbers whose mean is that of (n, x) weighted by n, and whose spread is that of this ratio of sums.

    As `rpe3d.evaluate.paired.key_difference` has it; x itself where all n are equal.
    """
    total = sum(n for n, _ in numbers)
    mean = math.fsum(n * x for n, x in numbers) / total
    return [mean + len(numbers) * n * (x - mean) / total for n, x in numbers]


def of_kind(kind: str, mine: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Return the nats of a kind that a way has on some prefixes, and how much more than another on the same ones."""
    both = [
        (int(a["far_n"]) if kind == "far" else 1, a[kind], b[kind])
        for a, b in zip(mine, base, strict=True)
        if kind in a
    ]
    return [parts_of_mean([(n, a) for n, a, _ in both]), parts_of_mean([(n, a - b) for n, a, b in both])]


def row(way: str, mine: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the numbers of a way on some prefixes, beside those of attending to every key on the same ones."""
    made: dict[str, Any] = {"way": way}
    many = {kind: sum(kind in one for one in mine) for kind in KINDS}
    for kind in (kind for kind in KINDS if many[kind]):
        values, differences = of_kind(kind, mine, base)
        made[f"{kind}_nats"] = round(statistics.fmean(values), 4)
        made[f"{kind}_diff"] = round(statistics.fmean(differences), 4)
        if len(values) > 1:
            made[f"{kind}_se"] = round(statistics.stdev(differences) / math.sqrt(len(values)), 4)
    sums = {name: (sum(one[name] for one in mine), sum(one[name] for one in base)) for name in ("found", "passkeys")}
    if many["text"]:
        made |= {"texts": many["text"], "needles": len(NEEDLES) * many["text"]}
        made |= dict(zip(("found", "found_all"), sums["found"], strict=True))
    if many["passkey"]:
        made |= dict(zip(("passkeys", "passkeys_all"), sums["passkeys"], strict=True))
        made |= {"passkeys_told": sum(one["told"] for one in mine), "passkeys_n": many["passkey"]}
    if many["far"]:
        made["far_n"] = sum(int(one["far_n"]) for one in mine)
    return made


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the CSV; rows that it holds of other lengths and ways stay."""
    kept: list[Mapping[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            made = {(str(one["length"]), one["way"], one["prefix"]) for one in rows}
            kept = [one for one in csv.DictReader(file) if (one["length"], one["way"], one.get("prefix")) not in made]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])


def read_each(path: Path, origin: Mapping[str, str]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the numbers that this command has already measured, by excerpt and way."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        mine = [one for one in csv.DictReader(file) if all(one[name] == origin[name] for name in ORIGIN)]
    return {
        (one["excerpt"], one["way"]): {kind: float(one[kind]) for kind in KINDS if one.get(kind)}
        | {name: int(one[name]) for name in COUNTS}
        for one in mine
    }


def append(path: Path, numbers: Mapping[str, Any]) -> None:
    """Add the numbers of an excerpt under a way to a CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, EACH, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(numbers)


def differences(mine: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]) -> dict[str, Difference]:
    """Return how much more nats of each kind a way has than another on the same excerpts, and the share of passkeys."""
    made: dict[str, Difference] = {}
    for kind in (kind for kind in KINDS if any(kind in one for one in mine)):
        made[kind] = mean_difference(of_kind(kind, mine, base)[1])
    answered = [a["passkeys"] - b["passkeys"] for a, b in zip(mine, base, strict=True) if "passkey" in a]
    return made | ({"answered": paired_shares(answered)} if answered else {})


def show_differences(results: Mapping[str, Sequence[Mapping[str, float]]], against: str) -> None:
    print(f"\nless {against}, with 95 % intervals")
    for label, mine in results.items():
        for kind, found in differences(mine, results[against]).items():
            bounds = "" if found.low is None or found.high is None else f" ({found.low:+.4f} .. {found.high:+.4f})"
            print(f"{label:50} {kind:>8} {found.mean:+8.4f}{bounds} of {found.n}")


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    shown = [kind for kind in KINDS if f"{kind}_nats" in rows[0]]
    print(f"\n{'way':42}" + "".join(f" {kind:>8} {'diff':>8} {'± se':>7}" for kind in shown) + " found")
    for one in rows:
        numbers = (
            f" {one[f'{kind}_nats']:8.4f} {one[f'{kind}_diff']:+8.4f} {one.get(f'{kind}_se', math.nan):7.4f}"
            for kind in shown
        )
        found = [f"{one[a]}/{one[b]}" for a, b in (("found", "needles"), ("passkeys", "passkeys_n")) if a in one]
        print(f"{one['way']:42}{''.join(numbers)} {' '.join(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="`default`, or a folder")
    parser.add_argument("--text", type=Path, action="append", default=[], help="file to read; may be repeated")
    parser.add_argument("--passkeys", type=int, default=0, help="prompts with a passkey, at as many depths")
    parser.add_argument("--through", action="store_true", help="every way reads the prefixes, too")
    parser.add_argument("--length", type=size, required=True, help="tokens of the prefix, e.g. 32k")
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the model; default as `rpe3d compare`")
    parser.add_argument("--only", default=",".join(WAYS), help="ways to measure, with commas between; default all")
    parser.add_argument("--text-tokens", type=size, default=TEXT, help="tokens of the text probe; default %(default)s")
    given = parser.parse_args()
    sets = {"published": (SHIPS, *PUBLISHED), "rests": RESTS, "full": FULL}
    if given.only in ("layers", *sets):
        picked = sets.get(given.only, ())
    else:
        picked = tuple(WAYS[choice("way", name, WAYS)] for name in given.only.split(","))
    if not given.text and given.passkeys < 1:
        raise ConfigError("there is nothing to read", "give --text or --passkeys")
    texts = read_texts(given.text) if given.text else []
    loaded = load(given.model, dtype=getattr(torch, given.dtype) if given.dtype else None)
    model: Any = loaded.model
    if given.only == "layers":
        picked = by_layers(model.config.num_hidden_layers)
    chosen = {way.name: way for way in (ALL, *picked)}
    count = model.config.num_hidden_layers
    if lacking := [layer for way in picked for layer in way.layers if layer >= count]:
        raise ConfigError(f"the model has {count} layers, so none has the number {lacking[0]}", "try --only layers")
    name = Path(loaded.source).name.removesuffix(".gguf")
    shape = facts(model)
    law: Any = make_law("3d-rpe", context=max(shape["pretrained"], given.length + TEXT + given.text_tokens), **shape)
    draw = random.Random(0)
    excerpts = [
        (text.name, *prefix_and_probes(loaded.tokenizer, text, given.length, law.window, draw, given.text_tokens))
        for text in texts
    ]
    for i in range(given.passkeys):
        depth = (i + 0.5) / given.passkeys
        trial = passkey_and_probe(loaded.tokenizer, given.length, depth, SEED + i)
        excerpts.append((f"passkey {i + 1}", *trial))
    origin = stamp(cuda=model.device.type == "cuda") | {"model": name, "length": str(given.length)}
    origin["prefix"] = "each way" if given.through else "all keys + faded"
    for path in (given.model, *map(str, given.text)):
        origin["recipe"] = origin["recipe"].replace(f" {path}", f" {Path(path).name}")
    study = Study(model, law)
    study.watched = any(way.summary == "representatives" for way in chosen.values())
    path = given.out / f"choosing-{name}-windows.csv"
    known = read_each(path, origin)
    results: dict[str, list[dict[str, float]]] = {way: [] for way in chosen}
    rows: list[dict[str, Any]] = []
    for title, prefix, probes in excerpts:
        missing = {label: way for label, way in chosen.items() if (title, label) not in known}
        if missing and not given.through:
            study.read(prefix)

        @cache
        def answers(way: Way, prefix: Sequence[int] = prefix, probes: Sequence[Probe] = probes) -> Answers:
            if given.through:
                study.read(prefix, None if way == ALL else way)
            return study.nats([probe.ids for probe in probes], way)

        keys = None
        if missing and probes[0].kind == "text" and all(way.name in chosen for way in (NEAR, *FINDERS)):
            keys = key_tokens(answers(NEAR)[0][0], [answers(way)[0][0] for way in FINDERS])
        for label, way in missing.items():
            known[title, label] = measure(probes, answers(way), keys)
            append(path, origin | {"excerpt": title, "way": label} | known[title, label])
        for label in chosen:
            results[label].append(known[title, label])
        rows = [origin | row(label, mine, results[ALL.name]) for label, mine in results.items()]
        write(given.out / f"choosing-{name}.csv", rows)
        print(f"read {title}", file=sys.stderr, flush=True)
    show(rows)
    if SHIPS.name in results:
        show_differences(results, SHIPS.name)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error.problem}\nhint: {error.hint}")
