"""`rpe3d compare`: which law is best for a model, and how far it stretches; the JSON is described in evaluate."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import kept, laws, need, results_file, sizes
from rpe3d.config import ConfigError, choice

if TYPE_CHECKING:
    from rpe3d.evaluate.grid import Progress
    from rpe3d.evaluate.paired import Difference

LAWS = "rope,yarn,dca,3d-rpe"
LENGTHS = "8k,16k,32k"
WITHOUT = "there are fewer than three windows or trials, or windows overlap: raise --windows, or give longer --texts"
KEYS = (
    "longppl: read its key tokens from here, or find and write them. Default: tokens that are key to the model itself "
    "under any of the laws that read the whole text"
)
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face name or folder, a .gguf file, or `default`")
    add("--laws", metavar="A,B", default=LAWS, help=f"laws, `all`, name:parameter=value, or law files; default {LAWS}")
    add("--lengths", metavar="N,N", type=sizes, default=LENGTHS, help=f"tokens in a window; default {LENGTHS}")
    add_text_arguments(parser)
    add(
        "--measures",
        metavar="M,M",
        default="ppl,copy,passkey",
        help="some of ppl,copy,passkey,longppl; default the first three",
    )
    add("--keys", metavar="FILE", type=Path, help=KEYS)
    add_probe_arguments(parser)
    add("--batch", metavar="N", type=int, default=1, help="windows, or copies, in one forward; default 1")
    add_model_arguments(parser)
    add("--json", metavar="FILE", type=Path, help="keep the rows here; the same command resumes where it stopped")
    add("--overwrite", action="store_true", help="remove all rows of --json, and start over")
    add("--against", metavar="LAW", help="print a second table: every law less this one, with 95 %% intervals")
    add("--report", metavar="DIR", type=Path, help="write a page with the table and its plots (and DIR/compare.json)")


def add_text_arguments(parser: ArgumentParser) -> None:
    """Add the texts to measure on."""
    parser.add_argument(
        "--texts",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="UTF-8 texts, plain or as .xz, .gz, .bz2; default: the Python language reference of this Python",
    )


def add_probe_arguments(parser: ArgumentParser) -> None:
    """Add how much of each probe is measured."""
    add = parser.add_argument
    add("--protocol", default="windows", help="perplexity: windows (default), overlap_mean or sliding_new_tokens")
    add("--windows", metavar="N", type=int, help="windows of text in a row; default 4, in the other protocols all")
    add("--copies", metavar="N", type=int, default=4, help="copy trials in a row; default 4")
    add("--passkeys", metavar="N", type=int, default=10, help="passkeys in a row; default 10")
    add("--seed", metavar="N", type=int, default=0, help="seed of copies and passkeys; default 0")


def add_model_arguments(parser: ArgumentParser) -> None:
    """Add where and how the model runs."""
    add = parser.add_argument
    add("--device", help="cpu, cuda, cuda:1; default the GPU if there is one")
    add("--dtype", choices=DTYPES, help="type of the weights; default bfloat16 on a GPU, float32 on a CPU")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    need("models", "transformers")
    if arguments.report is not None:
        need("cli", "matplotlib")
    given = all_laws() if arguments.laws == "all" else laws(arguments.laws)
    from rpe3d.evaluate import Settings, compare, read_texts
    from rpe3d.evaluate.findings import evaluator
    from rpe3d.evaluate.ranks import ranks
    from rpe3d.evaluate.store import check
    from rpe3d.evaluate.texts import check_bytes
    from rpe3d.models import pretrained_length

    settings = Settings(
        laws=given,
        lengths=arguments.lengths,
        measures=arguments.measures.split(","),
        **{name: getattr(arguments, name) for name in ("protocol", "windows", "copies", "passkeys", "seed", "batch")},
    )
    if arguments.against:
        choice("law", arguments.against, [law.label for law in given])
    if arguments.keys is not None and "longppl" not in settings.measures:
        raise ConfigError("--keys is given without longppl", "add longppl to --measures, or leave --keys out")
    texts = read_texts(arguments.texts)
    check_bytes(texts, settings.lengths)
    file = results_file(arguments, "compare.json")
    if file is not None:
        check(file, {} if arguments.overwrite else {"settings": settings.to_dict()})
    first = ranks().first
    loaded = load_model(arguments)
    pretrained = pretrained_length(loaded.model)
    for law in given:
        law.check(pretrained)
    with progress_bar(first) as progress:
        results = compare(
            loaded.model,
            loaded.tokenizer,
            settings,
            texts=texts,
            file=file,
            keys=arguments.keys,
            progress=progress,
            **kept(arguments),
        )
    if first:
        print_table(results)
        if arguments.against:
            print_differences(results, arguments.against)
        for text in results["texts"]:
            if text["tokens"] < max(settings.lengths):
                note = f"{text['name']} has {text['tokens']} tokens, so longer windows are of other texts"
                print(f"note: {note}", file=sys.stderr)
        for length, found in results.get("keys", {}).items():
            print(f"note: key tokens at {length} were found by {evaluator(found)}", file=sys.stderr)
        report(results, arguments.report, file)
    return 0


def all_laws() -> list[Any]:
    from rpe3d.geometry import LAWS as known

    return laws(",".join(known))


def load_model(arguments: Namespace) -> Any:
    """Load the model that the arguments name, on this process's device; notes go to stderr."""
    import torch

    from rpe3d.evaluate.ranks import ranks
    from rpe3d.models.load import load

    here = ranks()
    loaded = load(
        arguments.model,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        device=arguments.device or here.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    for note in loaded.notes if here.first else ():
        print(f"note: {note}", file=sys.stderr)
    return loaded


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Show a bar on stderr with the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    bar = Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown, speed_estimate_period=3600
    )
    with bar:
        task = bar.add_task("loading", total=None)

        def advance(what: str, done: float, total: float) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield advance


def print_table(results: dict[str, Any]) -> None:
    """Print the rows on stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("law", overflow="fold")
    long = ("longppl", "key tokens") if any(row.get("key_tokens") is not None for row in results["rows"]) else ()
    for column in ("length", "ppl", "tail ppl", "copy nll", "passkey", *long, "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in results["rows"]:
        passkeys = "" if row["passkey_n"] is None else f"{row['passkey']}/{row['passkey_n']}"
        measured = [_short(row[name]) for name in ("ppl", "tail_ppl", "copy_nll")]
        speed = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.0f}"
        status = "" if row["status"] == "ok" else row["status"]
        table.add_row(
            row["law"], str(row["length"]), *measured, passkeys, *(_key_tokens(row) if long else ()), speed, status
        )
    Console().print(table)


def _key_tokens(row: dict[str, Any]) -> tuple[str, str]:
    """LongPPL and how many tokens it is of; too few have no number."""
    n, value = row.get("key_tokens"), row.get("longppl")
    return ("", "") if n is None else ("none" if value is None else _short(value), str(n))


def print_differences(results: dict[str, Any], against: str) -> None:
    """Print every law less one of them: perplexity in percent, copying in nats, passkeys as a share."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rpe3d.evaluate.paired import paired

    scales = {"nll": 100.0, "tail_nll": 100.0, "copy_nll": 1.0, "passkey": 1.0}
    rows = paired(results, against)
    if any("long_nll" in row for row in rows):
        scales["long_nll"] = 100.0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"less {against} (95 % interval)", title_justify="left")
    table.add_column("law", overflow="fold")
    for column in ("length", "ppl %", "tail ppl %", "copy nll", "passkey", "longppl %")[: len(scales) + 1]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["law"], str(row["length"]), *(_differing(row.get(name), k) for name, k in scales.items()))
    Console().print(table)
    if any(name in row and row[name].low is None for row in rows for name in scales):
        print(f"note: a difference has no interval where {WITHOUT}", file=sys.stderr)


def _differing(difference: Difference | None, scale: float) -> str:
    if difference is None:
        return ""
    bounds = [f"{scale * bound:+.2f}" for bound in (difference.low, difference.high) if bound is not None]
    return f"{scale * difference.mean:+.2f}" + (f" ({' .. '.join(bounds)})" if bounds else "")


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}" if number < 1000 else f"{number:.4g}"


def report(results: dict[str, Any], place: Path | None, file: Path | None) -> None:
    """Write the page, where one is asked for, and say where everything lies."""
    written = [] if file is None else [file]
    if place is not None:
        from rpe3d.evaluate.report import write_report

        written += write_report(results, place)
    if written:
        print("wrote " + ", ".join(map(str, written)), file=sys.stderr)
