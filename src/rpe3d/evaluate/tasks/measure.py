"""Measure one row: predict a task batch by batch and score it, or run a probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.keys import Keys, check_keys, positions
from rpe3d.evaluate.ranks import Ranks
from rpe3d.evaluate.settings import Ask
from rpe3d.evaluate.tasks import Task, suite, title
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.choices import log_likelihoods
from rpe3d.evaluate.tasks.generate import Generator
from rpe3d.evaluate.tasks.longppl import FEWEST
from rpe3d.evaluate.tasks.predictions import Parts, Predictions, Record, Score, parts_of
from rpe3d.evaluate.tasks.probes import PROBES, Bench, merged
from rpe3d.evaluate.tasks.questions import Data
from rpe3d.evaluate.tasks.sample import Sample
from rpe3d.evaluate.texts import Text, check_tokens, tokenize
from rpe3d.evaluate.under import growing
from rpe3d.text import opening

Advance = Callable[[float], None]
"""Called with the share of a row that is done."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """What every row is measured with."""

    model: Any
    chat: Chat
    generate: Generator
    ask: Ask
    data: Mapping[Task, Data]
    texts: Mapping[Task, Sequence[Text]]
    """Texts of `ppl` and `copy`, and haystacks."""
    ranks: Ranks
    keys: Keys = field(default_factory=dict)
    """LongPPL's key tokens by length."""
    last: dict[tuple[Task, int], list[Sample]] = field(default_factory=dict)
    """The questions made last: other laws are asked the same ones, and RULER's take a minute to make."""


def samples_of(means: Means, task: Task, length: int) -> list[Sample]:
    """Return the samples of a task, as many as requested."""
    if (task, length) not in means.last:
        means.last.clear()
        means.last[task, length] = _samples(means, task, length)
    return means.last[task, length]


def _samples(means: Means, task: Task, length: int) -> list[Sample]:
    group, name = task
    ask = means.ask
    texts = [text.content for text in means.texts.get(task, ())]
    made: list[Sample]
    if group in ("ruler", "needle"):
        made = suite(group).samples(name, means.chat, length, ask.limit, " ".join(texts))
        return made
    data = means.data.get(task)
    records = data and data.at.get(length, data).records
    if data is not None and not records:
        raise ConfigError(f"{data.name} has no questions of length {length}", "choose a --length that has a file")
    more: list[Any] = [ask.authors] if group in ("longbench", "leval") else []
    if group in ("babilong", "kv", "infinitebench"):
        more = [ask.seed, texts] if group == "babilong" else [ask.seed]
    made = suite(group).samples(name, records, means.chat, length, ask.limit, *more)
    return made


def predict(means: Means, task: Task, length: int, file: Predictions | None, advance: Advance) -> Score:
    """Score a task. The first process writes predictions to `file` batch by batch; existing ones are not redone.

    The longest prompts come first: whatever does not fit into memory fails at once, and prompts of a batch have similar
    lengths.
    """
    group, name = task
    samples = samples_of(means, task, length)
    writes = file if means.ranks.first else None
    earlier = means.ranks.together(lambda: writes.kept() if writes else [])[0]
    done = {record["index"]: record for record in earlier}
    sizes = {i: sum(map(len, sample.prompts)) for i, sample in enumerate(samples)}
    waiting = sorted((i for i in sizes if i not in done), key=lambda i: -sizes[i])
    ask, count, began = means.ask, means.ranks.count, time.perf_counter()
    size = 1 if growing(means.model) else ask.batch  # a batch would be read with the frequencies of its longest prompt
    batches = [waiting[at : at + size] for at in range(0, len(waiting), size)]
    for at in range(0, len(batches), count):
        mine = batches[at : at + count][means.ranks.index : means.ranks.index + 1]
        parts = means.ranks.together(partial(_records, means, samples, task, mine))
        records = [record for part in parts for record in part]
        done |= {record["index"]: record for record in records}
        means.ranks.together(partial(_keep, writes, records))
        advance(len(done) / len(samples))
    pace = round(60 * len(waiting) / (time.perf_counter() - began), 2) if waiting else None
    score: Score = suite(group).score(name, [done[i] for i in sizes])
    return replace(score, pace=pace)


def _keep(file: Predictions | None, records: Sequence[Record]) -> None:
    if file is not None:
        file.append(records)


def _records(means: Means, samples: Sequence[Sample], task: Task, batches: Sequence[Sequence[int]]) -> list[Record]:
    records: list[Record] = []
    for batch in batches:
        chosen = [samples[i] for i in batch]
        if chosen[0].choices:
            records += [{"index": i, **_likeliest(means, task, samples[i])} for i in batch]
            continue
        sample = chosen[0]  # a task's samples differ in their prompts alone
        said = [
            means.generate([one.prompts[turn] for one in chosen], sample.max_new, sample.line_only)
            for turn in range(len(sample.prompts))
        ]
        for i, one, answers in zip(batch, chosen, zip(*said, strict=True), strict=True):
            records.append({"index": i, **suite(task[0]).record(one, answers)})
    return records


def _likeliest(means: Means, task: Task, sample: Sample) -> Record:
    """Answer with the likeliest of a sample's choices, and record how likely each is."""
    found = log_likelihoods(means.model, means.chat, sample.prompts[0], sample.choices)
    said = sample.choices[found.index(max(found))]
    return {**suite(task[0]).record(sample, [said]), "log_likelihoods": [round(one, 6) for one in found]}


def probe(means: Means, task: Task, length: int, file: Predictions | None, advance: Advance) -> Score:
    """Measure perplexity, copying, passkeys or LongPPL as `rpe3d compare` does; `file` keeps each trial's result."""
    group, _ = task
    texts = [tokenize(means.chat.tokenizer, text) for text in means.texts.get(task, ())]
    if group in ("ppl", "longppl"):
        check_tokens(texts, [length])
    bench = Bench(
        model=means.model,
        tokenizer=means.chat.tokenizer,
        texts=texts,
        first=opening(means.chat.tokenizer),
        settings=means.ask,
        measures=(group,),
        ranks=means.ranks,
        progress=lambda _, done, total: advance(min(1.0, done / total)),
    )
    if group == "longppl":
        check_keys(means.keys, {length: bench.whole_windows(length)})
        bench.keys = positions(means.keys)
    bench.total = bench.work(length)
    chosen, protocol = PROBES[group], means.ask.protocol
    told = chosen.told(merged(means.ranks.together(lambda: chosen.measure(bench, length))), length, protocol)
    if told is None:
        raise ConfigError(f"{title(task)} gave no finite number", "check the model's weights and dtype")
    if told.get("long_ppl", 0.0) is None:
        raise ConfigError(f"longppl has {told['key_tokens']} key tokens, fewer than {FEWEST}", "raise --windows")
    trials = told[chosen.kind]
    records = [{"index": i, **{name: one[name] for name in chosen.recorded}} for i, one in enumerate(trials)]
    writes = file if means.ranks.first else None
    if writes is not None:
        writes.path.unlink(missing_ok=True)
    means.ranks.together(partial(_keep, writes, records))
    parts: Parts = {}
    if group == "passkey":
        found = [{"depth": round(100 * trial["depth"])} for trial in trials]
        parts = parts_of(found, [float(trial["correct"]) for trial in trials], ["depth"])
    metric = chosen.metric.format(protocol=protocol)
    return Score(score=chosen.score(told), n=len(trials), metric=metric, parts=parts)
