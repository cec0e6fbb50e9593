"""`rpe3d demo`: the main job on the default model: laws compared past its pretrained length, a passkey, and a report.

The JSON is that of `rpe3d compare` with one window per law; rows of stock RoPE and 3D-RPE also have a passkey. Like a
comparison, a demo that was interrupted resumes where it stopped.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import command_line, folder, laws, need, size

if TYPE_CHECKING:
    from rpe3d.evaluate import Settings
    from rpe3d.evaluate.grid import Progress

LAWS = "rope,yarn,dca,3d-rpe"
ASKED = ("rope", "3d-rpe")  # for the passkey: a forward each, so not of every law
LENGTH = 11776  # stock RoPE holds on until about 11k here; a forward takes three quarters of a minute on two cores
DEPTH = 0.1  # of the prompt before the passkey


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, default=Path("demo"), help="folder for the report; default ./demo")
    add("--json", metavar="FILE", type=Path, help="keep the rows here; default DIR/compare.json")
    add("--length", metavar="N", type=size, default=LENGTH, help="tokens in a window and in the prompt; default 11776")
    add("--laws", metavar="A,B", default=LAWS, help=f"laws to compare; default {LAWS}")


def run(arguments: Namespace) -> int:
    need("cli", "rich", "matplotlib")
    need("models", "transformers")
    given = laws(arguments.laws)
    from rpe3d.cli.compare import print_table, progress_bar
    from rpe3d.evaluate import Settings
    from rpe3d.evaluate.findings import findings
    from rpe3d.evaluate.report import write_report
    from rpe3d.evaluate.store import check
    from rpe3d.models.load import DEFAULT, load

    settings = Settings(laws=given, lengths=[arguments.length], windows=1, measures=["ppl"], passkeys=1)
    out = folder("--out", arguments.out)
    file: Path = arguments.json or out / "compare.json"
    check(file, {"settings": settings.to_dict()})
    loaded = load(DEFAULT, dtype=_fast_dtype())
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    with progress_bar() as progress:
        results = _measure(loaded, settings, file, progress)
    written = write_report(results, out)
    print_table(results)
    for sentence in findings(results):
        print(sentence, file=sys.stderr)
    page = next(path for path in written if path.suffix == ".html")
    print(f"The report lies at {page}, its numbers at {file}.", file=sys.stderr)
    return 0


def _measure(loaded: Any, settings: Settings, file: Path, progress: Progress) -> dict[str, Any]:
    """The comparison, and then the passkeys that are not in the file yet."""
    from rpe3d.evaluate import compare
    from rpe3d.evaluate.store import locked, read, write_json

    kept = {row["law"]: row for row in (read(file) or {"rows": []})["rows"] if row["status"] == "ok"}
    asked = [entry.label for entry in settings.entries if entry.name in ASKED]
    forwards = sum(entry.label not in kept for entry in settings.entries)
    forwards += sum(label not in kept or not kept[label]["passkeys"] for label in asked)
    with _layer_by_layer(loaded.model, settings.lengths[0], forwards, progress) as say:
        results = compare(
            loaded.model,
            loaded.tokenizer,
            settings,
            file=file,
            name="default",
            command=command_line(),
            progress=lambda what, done, total: say(what),
        )
        for row in results["rows"]:
            if row["law"] in asked and row["status"] == "ok" and not row["passkeys"]:
                say(f"passkey, {row['law']} at {row['length']}")
                row |= _passkey(loaded, row)
                with locked(file):
                    write_json(file, results)
    return results


def _fast_dtype() -> Any:
    """bfloat16 where the processor computes with it; None, which is the device's own default, elsewhere."""
    import torch

    capable = torch.cpu.get_capabilities()
    return torch.bfloat16 if capable.get("avx512_bf16") or capable.get("amx_bf16") else None


def _passkey(loaded: Any, row: dict[str, Any]) -> dict[str, Any]:
    """A passkey near the beginning of a prompt as long as the window, as a row has it."""
    from rpe3d.evaluate import make_passkey, passkey
    from rpe3d.evaluate.under import under
    from rpe3d.geometry import make_law
    from rpe3d.models import facts
    from rpe3d.text import opening

    trial = make_passkey(loaded.tokenizer, row["length"], DEPTH, 0, opening(loaded.tokenizer))
    law = make_law(row["name"], context=row["context"], **facts(loaded.model), **row["parameters"])
    with under(loaded.model, law):
        said = passkey(loaded.model, trial)
    correct = said == trial.answer
    answer = {"depth": DEPTH, "key": trial.key, "answer": loaded.tokenizer.decode(said), "correct": correct}
    return {"passkey": int(correct), "passkey_n": 1, "passkeys": [answer]}


@contextmanager
def _layer_by_layer(model: Any, length: int, forwards: int, progress: Progress) -> Iterator[Any]:
    """A bar that moves with every layer: a forward takes most of a minute. Yields the function that names the work."""
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
