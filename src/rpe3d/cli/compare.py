"""`rpe3d compare`: find the best law for a model and how far it stretches; `evaluate.compare` describes the JSON."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import kept, laws, need, note_unused, results_file, size, sizes
from rpe3d.cli.model import MODEL, add_model_arguments, check_laws, check_loaded, load_model
from rpe3d.cli.terminal import STDOUT, new_table, note, print_json, progress_bar, room, say, show, width_of
from rpe3d.config import ConfigError, choice

LAWS = "rope,yarn,dca,3d-rpe"
LENGTHS = "8k,16k,32k"
LAW = "laws by name, name:parameter=value, LABEL=name:parameter=value, or law files"
MEASURED = ("context", "protocol", "windows", "copies", "passkeys", "seed", "batch")
WITHOUT = "there are fewer than three windows or trials, or windows overlap: raise --windows, or pass longer --texts"
CONTEXT = "build each law for N tokens, e.g. 64k, and measure it at all lengths; default: build it for each length"
KEYS = (
    "longppl: file of key tokens, written if it does not exist. Default: the tokens that are key for the model itself "
    "under any law that reads the whole text"
)
FIXED_KEYS = "longppl: what is key in the longest windows of --keys is key at every length; no key tokens are found"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--laws", "--law", metavar="A,B", default=LAWS, help=f"{LAW}; `all` for every law; default {LAWS}")
    add(
        "--lengths",
        "--length",
        metavar="N,N",
        type=sizes,
        default=LENGTHS,
        help=f"tokens in a window; default {LENGTHS}",
    )
    add("--context", metavar="N", type=size, help=CONTEXT)
    add_text_arguments(parser)
    add(
        "--measures",
        metavar="M,M",
        default="ppl,copy,passkey",
        help="any of ppl,copy,passkey,longppl; default: the first three",
    )
    add("--keys", metavar="FILE", type=Path, help=KEYS)
    add("--fixed-keys", action="store_true", help=FIXED_KEYS)
    add_probe_arguments(parser)
    add("--batch", metavar="N", type=int, default=1, help="windows or copies per forward pass; default 1")
    add_model_arguments(parser)
    add(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the rows here; the same command resumes a stopped run; - for stdout",
    )
    add("--overwrite", action="store_true", help="discard all rows of --json and start over")
    add("--against", metavar="LAW", help="also print each law's difference from this one, with 95 %% intervals")
    add("--report", metavar="DIR", type=Path, help="write a page with the table and plots (and DIR/compare.json)")


def add_text_arguments(parser: ArgumentParser) -> None:
    """Add --texts, the texts to measure on."""
    parser.add_argument(
        "--texts",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="UTF-8 text files, plain or .xz, .gz, .bz2; default: the language reference that ships with Python",
    )


def add_probe_arguments(parser: ArgumentParser) -> None:
    """Add the options that say how much of each probe is measured."""
    add = parser.add_argument
    add("--protocol", help="perplexity: windows (default), overlap_mean or sliding_new_tokens")
    add("--windows", metavar="N", type=int, help="windows of text per table row; default 4, or all in other protocols")
    add("--copies", metavar="N", type=int, help="copy trials per table row; default 4")
    add("--passkeys", metavar="N", type=int, help="passkeys per table row; default 10")
    add("--seed", metavar="N", type=int, help="seed of copies and passkeys; default 0")


PROBED = {
    "protocol": ("ppl",),
    "windows": ("ppl", "longppl"),
    "copies": ("copy",),
    "passkeys": ("passkey",),
    "seed": ("copy", "passkey"),
    "texts": ("ppl", "copy", "longppl"),
}
"""Options of `add_probe_arguments` and `add_text_arguments`, and the measures that they affect."""


def unmeasured(measures: Collection[str]) -> dict[str, str]:
    """Return the options that have no effect on these measures, each with the measures that it needs."""
    return {name: " or ".join(some) for name, some in PROBED.items() if not set(some) & set(measures)}


def asked_of(arguments: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that the user set."""
    return {name: given for name in names if (given := getattr(arguments, name)) is not None}


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    need("models", "transformers")
    if arguments.report is not None:
        need("cli", "matplotlib")
    given = laws(arguments.laws)
    from rpe3d.evaluate import Settings, compare, read_texts
    from rpe3d.evaluate.compare import recorded
    from rpe3d.evaluate.findings import evaluator
    from rpe3d.evaluate.keys import check_fixed
    from rpe3d.evaluate.ranks import ranks
    from rpe3d.evaluate.store import check
    from rpe3d.evaluate.texts import check_bytes

    settings = Settings(
        laws=given,
        lengths=arguments.lengths,
        measures=arguments.measures.split(","),
        **asked_of(arguments, MEASURED),
    )
    if arguments.against:
        choice("law", arguments.against, [law.label for law in given])
    if arguments.keys is not None and "longppl" not in settings.measures:
        raise ConfigError("--keys is given without longppl", "add longppl to --measures, or leave --keys out")
    if arguments.fixed_keys:
        check_fixed(arguments.keys)
    without = unmeasured(settings.measures)
    if arguments.json is None and arguments.report is None:
        without["overwrite"] = "--json or --report"
    if arguments.json == STDOUT and arguments.report is None:
        without["against"] = "a table: `--json -` prints the rows alone"
    note_unused(arguments, without)
    texts = read_texts(arguments.texts)
    if settings.reads_text:
        check_bytes(texts, settings.lengths)
    file = results_file(arguments, "compare.json")
    if file is not None:
        check(file, {} if arguments.overwrite else {"settings": recorded(settings, arguments.fixed_keys)})
    lengths = [settings.context] if settings.context else settings.lengths
    check_laws(arguments, given, lengths)
    first = ranks().first
    loaded = load_model(arguments)
    check_loaded(loaded.model, given)
    with progress_bar(first) as progress:
        results = compare(
            loaded.model,
            loaded.tokenizer,
            settings,
            texts=texts,
            file=file,
            keys=arguments.keys,
            fixed_keys=arguments.fixed_keys,
            progress=progress,
            **kept(arguments),
        )
    if first:
        if arguments.json == STDOUT:
            print_json(results)
        else:
            print_table(results)
        if arguments.against and arguments.json != STDOUT:
            print_differences(results, arguments.against)
        for text in results["texts"]:
            if settings.reads_text and text["tokens"] < max(settings.lengths):
                note(f"{text['name']} has {text['tokens']} tokens, so longer windows come from other texts")
        for length, found in results.get("keys", {}).items():
            note(f"key tokens at {length} were found by {evaluator(found)}")
        report(results, arguments.report, file, arguments.against)
    return 0


def print_table(results: dict[str, Any]) -> None:
    """Print the rows as a table on stdout."""
    long = ("longppl", "key tokens") if any(row.get("key_tokens") is not None for row in results["rows"]) else ()
    columns = ("law", "length", "ppl", "tail ppl", "copy nll", "passkey", *long, "tokens/s", "")
    table = new_table(*columns, words=("law", ""))
    for row in results["rows"]:
        passkeys = "" if row["passkey_n"] is None else f"{row['passkey']}/{row['passkey_n']}"
        measured = [_short(row[name]) for name in ("ppl", "tail_ppl", "copy_nll")]
        speed = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.0f}"
        status = "" if row["status"] == "ok" else row["status"]
        table.add_row(
            row["law"], str(row["length"]), *measured, passkeys, *(_key_tokens(row) if long else ()), speed, status
        )
    show(table)


def _key_tokens(row: dict[str, Any]) -> tuple[str, str]:
    """Format LongPPL and its number of key tokens; with too few tokens LongPPL has no value."""
    n, value = row.get("key_tokens"), row.get("long_ppl")
    return ("", "") if n is None else ("none" if value is None else _short(value), str(n))


def print_differences(results: dict[str, Any], against: str) -> None:
    """Print each law's difference from one of them: perplexity in percent, copying in nats, passkeys as a share.

    Each measure gets a column if the terminal has room for all of them, and a line otherwise.
    """
    from rpe3d.evaluate.paired import SHOWN, paired, signed

    rows = paired(results, against)
    measures = [name for name in SHOWN if any(name in row for row in rows)]
    title = f"difference from {against} (95 % interval)"
    table = new_table("law", "length", *(SHOWN[name].heading for name in measures), words=("law",), title=title)
    for row in rows:
        cells = [" ".join(signed(row[name], SHOWN[name])) if name in row else "" for name in measures]
        table.add_row(row["law"], str(row["length"]), *cells)
    if width_of(table) > room():
        table = new_table("law", "length", "", "difference", "95 % interval", words=("law",), title=f"from {against}")
        for row in rows:
            for name in (name for name in measures if name in row):
                table.add_row(row["law"], str(row["length"]), SHOWN[name].heading, *signed(row[name], SHOWN[name]))
    show(table)
    if any(name in row and row[name].low is None for row in rows for name in measures):
        note(f"a difference has no interval where {WITHOUT}")


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}" if number < 1000 else f"{number:.4g}"


def report(results: dict[str, Any], place: Path | None, file: Path | None, against: str | None = None) -> None:
    """Write the report page, if one is asked for, and name all files that were written."""
    written = [] if file is None else [file]
    if place is not None:
        from rpe3d.evaluate.report import write_report

        written += write_report(results, place, against)
    if written:
        say("wrote " + ", ".join(map(str, written)))
