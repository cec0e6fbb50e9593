"""Every law at every length on the same windows, copies and passkeys: one row each.

Results, schema 1: {"schema": 1, "kind": "compare", "command", "model": {"name", "architecture", "parameters",
"pretrained", "head_dim", "rope_theta", "dtype", "device", "fingerprint": {"weights", "config", "tokenizer"}: digests
as in origin.py}, "versions": {package: version}, "settings": what was asked, "texts": [{"name", "sha256", "tokens"}],
"rows": [as in row.py, laws x lengths in the order asked, each with "made_from": a digest of model, versions, settings
and texts]}. Files without fingerprints, of rpe3d before them, can be read and reported on but are not resumed.
"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rpe3d import __version__
from rpe3d.config import ConfigError
from rpe3d.evaluate.origin import fingerprint, made_from
from rpe3d.evaluate.ranks import ranks
from rpe3d.evaluate.results import SCHEMA, locked, rows_of, write_json
from rpe3d.evaluate.row import Bench, Progress, measure_row
from rpe3d.evaluate.settings import Settings
from rpe3d.evaluate.texts import Text, check_tokens, default_texts, tokenize
from rpe3d.geometry import Law, make_law
from rpe3d.models import extend, law_of, restore
from rpe3d.text import opening


def silent(what: str, done: float, total: float) -> None:
    """Progress that nobody watches."""


def compare(
    model: Any,
    tokenizer: Any,
    settings: Settings,
    *,
    texts: Sequence[Text] = (),
    file: Path | None = None,
    overwrite: bool = False,
    name: str | None = None,
    command: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The results of a comparison on `texts` (default: Python's language reference); leaves the model stock.

    With `file` they are written there after each row, and finished rows that are there already are kept. `name` and
    `command` are what the results say of the model's and their own origin.
    """
    texts = list(texts) or default_texts()
    tokens = [tokenize(tokenizer, text) for text in texts]
    check_tokens(tokens, settings.lengths)
    facts = model_facts(model)
    laws = _laws(settings, facts)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "compare",
        "command": command or shlex.join(sys.argv),
        "model": about(model, name or model.config.name_or_path, facts)
        | {"fingerprint": fingerprint(model, tokenizer)},
        "versions": versions(),
        "settings": settings.to_dict(),
        "texts": [
            {"name": text.name, "sha256": text.sha256, "tokens": len(read.ids)}
            for text, read in zip(texts, tokens, strict=True)
        ],
        "rows": [],
    }
    bench = Bench(
        model=model,
        tokenizer=tokenizer,
        texts=tokens,
        first=opening(tokenizer),
        settings=settings,
        ranks=ranks(),
        progress=progress,
    )
    writes = file if bench.ranks.first else None
    with ExitStack() as held:
        kept = bench.ranks.together(partial(_earlier, held, writes, content, overwrite))[0]
        bench.total = sum(bench.work(length) for label, length in laws if (label, length) not in kept)
        entries = {entry.label: entry for entry in settings.entries}
        rows, origin = dict(kept), {"made_from": made_from(content)}
        for place in [place for place in laws if place not in kept]:
            label, length = place
            rows[place] = measure_row(bench, entries[label], length, laws[place]) | origin
            content["rows"] = [rows[at] for at in laws if at in rows]  # with those of an earlier run that come later
            if writes is not None:
                write_json(writes, content)
    content["rows"] = [rows[at] for at in laws]
    return content


def _earlier(held: ExitStack, file: Path | None, content: dict[str, Any], overwrite: bool) -> dict[Any, Any]:
    """The rows that `file` has already; until `held` ends, no other run writes there."""
    if file is None:
        return {}
    held.enter_context(locked(file))
    return rows_of(file, content, overwrite)


def versions() -> dict[str, str]:
    """What can change a number."""
    packages = {package: version(package) for package in ("torch", "transformers", "tokenizers")}
    return {"rpe3d": __version__, **packages, "python": platform.python_version()}


def model_facts(model: Any) -> dict[str, Any]:
    """What `make_law` needs to know of a model; leaves it stock."""
    if law_of(model) is not None:
        restore(model)
    law = law_of(extend(model, "rope", context=model.config.get_text_config(decoder=True).max_position_embeddings))
    restore(model)
    assert law is not None
    return {key: value for key, value in law.to_dict().items() if key not in ("name", "context")}


def about(model: Any, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """What a results file says of a model."""
    return {
        "name": name,
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        **{key: facts[key] for key in ("pretrained", "head_dim", "rope_theta")},
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
    }


def _laws(settings: Settings, facts: dict[str, Any]) -> dict[tuple[str, int], Law | ConfigError]:
    """Every law at every length as its documentation has it for that length; where it has none, its refusal.

    A law that refuses all lengths has wrong parameters: that is raised.
    """
    made: dict[tuple[str, int], Law | ConfigError] = {}
    for entry in settings.entries:
        refusals = []
        for length in settings.lengths:
            try:
                context = max(length, facts["pretrained"])
                made[entry.label, length] = make_law(entry.law, context=context, **facts, **entry.parameters)
            except ConfigError as refusal:
                made[entry.label, length] = refusal
                refusals.append(refusal)
        if len(refusals) == len(settings.lengths):
            raise refusals[0]
    return made
