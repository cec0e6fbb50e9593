"""The tables of docs/results.md, made from the rows and windows in benchmarks/results.

    python tools/site/results.py docs/results.md

Rewrite whatever stands between `<!-- results.py KIND MODEL -->` and `<!-- end -->`. The kinds are `headline` (ours and
the best of the others, all models), `table` (every law by length), `intervals` (how much higher the others are),
`longppl`, `longppl-outside`, `ruler`, `suites` (means of LongBench and L-Eval) and `tasks` (their tasks).
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from rpe3d.drawing.axes import short
from rpe3d.evaluate.paired import Difference, key_difference, mean_difference, paired_shares

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- results\.py ([\w-]+) ?(\S*) -->\n).*?(<!-- end -->)", re.S)
COLUMNS = ("ppl", "tail_ppl", "copy_nll", "passkey")
TINY = "3d-rpe:chunk=128,window=512,reach=1024"
DEPLOYED = "dca:attention_factor=deployed"
TUNED = "`3d-rpe`, as `tune` picks it"
BESIDE = "as `tune` picks it, with `full=all`"
DENSE = "`3d-rpe`, all far keys"
TASKS = 11
"""Tasks of RULER that need no download."""
SUITES = {"longbench": ("LongBench", 16), "leval": ("L-Eval", 4)}
"""Suites with downloaded data: their names, and how many of their tasks were asked."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model: its file of results, which laws are ours, which laws are shown under which names, and digits."""

    name: str
    title: str
    pretrained: int
    lengths: tuple[int, ...]
    tuned: str
    """What `rpe3d tune` picks beyond the pretrained length."""
    at_home: str
    """What stands for it at the pretrained length: exact RoPE where the model uses all of that."""
    chosen: str
    """The choice whose RULER and LongPPL were measured."""
    dense: str
    laws: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    """Laws that the pictures show beside ours."""
    digits: int = 2

    def shown(self, law: str) -> str:
        return self.names.get(law, f"`{law}`")

    def ours(self, length: int) -> str:
        """Return what `tune` picks for a length, or the other choice where only that was measured."""
        if length <= self.pretrained:
            return self.at_home
        return self.tuned if (self.tuned, length) in rows(self.name) else self.chosen


MODELS = {
    "smollm2": Model(
        name="smollm2",
        title="SmolLM2-135M",
        pretrained=8192,
        lengths=(8192, 16384, 32768, 65536),
        tuned="3d-rpe:reach=3840,far=120",
        at_home="3d-rpe:far=128",
        chosen="3d-rpe:far=128",
        dense="3d-rpe",
        laws=(
            "3d-rpe:reach=3840,far=120",
            "3d-rpe:reach=3840,far=120,full=all",
            "3d-rpe:reach=3840,far=240",
            "3d-rpe:far=128",
            "3d-rpe",
            "dca",
            DEPLOYED,
            "self-extend",
            "dpe",
            "lampe",
            "leaky-rerope",
            "rerope",
            "streaming-llm",
            "string",
            "yarn",
            "ntk",
            "linear",
            "rope",
            "3d-rpe:focus=1,fade=.25",
        ),
        names={
            "3d-rpe:reach=3840,far=120": TUNED,
            "3d-rpe:reach=3840,far=120,full=all": BESIDE,
            "3d-rpe:reach=3840,far=240": "... with `far=240`, twice as many blocks",
            "3d-rpe": DENSE,
            DEPLOYED: "`dca`, as deployed",
        },
        beside=(
            "3d-rpe:reach=3840,far=240",
            "3d-rpe:far=128",
            "3d-rpe",
            "streaming-llm",
            "dca",
            DEPLOYED,
            "leaky-rerope",
            "self-extend",
            "rerope",
            "lampe",
            "yarn",
        ),
    ),
    "tinyllama": Model(
        name="tinyllama",
        title="TinyLlama-1.1B",
        pretrained=2048,
        lengths=(2048, 4096, 8192, 16384),
        tuned="3d-rpe:far=32",
        at_home="rope",
        chosen=f"{TINY},far=32",
        dense=f"{TINY},focus=1,fade=.5,sinks=1",
        laws=(
            "3d-rpe:far=32",
            f"{TINY},far=32",
            f"{TINY},far=64",
            f"{TINY},focus=1,fade=.5,sinks=1",
            "dca",
            DEPLOYED,
            "self-extend:window=512",
            "leaky-rerope:window=512",
            "rerope:window=1024",
            "dpe",
            "lampe",
            "streaming-llm",
            "string",
            "yarn",
            "ntk",
            "linear",
            "rope",
            "3d-rpe-dual-chunk",
            "3d-rpe-definition",
        ),
        names={
            "3d-rpe:far=32": TUNED,
            f"{TINY},far=32": "`3d-rpe:window=512,far=32`",
            f"{TINY},far=64": "`3d-rpe:window=512,far=64`",
            f"{TINY},far=32,decay=.7": "`3d-rpe:window=512,far=32,decay=.7`",
            f"{TINY},focus=1,fade=.5,sinks=1": DENSE,
            DEPLOYED: "`dca`, as deployed",
        },
        beside=(
            f"{TINY},far=32",
            f"{TINY},focus=1,fade=.5,sinks=1",
            "streaming-llm",
            "dca",
            DEPLOYED,
            "self-extend:window=512",
            "leaky-rerope:window=512",
            "rerope:window=1024",
            "lampe",
            "yarn",
        ),
    ),
    "qwen2.5-coder": Model(
        name="qwen2.5-coder",
        title="Qwen2.5-Coder-1.5B",
        pretrained=32768,
        lengths=(32768, 65536, 131072, 262144),
        tuned="3d-rpe:chunk=512,far=1024",
        at_home="rope",
        chosen="3d-rpe:far=512",
        dense="3d-rpe",
        laws=(
            "3d-rpe:chunk=512,far=1024",
            "3d-rpe:chunk=512,far=1024,full=all",
            "3d-rpe:far=512",
            "3d-rpe:far=512,decay=.8",
            "3d-rpe:far=128",
            "3d-rpe:far=128,window=4096",
            "3d-rpe",
            "dca",
            "yarn",
            "streaming-llm",
            "rope",
        ),
        names={"3d-rpe:chunk=512,far=1024": TUNED, "3d-rpe:chunk=512,far=1024,full=all": BESIDE, "3d-rpe": DENSE},
        beside=("3d-rpe:far=512", "3d-rpe:far=128", "3d-rpe", "dca", "yarn", "streaming-llm"),
        digits=3,
    ),
}


@dataclass
class Row:
    """What a law did at a length: the number of every window, copy and passkey, by column, and the commits."""

    items: dict[str, dict[str, float]] = field(default_factory=lambda: {column: {} for column in COLUMNS})
    commits: set[str] = field(default_factory=set)

    def number(self, column: str) -> float:
        """Return the number of a column: perplexities are of the mean loss, passkeys are counted."""
        found = self.items[column].values()
        if column == "passkey":
            return sum(found)
        mean = math.fsum(found) / len(found)
        return mean if column == "copy_nll" else math.exp(mean)


@cache
def rows(model: str) -> dict[tuple[str, int], Row]:
    """Return the rows of a model's comparison by law and length."""
    made: dict[tuple[str, int], Row] = {}
    with (RESULTS / f"compare-large-{model}-windows.csv").open(newline="", encoding="utf-8") as file:
        for given in csv.DictReader(file):
            row = made.setdefault((given["law"], int(given["length"])), Row())
            row.commits.add(given["commit"])
            what, value = given["what"], float(given["value"])
            if given["kind"] == "window":
                row.items["ppl"][what], row.items["tail_ppl"][what] = value, float(given["tail"])
            elif given["kind"] == "copy":
                row.items["copy_nll"][what] = value
            elif given["kind"] == "passkey":
                row.items["passkey"][f"{float(what):.4f}"] = value
    return made


def difference(model: str, length: int, column: str, law: str, other: str) -> Difference | None:
    """Return how much higher a law's number is than another's, item by item; None without the same items."""
    kept = rows(model)
    if (law, length) not in kept or (other, length) not in kept:
        return None
    mine, base = (kept[name, length].items[column] for name in (law, other))
    if not base or mine.keys() != base.keys():
        return None
    made = [mine[what] - base[what] for what in base]
    return paired_shares(made) if column == "passkey" else mean_difference(made)


def not_beaten(model: Model, length: int, column: str, laws: Sequence[str]) -> list[str]:
    """Return the laws that are the best of a column, or not behind it beyond the noise."""
    kept = rows(model.name)
    there = [law for law in laws if (law, length) in kept and kept[law, length].items[column]]
    sign = -1 if column == "passkey" else 1
    best = min(there, key=lambda law: sign * kept[law, length].number(column))
    away = {law: difference(model.name, length, column, law, best) for law in there}
    return [
        law for law, one in away.items() if law == best or (one is not None and one.low is not None and not one.clear)
    ]


def number(row: Row, column: str, digits: int) -> str:
    """Write one number as the tables do; a dash where it was not measured."""
    if not row.items[column]:
        return "–"
    x = row.number(column)
    return f"{x:.0f}" if column == "passkey" or x >= 100 else f"{x:.{2 if column == 'copy_nll' else digits}f}"


def cell(model: Model, law: str, length: int, bold: Mapping[str, Sequence[str]]) -> str:
    """Write the four numbers of a law at a length, in two lines that do not wrap."""
    row = rows(model.name).get((law, length))
    if row is None:
        return "not measured"
    made = [(column, number(row, column, model.digits)) for column in COLUMNS]
    ppl, tail, copy, keys = (f"**{text}**" if law in bold[column] else text for column, text in made)
    return f"{ppl}&nbsp;/&nbsp;{tail}<br>{copy}&nbsp;/&nbsp;{keys}"


def table(model: Model) -> list[str]:
    """Return every law by length, the best of each column in bold, and those within the noise of it."""
    keys = len(rows(model.name)[model.tuned, 2 * model.pretrained].items["passkey"])
    heads = [f"{short(length)} ({length / model.pretrained:g}x)" for length in model.lengths]
    first = f"law: ppl / tail, copy / keys of {keys}"
    lines = [f"| {first} | {' | '.join(heads)} | commit |", "|---" * (len(heads) + 2) + "|"]
    bold = {length: {c: not_beaten(model, length, c, model.laws) for c in COLUMNS} for length in model.lengths}
    for law in model.laws:
        cells = [cell(model, law, length, bold[length]) for length in model.lengths]
        commits = sorted(set().union(*(row.commits for (name, _), row in rows(model.name).items() if name == law)))
        name = f"**{model.shown(law)}**" if law in (model.tuned, model.dense) else model.shown(law)
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(commits)} |")
    return lines


def headline() -> list[str]:
    """Return ours, as `tune` picks it, and the best of the others in each column, for every model and length."""
    lines = ["| | perplexity | tail | copy | passkeys |", "|---" * 5 + "|"]
    for model in MODELS.values():
        for length in model.lengths:
            mine = model.ours(length)
            peers = [law for law in model.laws if law != mine and not law.startswith("3d-rpe")]
            name = "" if mine == model.tuned else f", `{mine}`"
            place = f"{model.title}, {short(length)} ({length / model.pretrained:g}x){name}"
            cells = [_beside(model, length, column, mine, peers) for column in COLUMNS]
            lines.append(f"| {place} | {' | '.join(cells)} |")
    return lines


def _beside(model: Model, length: int, column: str, mine: str, peers: Sequence[str]) -> str:
    """Write our number and the best of the peers that have one, with its name."""
    kept = rows(model.name)
    there = [law for law in peers if (law, length) in kept and kept[law, length].items[column]]
    bold = not_beaten(model, length, column, [mine, *there])

    def text(law: str) -> str:
        said = number(kept[law, length], column, model.digits)
        return f"**{said}**" if there and law in bold else said

    own = text(mine) + (f"/{len(kept[mine, length].items[column])}" if column == "passkey" else "")
    if not there:
        return f"{own}, no other measured"
    sign = -1 if column == "passkey" else 1
    best = min(there, key=lambda law: sign * kept[law, length].number(column))
    name = model.names[best].replace("`", "") if best in model.names else best.partition(":")[0]
    return f"{own} vs {text(best)} {name}"


def intervals(model: Model) -> list[str]:
    """Return how much higher other laws are than ours, with 95 % intervals; bold where ours is behind."""
    lines = ["| length | law | ppl | tail | copy | passkeys |", "|---|---|---|---|---|---|"]
    for length in model.lengths:
        mine = model.ours(length)
        for law in model.laws:
            made = [difference(model.name, length, column, law, mine) for column in COLUMNS]
            if law == mine or all(one is None for one in made):
                continue
            cells = [_signed(column, one) for column, one in zip(COLUMNS, made, strict=True)]
            lines.append(f"| {short(length)} | {model.shown(law)} | {' | '.join(cells)} |")
    return lines


def _signed(column: str, away: Difference | None) -> str:
    if away is None or away.low is None or away.high is None:
        return "not measured" if away is None else f"{away.mean:+.2f}"
    scale, form, unit = (
        (1.0, ".2f", "") if column == "copy_nll" else (100.0, ".0f" if column == "passkey" else ".1f", " %")
    )
    mean, low, high = (scale * x for x in (away.mean, away.low, away.high))
    text = f"{mean:+{form}}{unit} ({low:{form}}&nbsp;..&nbsp;{high:{form}})"
    behind = away.high < 0 if column != "passkey" else away.low > 0
    return f"**{text}**" if behind else text


def long_perplexities(outside: bool) -> list[str]:
    """Return LongPPL of every law and model, ours first, and how many nats a key token costs more than under ours.

    outside: by key tokens that another model found; else by those that the model found itself.
    """
    found: dict[tuple[str, int], dict[str, dict[str, tuple[float, int]]]] = {}
    with (RESULTS / "longppl-cuda.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if (line["finder"] != "itself") != outside:
                continue
            laws = found.setdefault((line["model"], int(line["length"])), {})
            laws.setdefault(line["law"], {})[line["text"]] = float(line["nll"]), int(line["key_tokens"])
    lines = ["| model | law | LongPPL | nats per key token, above ours |", "|---|---|---|---|"]
    for (name, length), laws in found.items():
        model = MODELS[name]
        base = model.tuned if model.tuned in laws else model.chosen
        count = sum(n for _, n in laws[base].values())
        means = {law: math.fsum(nll * n for nll, n in texts.values()) / count for law, texts in laws.items()}
        for law in sorted(laws, key=lambda law: (law != base, means[law])):
            texts = laws[law]
            mine, ours = (
                {
                    "length": length,
                    "long_ppl": 0.0,
                    "key_windows": [{"text": t, "start": 0, "n": n, "nll": x} for t, (x, n) in of.items()],
                }
                for of in (texts, laws[base])
            )
            shown = "0" if law == base else _signed("copy_nll", key_difference(mine, ours))
            place = f"{model.title}, {short(length)}, {count} key tokens" if law == base else ""
            lines.append(f"| {place} | {model.shown(law)} | {math.exp(means[law]):.2f} | {shown} |")
    return lines


def ruler() -> list[str]:
    """Return the mean of RULER's tasks under ours, all far keys, `dca` and stock RoPE, where all were measured."""
    heads = ("mean of 11 tasks", "samples per task", "chosen far keys", "all far keys", "`dca`", "`rope`", "commit")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model in MODELS.values():
        scores: dict[tuple[int, str], dict[str, tuple[float, int]]] = {}
        commits: dict[tuple[int, str], set[str]] = {}
        with (RESULTS / f"ruler-{model.name}-cuda.csv").open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if not line["commit"].startswith("<="):  # other defaults
                    of = scores.setdefault((int(line["length"]), line["law"]), {})
                    of[line["task"]] = float(line["score"]), int(line["n"])
                    commits.setdefault((int(line["length"]), line["law"]), set()).add(line["commit"])
        for length in sorted({length for length, _ in scores}):
            laws = (model.chosen, model.dense, "dca", "rope")
            asked = [scores.get((length, law), {}) for law in laws]
            if not any(len(one) == TASKS for one in asked):
                continue
            samples = min(n for one in asked for _, n in one.values())
            cells = [
                f"{math.fsum(score for score, _ in one.values()) / TASKS:.1f}" if len(one) == TASKS else "not measured"
                for one in asked
            ]
            place = f"{model.title}, {short(length)} ({length / model.pretrained:g}x)"
            whole = [law for law, one in zip(laws, asked, strict=True) if len(one) == TASKS]
            measured = sorted(set().union(*(commits[length, law] for law in whole)))
            lines.append(f"| {place} | {samples} | {' | '.join(cells)} | {', '.join(measured)} |")
    return lines


@dataclass
class Scores:
    """What a law scored in the suites with downloaded data: score and samples by suite and task, and the commits."""

    by_suite: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    commits: set[str] = field(default_factory=set)

    def mean(self, suite: str) -> str:
        """Write the mean of a suite, and of how many tasks where some were not asked."""
        scores = [score for score, _ in self.by_suite[suite].values()]
        mean = f"{math.fsum(scores) / len(scores):.1f}"
        return mean if len(scores) == SUITES[suite][1] else f"{mean} ({len(scores)} tasks)"


@cache
def evaluated() -> dict[tuple[str, str], Scores]:
    """Return the scores of the models with peers, by model and by law as the tables name it."""
    made: dict[tuple[str, str], Scores] = {}
    for name in ("smollm2", "tinyllama"):
        model = MODELS[name]
        shown = {law: f"`{law}`, {short(4 * model.pretrained)}" for law in ("rope", "yarn", "dca")}
        shown["rope"] = f"`rope`, {short(model.pretrained)}"
        shown["3d-rpe"] = f"`3d-rpe`, all far keys, {short(4 * model.pretrained)}"
        shown[model.chosen] = f"`3d-rpe`, chosen far keys, {short(4 * model.pretrained)}"
        found = {law: made.setdefault((model.title, title), Scores()) for law, title in shown.items()}
        with (RESULTS / "evaluation-cuda.csv").open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if line["model"].startswith(model.title) and line["suite"] in SUITES:
                    scores = found[line["law"]]
                    of = scores.by_suite.setdefault(line["suite"], {})
                    of[line["task"]] = float(line["score"]), int(line["n"])
                    scores.commits.add(line["commit"])
    return made


def suite_means() -> list[str]:
    """Return the means of LongBench and L-Eval by model and law."""
    lines = [f"| | {' | '.join(f'{name}, mean of {n}' for name, n in SUITES.values())} | commit |", "|---" * 4 + "|"]
    for (title, law), scores in evaluated().items():
        means = [scores.mean(suite) for suite in SUITES]
        lines.append(f"| {title}, {law} | {' | '.join(means)} | {', '.join(sorted(scores.commits))} |")
    return lines


def suite_tasks() -> list[str]:
    """Return the score of every task of LongBench and L-Eval by model and law."""
    heads = [f"{title}: {law}" if law.startswith("`rope`") else law for title, law in evaluated()]
    lines = [f"| task (samples) | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for suite in SUITES:
        first = next(iter(evaluated().values()))
        for task, (_, samples) in first.by_suite[suite].items():
            asked = [scores.by_suite[suite].get(task) for scores in evaluated().values()]
            cells = [f"{one[0]:.1f}" if one else "not measured" for one in asked]
            lines.append(f"| {task} ({samples}) | {' | '.join(cells)} |")
    return lines


def written(page: str) -> str:
    """Return a page with every table in it made anew."""

    def made(match: re.Match[str]) -> str:
        kind, name = match.group(2), match.group(3)
        whole = {"headline": headline, "ruler": ruler, "suites": suite_means, "tasks": suite_tasks}
        whole |= {"longppl": partial(long_perplexities, False), "longppl-outside": partial(long_perplexities, True)}
        lines = whole[kind]() if kind in whole else {"table": table, "intervals": intervals}[kind](MODELS[name])
        return "\n".join([match.group(1).rstrip(), "", *lines, "", match.group(4)])

    return MARKED.sub(made, page)


def main() -> None:
    """Write the tables of the pages that are named."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
