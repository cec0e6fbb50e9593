"""An evaluation: every law at every length on every task, one row each, with the predictions that it is made of.

Results, schema 1: {"schema": 1, "kind": "eval", "command", "model": as in under.py, "versions", "settings": what every
row was made with, "data": {"suite:task": [{"name", "sha256", "n"}]}, "laws": {"label at length": the law}, "rows":
[{"law", "name", "parameters", "length", "context", "suite", "task", "metric", "score", "n", "empty", "status": "ok" |
"out of memory" | "skipped: why", "seconds", "samples_per_minute", "batch", "predictions": a path beside the file}]}.
Scores are percents, for `ppl` perplexities, for `copy` losses. Seconds are of the run that finished the row, with the
making of its prompts; samples per minute are of generation alone.
"""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.evaluate.compare import silent, versions
from rpe3d.evaluate.ranks import ranks
from rpe3d.evaluate.results import SCHEMA, locked, write_json
from rpe3d.evaluate.row import OUT_OF_MEMORY, Progress
from rpe3d.evaluate.suites import store
from rpe3d.evaluate.suites.ask import PROBES, Ask, Task, title
from rpe3d.evaluate.suites.chat import Chat
from rpe3d.evaluate.suites.data import Data
from rpe3d.evaluate.suites.generate import Generator, generator
from rpe3d.evaluate.suites.measure import Advance, Means, predict, probe
from rpe3d.evaluate.suites.predictions import Score
from rpe3d.evaluate.suites.under import Place, about, laws_of, own_parameters, under
from rpe3d.evaluate.texts import Text
from rpe3d.geometry import Law

Row = dict[str, Any]


def evaluate(
    model: Any,
    chat: Chat,
    ask: Ask,
    *,
    data: Mapping[Task, Data],
    texts: Mapping[Task, Sequence[Text]],
    file: Path | None = None,
    overwrite: bool = False,
    name: str | None = None,
    command: str | None = None,
    generate: Generator | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The results of `ask`; the model is left as it was.

    With `file` they are written there after each row, and predictions beside it after each batch; what is there already
    is kept. `generate` may be another engine than the model's own.
    """
    laws = laws_of(model, ask.laws, ask.lengths)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "eval",
        "command": command or shlex.join(sys.argv),
        "model": about(model, name or model.config.name_or_path),
        "versions": versions(),
        "settings": ask.to_dict(chat.form),
        "data": origins(data, texts),
        "laws": {
            f"{label} at {length}": law.to_dict() for (label, length), law in laws.items() if isinstance(law, Law)
        },
        "rows": [],
    }
    here = ranks()
    generate = generate or generator(model, chat)
    means = Means(model=model, chat=chat, generate=generate, ask=ask, data=data, texts=texts, ranks=here)
    writes = file if here.first else None
    with nullcontext() if writes is None else locked(writes):
        before = here.from_first(None if writes is None else store.check(writes, content, overwrite))
        for part in ("data", "laws"):
            content[part] = (before or content)[part] | content[part]
        rows: dict[store.Key, Row] = {store.key_of(row): row for row in (before or content)["rows"]}
        finished = {key for key, row in rows.items() if row["status"] == "ok"}
        waiting = [(place, task) for place in laws for task in ask.tasks if (*place, *task) not in finished]
        if writes is not None and before is None:
            store.start_over(writes, [(*place, *task) for place, task in waiting], overwrite)
        for done, (place, task) in enumerate(waiting):
            key = (*place, *task)
            kept = None if file is None else store.predictions_file(file, key)
            if writes is not None:
                write_json(writes, content | {"rows": list(rows.values())})

            def advance(part: float, done: int = done, what: str = f"{place[0]} at {place[1]}: {title(task)}") -> None:
                progress(what, done + part, len(waiting))

            rows[key] = _row(means, place, laws[place], task, kept, advance)
            if file is not None and rows[key]["status"] == "ok":
                rows[key]["predictions"] = str(store.predictions_file(Path(file.name), key))
        content["rows"] = list(rows.values())
        if writes is not None:
            write_json(writes, content)
    return content


def origins(data: Mapping[Task, Data], texts: Mapping[Task, Sequence[Text]]) -> dict[str, list[dict[str, Any]]]:
    """What the questions and texts of each task were."""
    read = {title(task): [{"name": d.name, "sha256": d.sha256, "n": len(d.records)}] for task, d in data.items()}
    return read | {
        title(task): [{"name": text.name, "sha256": text.sha256, "n": len(text.content)} for text in some]
        for task, some in texts.items()
    }


def _row(
    means: Means, place: Place, law: Law | ConfigError | None, task: Task, kept: Path | None, advance: Advance
) -> Row:
    """One task under one law. Running out of memory is the row's result, not the end."""
    label, length = place
    row: Row = {"law": label, "name": None, "parameters": {}, "length": length, "context": None}
    row |= {"suite": task[0], "task": task[1], "metric": None, "score": None, "n": 0, "empty": 0, "status": "ok"}
    row |= {"seconds": 0.0, "samples_per_minute": None, "batch": means.ask.batch, "predictions": None}
    if isinstance(law, ConfigError):
        return row | {"status": f"skipped: {law}"}
    if law is not None:
        row |= {"name": law.name, "context": law.context, "parameters": own_parameters(law)}
    advance(0.0)
    began = time.perf_counter()
    score = _within_memory(means, law, length, task, kept, advance)
    row["seconds"] = round(time.perf_counter() - began, 3)
    if score is None:
        return row | {"status": OUT_OF_MEMORY}
    row |= {name: getattr(score, name) for name in ("metric", "score", "n", "empty")}
    return row | {"samples_per_minute": score.pace}


def _within_memory(
    means: Means, law: Law | None, length: int, task: Task, kept: Path | None, advance: Advance
) -> Score | None:
    """The score; None where memory ran out."""
    try:
        with under(means.model, law):
            return (probe if task[0] in PROBES else predict)(means, task, length, kept, advance)
    except (torch.OutOfMemoryError, MemoryError):
        pass  # the traceback holds tensors until here
    gc.collect()
    torch.cuda.empty_cache()
    return None
