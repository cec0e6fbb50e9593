"""Compare laws: every law at every length on the same windows, copies and passkeys, one row each.

Results, schema 1: {"schema": 1, "kind": "compare", "command", "model": {"name", "architecture", "parameters",
"pretrained", "head_dim", "rope_theta", "dtype", "device", "fingerprint": {"weights", "config", "tokenizer"}: digests
as in origin.py}, "versions": {package: version}, "settings": as asked for, "texts": [{"name", "sha256", "tokens"}],
"rows": [as in row.py, laws x lengths in the order asked for, each with "made_from": a digest of model, versions,
settings and texts, and "commit": of the checkout that measured it, or null], "keys": only with LongPPL, as in keys.py}.
Files without fingerprints, from earlier versions of rpe3d, can be read and reported on but not resumed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rpe3d.evaluate.grid import Progress, fill, silent
from rpe3d.evaluate.keys import KeyTokens
from rpe3d.evaluate.origin import fingerprint, made_from, versions
from rpe3d.evaluate.ranks import ranks
from rpe3d.evaluate.row import measure_row
from rpe3d.evaluate.settings import Settings
from rpe3d.evaluate.store import SCHEMA, Key, Row, Store
from rpe3d.evaluate.tasks.probes import Bench, Found
from rpe3d.evaluate.texts import Text, check_tokens, default_texts, tokenize
from rpe3d.evaluate.under import about, check_all_layers, laws_at, raise_if_all_refuse
from rpe3d.models import as_stock, facts
from rpe3d.models.own_context import as_the_checkpoint_has_it
from rpe3d.text import opening


def compare(
    model: Any,
    tokenizer: Any,
    settings: Settings,
    *,
    texts: Sequence[Text] = (),
    file: Path | None = None,
    keys: Path | None = None,
    fixed_keys: bool = False,
    overwrite: bool = False,
    name: str | None = None,
    command: str | None = None,
    progress: Progress = silent,
    probe: Callable[[Bench, int], Found] | None = None,
) -> dict[str, Any]:
    """Compare laws on `texts` (default: Python's language reference) and return the results; the model is left stock.

    With `file`, results are written there after each row, and finished rows in it are kept. `keys` is a file of
    LongPPL's key tokens, which is read if it exists and written otherwise. With `fixed_keys` it is only read, and the
    characters that are key in its longest windows are key at every length. `name` and `command` are recorded as the
    origin of the model and of the results. `probe` replaces the measurement of a row; the results record its name.
    """
    texts = list(texts) or default_texts()
    tokens = [tokenize(tokenizer, text) for text in texts]
    if settings.reads_text:
        check_tokens(tokens, settings.lengths)
    known = facts(as_stock(model))
    asked = [as_the_checkpoint_has_it(model, entry) for entry in settings.entries]
    laws = laws_at(asked, settings.lengths, known, settings.context)
    for entry in asked:  # a law that refuses all lengths has wrong parameters
        raise_if_all_refuse(laws[entry.label, length] for length in settings.lengths)
    check_all_layers(model, laws.values())
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "compare",
        "command": command or shlex.join(sys.argv),
        "model": about(model, name or model.config.name_or_path, known)
        | {"fingerprint": fingerprint(model, tokenizer)},
        "versions": versions(),
        "settings": recorded(settings, fixed_keys),
        "texts": [
            {"name": text.name, "sha256": text.sha256, "tokens": len(read.ids)}
            for text, read in zip(texts, tokens, strict=True)
        ],
        "rows": [],
    }
    if probe is not None:
        content["probe"] = f"{probe.__module__}.{probe.__qualname__}"
    bench = Bench(
        model=model,
        tokenizer=tokenizer,
        texts=tokens,
        first=opening(tokenizer),
        settings=settings,
        measures=settings.measures,
        ranks=ranks(),
        progress=progress,
    )
    entries = {entry.label: entry for entry in asked}
    origin = made_from(content)
    found = None
    if "longppl" in settings.measures:
        found = KeyTokens(
            bench=bench,
            laws=laws,
            pretrained=known["pretrained"],
            results=content,
            texts=texts,
            file=keys,
            fixed=fixed_keys,
        )
        content["keys"] = found.read()

    own = () if probe is None else (probe,)

    def measure(waiting: Sequence[Key]) -> Iterator[tuple[Key, Row]]:
        if found is not None:
            found.prepare(waiting)
        bench.total += sum(bench.work(length, label) for label, length in waiting)
        if found is not None:
            found.find(store.write)
        for label, length in waiting:
            yield (label, length), measure_row(bench, entries[label], length, laws[label, length], *own)

    store = Store(
        file=file if bench.ranks.first else None,
        content=content,
        parts=("law", "length"),
        keys=list(laws),
        origin=lambda content, key: origin,
    )
    fill(store, measure, bench.ranks, overwrite)
    return content


def recorded(settings: Settings, fixed_keys: bool) -> dict[str, Any]:
    """Return the settings as results hold them; `fixed_keys` is among them only where it is asked for."""
    return settings.to_dict() | ({"fixed_keys": True} if fixed_keys else {})
