"""`rpe3d explore`: an interactive page on a law's parameters, served on this machine or written to a file."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import check_writable, need, note_unused, replacing
from rpe3d.cli.terminal import Voice, note, say
from rpe3d.config import ConfigError

HOST, PORT = "127.0.0.1", 8765


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", metavar="N", type=int, help=f"port to listen on; default {PORT}; 0 for any free port")
    add("--host", help="address to listen on; default 127.0.0.1, this machine only")
    add("--compare", metavar="FILE", type=Path, help="results of `rpe3d compare`, to show their curves")
    add("--no-browser", action="store_true", help="print the page's address without opening it")
    add("--out", metavar="FILE", type=Path, help="write the page to a standalone file, with fewer settings")


def run(arguments: Namespace) -> int:
    measured = None if arguments.compare is None else _measured(arguments.compare)
    import torch

    torch.set_num_threads(1)  # a law is a few thousand numbers: a second thread costs more than it gains
    if arguments.out is not None:
        note_unused(arguments, dict.fromkeys(("port", "host", "no_browser"), "a server: --out writes a file"))
        return _write(arguments.out, measured)
    return _serve(arguments, measured)


def _measured(path: Path) -> dict[str, Any]:
    """Read the curves and the table of a comparison."""
    need("models", "transformers")
    from rpe3d.evaluate.store import read

    results = read(path, option="--compare")
    if results is None:
        raise ConfigError(f"there is no file {path}", "pass the JSON of `rpe3d compare --json` to --compare")
    try:
        return curves(results)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error} is missing or wrong)", "pass another file to --compare"
        ) from None


def curves(results: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a comparison that the page shows: its table, and the report's smoothed perplexity curves."""
    from rpe3d.evaluate.plots import smoothed

    facts = ("name", "pretrained", "head_dim", "rope_theta")
    measures = ("law", "length", "ppl", "tail_ppl", "copy_nll", "passkey", "passkey_n")
    rows = [
        {name: row[name] for name in measures}
        | {
            "position": [(bucket["from"] + bucket["to"]) / 2 for bucket in row["positions"]],
            "perplexity": [float(f"{math.exp(nll):.5g}") for nll in smoothed(row["positions"])],
        }
        for row in results["rows"]
        if row["status"] == "ok"
    ]
    if not rows:
        raise ConfigError("the comparison has no finished row", "finish it: the same command resumes where it stopped")
    lengths = sorted({row["length"] for row in rows})
    model = {name: results["model"][name] for name in facts}
    model |= {"rope_theta": _whole(model["rope_theta"]), "context": max(lengths[-1], model["pretrained"])}
    return {"model": model, "laws": list(dict.fromkeys(row["law"] for row in rows)), "lengths": lengths, "rows": rows}


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _write(path: Path, measured: dict[str, Any] | None) -> int:
    from rpe3d.analysis.explore.page import file_page

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty() and Voice.level >= 0:
            print(f"\r{done} of {total} settings", end="\n" if done == total else "", file=sys.stderr)

    check_writable("--out", path)
    with replacing("--out", path) as unfinished:
        unfinished.write_text(file_page(measured, progress=progress), encoding="utf-8", errors="backslashreplace")
    say(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0


def _serve(arguments: Namespace, measured: dict[str, Any] | None) -> int:
    from rpe3d.analysis.explore.page import live_page
    from rpe3d.analysis.explore.server import Server

    host, port = arguments.host or HOST, PORT if arguments.port is None else arguments.port
    with Server(live_page(measured), host, port) as server:
        print(server.url, flush=True)
        if not host.startswith("127.") and host not in ("localhost", "::1"):
            note("anyone who can reach this machine can open the page")
        say("Press Ctrl-C to stop.")
        if not arguments.no_browser:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
    return 0
