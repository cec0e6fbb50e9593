"""`rpe3d doctor`: what runs on this machine, and why; with a model, what a law can do for it.

JSON, schema 1: {"schema": 1, "machine": {name: value}, "model": {name: value} or null, "rows": [{"device", "dtype",
"law", "rotation", "prefill", "decode", "decode_reason"}]}.

Exit codes: 0 where the machine was described or the model can be extended, 1 where the model cannot be (the line
`not supported` says why) or does not load. A model that runs under a law but cannot be saved with it exits with 0.
"""

from __future__ import annotations

import platform
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import need, write_json


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a Hugging Face name or folder, a .gguf, or `default`"
    )
    parser.epilog = "Exits with 1 if MODEL cannot be extended; the report says why."
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows of the table as JSON")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    import torch

    from rpe3d.models.devices import has_cuda

    devices = {"cpu": torch.float32}
    machine = {"python": platform.python_version(), "cpu threads": str(torch.get_num_threads())}
    for package in ("torch", "triton", "transformers", "peft"):
        machine[package] = _version(package)
    machine["cuda"] = "no device"
    if has_cuda():
        machine["cuda"] = torch.cuda.get_device_name()
        devices["cuda"] = torch.bfloat16
    rows = [row for device, dtype in devices.items() for row in _choices(device, dtype)]
    model = _examine(arguments) if arguments.model else None
    if arguments.json is not None:
        write_json("--json", arguments.json, {"schema": 1, "machine": machine, "model": model, "rows": rows})
    if model is not None:
        _print_pairs(model)
    else:
        _print_pairs(machine)
        _print_rows(rows)
    return 1 if model is not None and "not supported" in model else 0


def _examine(arguments: Namespace) -> dict[str, str]:
    """One screen about a model: what it is, and what a law would change."""
    need("models", "transformers")
    from rpe3d.config import ConfigError
    from rpe3d.models.extend import check_savable, extend, law_of, text_config
    from rpe3d.models.load import load
    from rpe3d.models.probe import not_finite, probe

    loaded = load(arguments.model, trust_remote_code=arguments.trust_remote_code, with_tokenizer=False)
    model, config = loaded.model, text_config(loaded.model)
    law = law_of(model)
    about = {
        "model": loaded.source,
        "architecture": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters",
        "law": "none: stock" if law is None else f"{law.name}, {law.pretrained} to {law.context} positions",
        "attention": str(config._attn_implementation),
    }
    if broken := not_finite(model):
        about["not supported"] = f"its weights are not finite numbers: {broken}"
        return about
    try:
        found = probe(model, config)
        pretrained = law.pretrained if law is not None else config.max_position_embeddings
        about["pretrained context"] = str(pretrained)
        pairs = "neighbours" if found.interleaved else "halves"
        about["rotary"] = f"{2 * found.frequencies.numel()} of {found.head_dim} dimensions, {pairs} paired"
        kept = f"; {found.windowed} keep their sliding window" if found.windowed else ""
        kept += f"; {len(found.unrotated)} do not rotate" if found.unrotated else ""
        layers = found.layers + found.windowed + len(found.unrotated)
        about["layers a law changes"] = f"{found.layers} of {layers}{kept}"
        if law is None:
            extend(model, context=8 * pretrained)  # in memory only: the model is dropped
            made = law_of(model)
            assert made is not None
            about["default at 8x"] = " ".join(f"{name}={getattr(made, name)}" for name in made.parameters())
    except ConfigError as refusal:
        about["not supported"] = refusal.problem
    else:
        try:
            check_savable(model)
        except ConfigError as refusal:
            about["in memory only"] = refusal.problem
    about |= {f"note {n}": note for n, note in enumerate(loaded.notes, 1)}
    return about


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _choices(device: str, dtype: Any) -> list[dict[str, str]]:
    """What impl="auto" takes under every law, for a prompt and for one token after it."""
    import torch

    from rpe3d.attention import explain
    from rpe3d.attention.blocked.backends import backend_for
    from rpe3d.attention.problem import check
    from rpe3d.geometry import LAWS, make_law
    from rpe3d.rotation import available

    rows = []
    prompt = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    for name in LAWS:
        law = make_law(name, pretrained=8192, context=65536, head_dim=64)
        prefill, _ = explain(check(prompt, prompt, prompt, law, rotated=True))
        decode, reason = explain(check(prompt[:, :, :1], prompt, prompt, law, rotated=True))
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


def _print_pairs(pairs: dict[str, str]) -> None:
    from rich.console import Console

    width = max(map(len, pairs)) + 2
    for name, value in pairs.items():
        Console().print(f"{name:<{width}}{value}", highlight=False, soft_wrap=True)


def _print_rows(rows: list[dict[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("device", "law", "rotation", "prefill", "decode", "why"):
        table.add_column(column, no_wrap=column == "law")
    for row in rows:
        device = f"{row['device']} {row['dtype']}"
        table.add_row(device, row["law"], row["rotation"], row["prefill"], row["decode"], row["decode_reason"])
    Console().print(table)
