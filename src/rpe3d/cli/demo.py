"""`rpe3d demo`: read a document longer than the default model's context and ask about it, under four laws.

Under each law the document is read once, for its perplexity, and the model is then asked for the notes hidden in it.
The JSON is that of `rpe3d compare`, with one window per law and "probe", which names what measured it. Like a
comparison, an interrupted demo resumes where it stopped.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import command_line, folder, laws, need, size
from rpe3d.cli.terminal import STDOUT, note, print_json, progress_bar, say

if TYPE_CHECKING:
    from rpe3d.evaluate import Settings
    from rpe3d.evaluate.grid import Progress

LAWS = "rope,yarn,dca,3d-rpe"
LENGTH = 9472  # beyond 8192; attention is most of a forward, and grows with its square


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, default=Path("demo"), help="folder for the report; default ./demo")
    add("--json", metavar="FILE", type=Path, help="write the rows here; default DIR/compare.json; - also prints them")
    add("--length", metavar="N", type=size, default=LENGTH, help="tokens in the document plus a question; default 9472")
    add("--laws", "--law", metavar="A,B", default=LAWS, help=f"laws to compare; default {LAWS}")


def run(arguments: Namespace) -> int:
    need("cli", "rich", "matplotlib")
    need("models", "transformers")
    given = laws(arguments.laws)
    from rpe3d.cli.compare import print_table
    from rpe3d.evaluate import Settings
    from rpe3d.evaluate.findings import findings
    from rpe3d.evaluate.report import write_report
    from rpe3d.evaluate.store import check
    from rpe3d.evaluate.tasks.document import NOTES
    from rpe3d.models.load import DEFAULT, load

    settings = Settings(
        laws=given, lengths=[arguments.length], windows=1, measures=["ppl", "passkey"], passkeys=len(NOTES)
    )
    out = folder("--out", arguments.out)
    printed = arguments.json == STDOUT
    file: Path = out / "compare.json" if arguments.json is None or printed else arguments.json
    check(file, {"settings": settings.to_dict()})
    loaded = load(DEFAULT, dtype=_fast_dtype())
    for text in loaded.notes:
        note(text)
    with progress_bar() as progress:
        results = _measure(loaded, settings, file, progress)
    written = write_report(results, out)
    if printed:
        print_json(results)
    else:
        print_table(results)
    for sentence in (*findings(results), *_answers(results)):
        say(sentence)
    page = next(path for path in written if path.suffix == ".html")
    say(f"The report is at {page}, and its numbers are in {file}.")
    return 0


def _measure(loaded: Any, settings: Settings, file: Path, progress: Progress) -> dict[str, Any]:
    """Compare the laws on one document and the questions about it."""
    from rpe3d.evaluate import compare
    from rpe3d.evaluate.store import read
    from rpe3d.evaluate.tasks.document import read_and_ask

    kept = {row["law"] for row in (read(file) or {"rows": []})["rows"] if row["status"] == "ok"}
    forwards = sum(entry.label not in kept for entry in settings.entries)
    with _layer_by_layer(loaded.model, settings.lengths[0], forwards, progress) as say:
        return compare(
            loaded.model,
            loaded.tokenizer,
            settings,
            file=file,
            name="default",
            command=command_line(),
            progress=lambda what, done, total: say(what),
            probe=read_and_ask,
        )


def _answers(results: dict[str, Any]) -> list[str]:
    """Return a sentence per question with the answer under each law, from the farthest note to the nearest."""
    rows = [row for row in results["rows"] if row["passkeys"]]
    said = []
    for number, trial in enumerate(rows[0]["passkeys"] if rows else ()):
        back = (1 - trial["depth"]) * rows[0]["length"]
        told = ", ".join(f"{row['law']} says {row['passkeys'][number]['answer']!r}" for row in rows)
        said.append(f"Asked for {trial['key']!r}, about {back:,.0f} tokens back: {told}.")
    return said


def _fast_dtype() -> Any:
    """Return bfloat16 if the processor computes in it, else None, which means the device's default."""
    import torch

    capable = torch.cpu.get_capabilities()
    return torch.bfloat16 if capable.get("avx512_bf16") or capable.get("amx_bf16") else None


@contextmanager
def _layer_by_layer(model: Any, length: int, forwards: int, progress: Progress) -> Iterator[Any]:
    """Advance the bar with every layer, since a forward takes most of a minute; yield a function that sets its text."""
    layers, what, seen = model.get_decoder().layers, "", 0

    def say(now: str) -> None:
        nonlocal what
        what = now
        progress(what, min(seen / (length * len(layers)), forwards), forwards)

    def count(layer: Any, given: Any, out: Any) -> None:
        nonlocal seen
        seen += given[0].shape[1]
        say(what)

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield say
    finally:
        for hook in hooks:
            hook.remove()
