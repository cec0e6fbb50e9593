"""`rpe3d doctor`: what runs on this machine, and why.

JSON, schema 1: {"schema": 1, "machine": {name: value}, "rows": [{"device", "dtype", "law", "rotation", "prefill",
"decode", "decode_reason"}]}.
"""

from __future__ import annotations

import json
import platform
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import need, replacing


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows of the table as JSON, too")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    import torch

    devices = {"cpu": torch.float32}
    machine = {"python": platform.python_version(), "cpu threads": str(torch.get_num_threads())}
    for package in ("torch", "triton", "transformers", "peft"):
        machine[package] = _version(package)
    machine["cuda"] = "no device"
    if torch.cuda.is_available():
        machine["cuda"] = torch.cuda.get_device_name()
        devices["cuda"] = torch.bfloat16
    rows = [row for device, dtype in devices.items() for row in _choices(device, dtype)]
    if arguments.json is not None:
        text = json.dumps({"schema": 1, "machine": machine, "rows": rows}, indent=2)
        with replacing("--json", arguments.json) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")
    _print(machine, rows)
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _choices(device: str, dtype: Any) -> list[dict[str, str]]:
    """What impl="auto" takes under every law, for a prompt and for one token after it."""
    import torch

    from rpe3d.attention import explain
    from rpe3d.attention.contract import check
    from rpe3d.attention.library import backend_for
    from rpe3d.geometry import LAWS, make_law
    from rpe3d.rotation import available

    rows = []
    prompt = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    for name in LAWS:
        law = make_law(name, pretrained=8192, context=65536, head_dim=64)
        prefill, _ = explain(check(prompt, prompt, prompt, law, turned=True))
        decode, reason = explain(check(prompt[:, :, :1], prompt, prompt, law, turned=True))
        library = f" ({backend_for(prompt, prompt).name})" if prefill == "blocked" else ""
        rows.append(
            {
                "device": device,
                "dtype": str(dtype).removeprefix("torch."),
                "law": name,
                "rotation": available(device, dtype),
                "prefill": prefill + library,
                "decode": decode,
                "decode_reason": reason,
            }
        )
    return rows


def _print(machine: dict[str, str], rows: list[dict[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, value in machine.items():
        console.print(f"{name:<13} {value}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("device", "law", "rotation", "prefill", "decode", "why"):
        table.add_column(column, no_wrap=column == "law")
    for row in rows:
        device = f"{row['device']} {row['dtype']}"
        table.add_row(device, row["law"], row["rotation"], row["prefill"], row["decode"], row["decode_reason"])
    console.print(table)
