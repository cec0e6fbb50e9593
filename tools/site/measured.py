"""Keep what `rpe3d compare --json` measured in benchmarks/results: a line for each row, window, copy and passkey.

    python tools/site/measured.py compare.json --model qwen2.5-coder --commit 94b3506

Lines of the same law and length are replaced. `--commit` names the commit that measured, where the rows name an older
one with a + because the checkout that ran was a copy of it.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Line = dict[str, Any]


def row_line(row: Line, machine: str, commit: str) -> Line:
    """Return a row as the line of compare-large-MODEL.csv; what was not measured stays empty."""
    numbers = {name: "" if row[name] is None else round(row[name], 4) for name in ("ppl", "tail_ppl", "copy_nll")}
    counts = {"passkey": row["passkey"], "passkey_n": row["passkey_n"]}
    counts |= {"windows": len(row["windows"]), "copies": len(row["copies"])}
    parameters = " ".join(f"{name}={value}" for name, value in row["parameters"].items())
    about = {"machine": machine, "commit": commit, "law": row["law"], "parameters": parameters}
    return {**about, "length": row["length"], **numbers, **counts}


def item_lines(row: Line, machine: str, commit: str) -> Iterable[Line]:
    """Yield the windows, copies and passkeys of a row as lines of compare-large-MODEL-windows.csv."""
    about = {"machine": machine, "commit": commit, "law": row["law"], "length": row["length"]}
    for one in row["windows"]:
        name = one["text"].partition(".")[0]
        short = name.partition("_")[0] if name.startswith("pg") else name
        losses = {"value": f"{one['nll']:.5f}", "tail": f"{one['tail_nll']:.5f}"}
        yield {**about, "kind": "window", "what": short, **losses}
    for one in row["copies"]:
        yield {**about, "kind": "copy", "what": one["seed"], "value": f"{one['nll']:.5f}", "tail": ""}
    for one in row["passkeys"]:
        yield {**about, "kind": "passkey", "what": one["depth"], "value": int(one["correct"]), "tail": ""}


def put(path: Path, lines: Sequence[Line]) -> None:
    """Write lines into a CSV, in place of those of the same law and length."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns, kept = list(reader.fieldnames or []), list(reader)
    new = {(line["law"], str(line["length"])) for line in lines}
    kept = [line for line in kept if (line["law"], line["length"]) not in new]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *lines])


def main() -> None:
    """Put the finished rows of a file beside those that are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="what `rpe3d compare --json` wrote")
    parser.add_argument("--model", required=True, help="which benchmarks/results/compare-large-MODEL.csv")
    parser.add_argument("--commit", help="the commit that measured; default: as the rows say")
    given = parser.parse_args()
    if not given.file.is_file():
        parser.error(f"there is no file {given.file}: name what `rpe3d compare --json` wrote")
    known = [path.stem.removeprefix("compare-large-") for path in sorted(RESULTS.glob("compare-large-*[!s].csv"))]
    if given.model not in known:
        parser.error(f"no results of {given.model} are kept: --model is one of {', '.join(known)}")
    found = json.loads(given.file.read_text(encoding="utf-8"))
    machine = found["model"]["device"]
    rows = [row for row in found["rows"] if row["status"] == "ok"]
    named = [(row, machine, given.commit or row["commit"]) for row in rows]
    put(RESULTS / f"compare-large-{given.model}.csv", [row_line(*one) for one in named])
    items = [line for one in named for line in item_lines(*one)]
    put(RESULTS / f"compare-large-{given.model}-windows.csv", items)
    print(f"{len(rows)} rows, {len(items)} windows, copies and passkeys")


if __name__ == "__main__":
    main()
