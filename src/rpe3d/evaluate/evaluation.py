"""Evaluate every law at every length on every task, one row each, and keep the predictions behind each row.

Results, schema 1: {"schema": 1, "kind": "eval", "command", "model": as in under.py with "fingerprint": {"weights",
"config", "tokenizer", "generation"}: digests as in origin.py, "versions", "settings": what every row was made with,
"data": {"suite:task", or "suite:task at length" for questions of one length: [{"name", "sha256", "n"}]}, "laws":
{"label at length": the law, null for the model as it is}, "rows": [{"law", "name", "parameters", "length", "context",
"suite", "task", "metric", "score", "n", "empty", "status": "ok" | "out of memory" | "skipped: why", "seconds",
"samples_per_minute", "batch", "predictions": a path next to the file, "made_from": a digest of all that decides the
row, which each line of its predictions also carries, "commit": of the checkout that finished it, or null, "parts": for
suites that have them, the scores of some samples with their number, e.g. {"difficulty": {"easy": [25.0, 4]}}}]}.
Scores are percentages, but perplexities for `ppl` and `longppl` and losses for `copy`. Seconds are those of the run
that finished the row; under the first law they include building the prompts, which the other laws share. Samples per
minute count generation only. The batch is that of the run that finished the row: it changes only rounding, so a run may
be resumed with another.
Files without fingerprints, from earlier versions of rpe3d, can be read but not resumed.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.grid import Progress, fill, silent
from rpe3d.evaluate.keys import FIND, Keys, offsets_of, read_keys, taken
from rpe3d.evaluate.memory import within_memory
from rpe3d.evaluate.origin import digest, fingerprint, generation, made_from, versions
from rpe3d.evaluate.ranks import ranks
from rpe3d.evaluate.row import OUT_OF_MEMORY
from rpe3d.evaluate.settings import Ask
from rpe3d.evaluate.store import SCHEMA, Key, Row, Store
from rpe3d.evaluate.tasks import PROBES, Task, title
from rpe3d.evaluate.tasks.chat import TEMPLATE, Chat
from rpe3d.evaluate.tasks.generate import Generator, generator
from rpe3d.evaluate.tasks.longppl import SHORT, truncation
from rpe3d.evaluate.tasks.measure import Advance, Means, predict, probe
from rpe3d.evaluate.tasks.perplexity import whole_windows
from rpe3d.evaluate.tasks.predictions import Predictions, Score, predictions_file, remove_predictions
from rpe3d.evaluate.tasks.questions import Data
from rpe3d.evaluate.texts import Text, tokenize
from rpe3d.evaluate.under import Cell, about_as_it_is, laws_of, under
from rpe3d.geometry import Law
from rpe3d.models import law_of
from rpe3d.models.own_context import pretrained_positions
from rpe3d.text import opening

LONG: Task = ("longppl", "")


def evaluate(
    model: Any,
    chat: Chat,
    ask: Ask,
    *,
    data: Mapping[Task, Data],
    texts: Mapping[Task, Sequence[Text]],
    file: Path | None = None,
    keys: Path | None = None,
    overwrite: bool = False,
    name: str | None = None,
    command: str | None = None,
    generate: Generator | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure what `ask` says and return the results; the model is left as it was.

    With `file`, results are written there after each row, and predictions next to it after each batch; finished ones
    are kept. `keys` is a file of LongPPL's key tokens. `generate` may be another engine than the model's own.
    """
    laws = laws_of(model, ask.entries, ask.lengths, ask.context)
    template = chat.tokenizer.chat_template if chat.form == TEMPLATE else None
    known = fingerprint(model, chat.tokenizer) | {"generation": generation(model, template)}
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "eval",
        "command": command or shlex.join(sys.argv),
        "model": about_as_it_is(model, name or model.config.name_or_path) | {"fingerprint": known},
        "versions": versions() | {package: _version(package) for package in ("wonderwords", "jieba")},
        "settings": {**ask.to_dict(chat.form), "engine": _engine(generate)},
        "data": origins(data, texts),
        "laws": {
            f"{label} at {length}": law and law.to_dict()
            for (label, length), law in laws.items()
            if not isinstance(law, ConfigError)
        },
        "rows": [],
    }
    found: Keys = {}
    if LONG in ask.tasks:
        found, said = _keys(keys, model, chat.tokenizer, known["tokenizer"], texts[LONG], ask)
        n = sum(len(window["keys"]) for of in said.values() for window in of["windows"])
        content["data"][title(LONG)] += [{"name": "key tokens", "sha256": digest(said), "n": n}]
    here = ranks()
    generate = generate or generator(model, chat)
    means = Means(model=model, chat=chat, generate=generate, ask=ask, data=data, texts=texts, ranks=here, keys=found)
    store = Store(
        file=file if here.first else None,
        content=content,
        parts=("law", "length", "suite", "task"),
        keys=[(*place, *task) for place in laws for task in ask.tasks],
        origin=origin,
        collects=True,
    )

    def measure(waiting: Sequence[Key]) -> Iterator[tuple[Key, Row]]:
        here.together(partial(_prepare, store, waiting, overwrite))
        turns = sorted(waiting, key=lambda key: (ask.lengths.index(key[1]), ask.tasks.index(key[2:])))
        for done, key in enumerate(turns):  # all laws on the same
            place, task = key[:2], key[2:]

            def advance(part: float, done: int = done, what: str = f"{place[0]} at {place[1]}: {title(task)}") -> None:
                progress(what, done + part, len(turns))

            kept = None if file is None else _predictions(file, content, key)
            row = _row(means, place, laws[place], task, kept, advance)
            if file is not None and row["status"] == "ok":
                row["predictions"] = str(predictions_file(Path(file.name), key))
            yield key, row

    fill(store, measure, here, overwrite)
    return content


def _keys(
    path: Path | None, model: Any, tokenizer: Any, fingerprint: str, texts: Sequence[Text], ask: Ask
) -> tuple[Keys, Keys]:
    """Read LongPPL's key tokens, as this model's tokenizer has them and as the file does.

    A model under one law cannot find its own without favouring itself.
    """
    said: Keys = {}

    def other(keys: Keys) -> Keys | None:
        said.update(keys)
        tokens, first = [tokenize(tokenizer, text) for text in texts], opening(tokenizer)
        windows = {length: whole_windows(tokens, length, ask.windows, first) for length in ask.lengths}
        law = law_of(model)
        pretrained = law.pretrained if law else pretrained_positions(model.config.get_text_config(decoder=True))
        short = SHORT if pretrained is None else truncation(pretrained).short
        return taken(keys, windows, offsets_of(tokenizer, texts, tokens), short)

    origin = {"tokenizer": fingerprint, "texts": {text.name: text.sha256 for text in texts}}
    found = None if path is None else read_keys(path, origin, other)
    if found is None:
        raise ConfigError(f"{path} does not exist" if path else "longppl needs key tokens: --keys is missing", FIND)
    return found, said or found


def origin(content: Mapping[str, Any], key: Key) -> str:
    """Return the digest of what a row of these results is made from."""
    law, length, *task = key
    shared = {part: content[part] for part in ("model", "versions", "settings")}
    name = title((task[0], task[1]))
    data = content["data"].get(f"{name} at {length}", content["data"].get(name))
    return made_from({**shared, "data": data, "law": content["laws"].get(f"{law} at {length}"), "row": list(key)})


def _predictions(file: Path, content: Mapping[str, Any], key: Key) -> Predictions:
    """Return the file of a row's predictions, and the digest of what they are made from."""
    return Predictions(path=predictions_file(file, key), made_from=origin(content, key))


def _prepare(store: Store, waiting: Sequence[Key], overwrite: bool) -> None:
    """Refuse predictions made from something else, or remove them, before the first is made.

    The results file comes first: predictions without one would be refused after a kill.
    """
    if store.file is None:
        return
    for key in () if overwrite else waiting:
        _predictions(store.file, store.content, key).check()
    store.write()
    if overwrite:
        remove_predictions(store.file)


def _version(package: str) -> str | None:
    """Return the version of a package that makes or scores some of the questions; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _engine(generate: Generator | None) -> str:
    """Return a name for the engine that answers: the model's own `generate`, or the caller's function."""
    if generate is None:
        return "transformers"
    return f"{generate.__module__}.{getattr(generate, '__qualname__', type(generate).__qualname__)}"


def origins(data: Mapping[Task, Data], texts: Mapping[Task, Sequence[Text]]) -> dict[str, list[dict[str, Any]]]:
    """Return the name, digest and size of each task's questions and texts; questions for one length come apart."""
    found: dict[str, list[dict[str, Any]]] = {}
    for task, d in data.items():
        parts = {f"{title(task)} at {length}": one for length, one in d.at.items()} or {title(task): d}
        found |= {name: [{"name": p.name, "sha256": p.sha256, "n": len(p.records)}] for name, p in parts.items()}
    for task, some in texts.items():
        read = [{"name": text.name, "sha256": text.sha256, "n": len(text.content)} for text in some]
        found[title(task)] = found.get(title(task), []) + read
    return found


def _row(
    means: Means, place: Cell, law: Law | ConfigError | None, task: Task, kept: Predictions | None, advance: Advance
) -> Row:
    """Measure one task under one law. A refusal, or running out of memory, becomes the row's result, not the end."""
    label, length = place
    row: Row = {"law": label, "name": None, "parameters": {}, "length": length, "context": None}
    row |= {"suite": task[0], "task": task[1], "metric": None, "score": None, "n": 0, "empty": 0, "status": "ok"}
    row |= {"seconds": 0.0, "samples_per_minute": None, "batch": means.ask.batch, "predictions": None}
    if isinstance(law, ConfigError):
        return row | {"status": f"skipped: {law}"}
    if law is not None:
        row |= {"name": law.name, "context": law.context, "parameters": law.own}
    advance(0.0)
    began = time.perf_counter()
    score = _measured(means, law, length, task, kept, advance)
    row["seconds"] = round(time.perf_counter() - began, 3)
    if isinstance(score, str):
        return row | {"status": score}
    row |= {name: getattr(score, name) for name in ("metric", "score", "n", "empty")}
    if score.parts:
        row["parts"] = {kind: {name: list(part) for name, part in some.items()} for kind, some in score.parts.items()}
    return row | {"samples_per_minute": score.pace}


def _measured(
    means: Means, law: Law | None, length: int, task: Task, kept: Predictions | None, advance: Advance
) -> Score | str:
    """Return the score, or the status of a row that has none."""

    def score() -> Score:
        with under(means.model, law):
            return (probe if task[0] in PROBES else predict)(means, task, length, kept, advance)

    try:
        return within_memory(score) or OUT_OF_MEMORY
    except ConfigError as refusal:
        return f"skipped: {refusal}"
