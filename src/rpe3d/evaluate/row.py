"""One row of a comparison: a law at a length, measured by as many processes as there are.

A row: {"law": label, "name": the law's name, "length", "context", "parameters": its own, "status": "ok" |
"out of memory" | "skipped: why", "ppl", "tail_ppl", "copy_nll", "passkey": number found, "passkey_n", "tokens": read
by the model, "seconds", "tokens_per_second": of one process, the median over the forwards of windows with their losses,
"windows": [{"text", "start", "nll", "tail_nll"}], "positions": [{"from", "to", "nll", "n"}], "copies": [{"nll",
"seed"}], "passkeys": [{"depth", "key", "answer": up to the first wrong token, "correct"}], "long_ppl": null for fewer
than 30 key tokens, "key_tokens": how many, "key_windows": [{"text", "start", "n": key tokens, "nll": null for none}]}.
Anything not asked for or not measured is null or empty. Rows of earlier versions lack LongPPL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.memory import within_memory
from rpe3d.evaluate.tasks.probes import PROBES, Bench, Found, merged
from rpe3d.evaluate.under import under
from rpe3d.geometry import Law, LawSpec

OUT_OF_MEMORY = "out of memory"
NOT_FINITE = "skipped: the model's likelihoods are not finite numbers"


def measure_row(
    bench: Bench,
    entry: LawSpec,
    length: int,
    law: Law | ConfigError,
    probe: Callable[[Bench, int], Found] | None = None,
) -> dict[str, Any]:
    """Measure one law at one length. Running out of memory in any process becomes the row's result, not the end.

    `probe` takes all of the bench's measures at once, replacing their own probes.
    """
    row: dict[str, Any] = {"law": entry.label, "name": entry.name, "length": length, "context": None, "status": "ok"}
    row |= dict.fromkeys(("ppl", "tail_ppl", "copy_nll", "passkey", "passkey_n", "tokens_per_second"))
    row |= {"long_ppl": None, "key_tokens": None}
    row |= {"tokens": 0, "seconds": 0.0, "parameters": dict(entry.parameters)}
    row |= {"windows": [], "positions": [], "copies": [], "passkeys": [], "key_windows": []}
    bench.what, bench.label = f"{entry.label} at {length}", entry.label
    end = bench.done + bench.work(length, entry.label)
    if isinstance(law, ConfigError):
        bench.advance(end - bench.done)
        return row | {"status": f"skipped: {law}"}
    row |= {"context": law.context, "parameters": law.own}
    began = time.perf_counter()
    everyone = bench.ranks.gather(within_memory(lambda: _found(bench, law, length, probe)))
    bench.advance(end - bench.done)
    row["seconds"] = round(time.perf_counter() - began, 3)
    parts = [part for part in everyone if part is not None]
    if len(parts) < len(everyone):
        return row | {"status": OUT_OF_MEMORY}
    row |= _summary(bench, merged(parts), length)
    return row if probe is None else row | {"tokens": length}


def _found(bench: Bench, law: Law, length: int, probe: Callable[[Bench, int], Found] | None) -> Found:
    """Measure this process's share of the row under the law."""
    with under(bench.model, law):
        bench.advance()
        if probe is not None:
            return probe(bench, length)
        found: Found = {}
        for measure in bench.measures:
            found |= PROBES[measure].measure(bench, length)
        return found


def _summary(bench: Bench, found: Found, length: int) -> dict[str, Any]:
    """Return the row's numbers from what all processes found."""
    summary: dict[str, Any] = {}
    for measure in bench.measures:
        told = PROBES[measure].told(found, length, bench.settings.protocol)
        if told is None:
            return {"status": NOT_FINITE}
        summary |= told
    summary["tokens"] = length * sum(len(found[PROBES[measure].kind]) for measure in bench.measures)
    return summary
