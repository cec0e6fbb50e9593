"""`rpe3d eval`: run the paper's evaluations on any model under any law; `evaluate.evaluation` describes the JSON."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import kept, laws, need, note_unused, results_file, size, sizes
from rpe3d.cli.compare import CONTEXT, LAW, add_probe_arguments, add_text_arguments, asked_of, unmeasured
from rpe3d.cli.model import MODEL, add_model_arguments, check_laws, check_loaded, load_model
from rpe3d.cli.terminal import STDOUT, new_table, note, print_json, progress_bar, room, say, show, width_of
from rpe3d.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

TASKS = (
    "longbench, longbench-v2, leval, ruler, babilong, infinitebench, kv, needle, ppl, passkey, copy, longppl, "
    "or a single task, e.g. longbench:lcc, ppl:FOLDER"
)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--tasks", metavar="T,T", required=True, help=TASKS)
    add("--law", "--laws", metavar="A,B", help=f"{LAW}; default: the model as it is")
    add(
        "--length",
        "--lengths",
        metavar="N,N",
        type=sizes,
        help="context lengths that prompts are truncated to; default: the model's own",
    )
    add("--context", metavar="N", type=size, help=CONTEXT)
    add("--data", metavar="DIR", type=Path, help="folder with SUITE/TASK.jsonl; default: from the hub")
    add_text_arguments(parser)
    add("--limit", metavar="N", type=int, help="samples per task; default: all, or as many as upstream generates")
    add("--batch", metavar="N", type=int, default=1, help="prompts, windows or copies per batch; default 1")
    add("--chat", default="auto", help="llama2, vicuna, xgen, internlm, template, none; default: by the model's name")
    add(
        "--chat-rules",
        choices=("upstream", "authors"),
        default="upstream",
        help="authors: also ask LongBench's code tasks as chats, as the 3D-RPE authors do",
    )
    add_probe_arguments(parser)
    add("--keys", metavar="FILE", type=Path, help="longppl: file of key tokens that `rpe3d compare --keys` wrote")
    add_model_arguments(parser)
    add(
        "--json",
        metavar="FILE",
        type=Path,
        help="write rows here and predictions next to it; the same command resumes a stopped run; - for stdout",
    )
    add("--overwrite", action="store_true", help="discard all rows and predictions of --json and start over")
    add("--report", metavar="DIR", type=Path, help="write a page with tables and heat maps (and DIR/eval.json)")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    need("models", "transformers")
    from rpe3d.evaluate.evaluation import evaluate
    from rpe3d.evaluate.ranks import ranks
    from rpe3d.evaluate.settings import Ask
    from rpe3d.evaluate.store import check
    from rpe3d.evaluate.tasks import parse_tasks
    from rpe3d.evaluate.tasks.chat import TEMPLATE, called, chat_of, check_form
    from rpe3d.evaluate.under import own_length

    tasks = parse_tasks(arguments.tasks.split(","))
    given = laws(arguments.law) if arguments.law else []
    if arguments.context is not None and not given:
        raise ConfigError("--context is given without --law", "add the law, or leave --context out")
    names = ("context", "limit", "batch", "protocol", "windows", "copies", "passkeys", "seed")
    asked: dict[str, Any] = {
        "tasks": tasks,
        "laws": given,
        "authors": arguments.chat_rules == "authors",
        **asked_of(arguments, names),
    }
    Ask(lengths=arguments.length or [4096], **asked)
    check_form(arguments.chat)
    if (("longppl", "") in tasks) != (arguments.keys is not None):
        raise ConfigError("longppl and --keys need each other", "add the missing one, or leave the other out")
    data, texts = questions(arguments, tasks)
    note_unused(arguments, _without(arguments, tasks, data, texts))
    file = results_file(arguments, "eval.json")
    if file is not None:
        check(file, {}, "eval")
    lengths = [arguments.context] if arguments.context else arguments.length or ()
    check_laws(arguments, given, lengths)
    first = ranks().first
    loaded = load_model(arguments)
    chat, unknown = chat_of(arguments.chat, loaded.tokenizer, called(arguments.model))
    notes = [unknown] if unknown else []
    if any(group == "leval" for group, _ in tasks) and chat.form == TEMPLATE and not chat.takes_system:
        notes.append("the chat template has no system turn, so L-Eval's instructions open the user's turn")
    for text in notes if first else ():
        note(text)
    check_loaded(loaded.model, given)
    with progress_bar(first) as progress:
        results = evaluate(
            loaded.model,
            chat,
            Ask(lengths=arguments.length or [own_length(loaded.model)], **asked),
            data=data,
            texts=texts,
            file=file,
            keys=arguments.keys,
            progress=progress,
            **kept(arguments),
        )
    if first:
        finish(results, arguments.report, file, as_json=arguments.json == STDOUT)
    return int(any(row["status"] != "ok" for row in results["rows"]))


def _without(
    arguments: Namespace, tasks: Sequence[tuple[str, str]], data: Mapping[Any, Any], texts: Mapping[Any, Any]
) -> dict[str, str]:
    """Return the options that have no effect on these tasks, each with what it needs."""
    from rpe3d.evaluate.tasks import PROBES

    groups = {group for group, _ in tasks}
    without = unmeasured(groups)
    if groups & {"babilong", "kv", "infinitebench"}:
        without.pop("seed", None)
    if any(not (group == "ppl" and name) for group, name in texts):
        without.pop("texts", None)
    else:
        without["texts"] = "a task that reads them, such as ppl or ruler"
    if not data and not any(group == "ppl" and name for group, name in tasks):
        without["data"] = "a task that reads it, such as longbench or ppl:FOLDER"
    if groups <= set(PROBES):
        without["limit"] = "a task with questions: --windows, --copies and --passkeys say how much of the others"
        if arguments.chat != "auto":
            without["chat"] = "a task with questions"
    if arguments.chat_rules == "authors" and "longbench" not in groups:
        without["chat_rules"] = "longbench"
    if arguments.json is None and arguments.report is None:
        without["overwrite"] = "--json or --report"
    return without


def questions(arguments: Namespace, tasks: list[tuple[str, str]]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Read the questions and texts of all tasks; refuse missing ones before the model is loaded."""
    from rpe3d.evaluate import read_texts
    from rpe3d.evaluate.tasks import longbench
    from rpe3d.evaluate.tasks.questions import find, load_texts, reads_text
    from rpe3d.evaluate.texts import check_bytes

    if any(longbench.TASKS[name].metric.endswith("_zh") for group, name in tasks if group == "longbench"):
        need("eval", "jieba")
    if any(group in ("ruler", "needle") for group, _ in tasks):
        need("eval", "wonderwords")
    found = {task: find(task, arguments.data, arguments.length) for task in tasks}
    data = {task: one for task, one in found.items() if one is not None}
    texts = {}
    for group, name in tasks:
        if reads_text((group, name), found[group, name]):
            own = group == "ppl" and name
            texts[group, name] = load_texts(name, arguments.data) if own else read_texts(arguments.texts)
        if group in ("ppl", "longppl") and arguments.length:
            check_bytes(texts[group, name], arguments.length)
    return data, texts


def finish(results: dict[str, Any], place: Path | None, file: Path | None, *, as_json: bool = False) -> None:
    """Print the tables, or all results as JSON; write the report page, and name all files that were written."""
    from rpe3d.evaluate.report import write_page
    from rpe3d.evaluate.tables import tables

    found = tables(results)
    if as_json:
        print_json(results)
    for table in () if as_json else found:
        across = [line.label + " (quoted)" * line.quoted for line in table.lines]
        cells = [line.texts() for line in table.lines]
        shown = drawn(table.title, table.columns, across, cells)
        if width_of(shown) > room() and len(table.columns) > len(table.lines):  # then tasks go down
            shown = drawn(table.title, across, table.columns, list(zip(*cells, strict=True)))
        show(shown)
    for text in dict.fromkeys(filter(None, (table.note for table in found))):
        note(text)
    for row in results["rows"]:
        if row["status"] != "ok":
            task = ":".join(filter(None, (row["suite"], row["task"])))
            note(f"{row['law']} at {row['length']}, {task}: {row['status']}")
    written = [] if file is None else [file]
    if place is not None:
        written += write_page(results, place, file)
    if written:
        say("wrote " + ", ".join(map(str, written)))


def drawn(title: str, columns: Sequence[str], labels: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    """Draw a table for the terminal, with a label before each row of cells; numbers are not wrapped."""
    table = new_table("", words=("",), title=title)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold", min_width=6)
    for label, row in zip(labels, cells, strict=True):
        table.add_row(label, *row)
    return table
