"""`rpe3d doctor`: report what runs on this machine and why or, with a model, what a law can do for it.

`--context N` adds the size of transformers' caches for one sequence of N tokens, in the checkpoint's own dtype.

JSON, schema 1: {"schema": 1, "machine": {name: value}, "model": {name: value} or null, "rows": [{"device", "dtype",
"law", "rotation", "prefill", "decode", "decode_reason"}]}.

Exit codes: 0 if the machine was described or the model can be extended, 1 if the model cannot be extended (the line
`not supported` says why) or does not load. A model that runs under a law but cannot be saved with it gives 0.
"""

from __future__ import annotations

import platform
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import check_writable, need, size, write_json
from rpe3d.cli.terminal import STDOUT, new_table, show
from rpe3d.config import ConfigError

if TYPE_CHECKING:
    from rpe3d.geometry import Law


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a Hugging Face name or folder, a .gguf file, or `default`"
    )
    parser.epilog = "Exits with 1 if MODEL cannot be extended; the report says why."
    parser.add_argument(
        "--context", metavar="N", type=size, help="also report the size of the caches for N tokens, e.g. 64k"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report as JSON; - prints it instead")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    if arguments.context is not None and arguments.model is None:
        raise ConfigError("--context is given without a model", "add MODEL, or leave --context out")
    if arguments.json is not None:
        check_writable("--json", arguments.json)
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
    if arguments.json == STDOUT:
        pass  # all of it has been printed
    elif model is not None:
        _print_pairs(model)
    else:
        _print_pairs(machine)
        _print_rows(rows)
    return 1 if model is not None and "not supported" in model else 0


def _examine(arguments: Namespace) -> dict[str, str]:
    """Describe a model on one screen: what it is, and what a law would change in it."""
    need("models", "transformers")
    from rpe3d.models.cache_sizes import cache_bytes, layer_caches, told
    from rpe3d.models.extend import check_savable, extend, law_of, pretrained_length, text_config
    from rpe3d.models.load import load
    from rpe3d.models.own_context import own_context
    from rpe3d.models.probe import not_finite, probe

    is_file = arguments.model == "default" or Path(arguments.model).expanduser().is_file()
    kind: Any = None if arguments.context is None or is_file else "auto"  # a cache has the dtype the model is run in
    loaded = load(arguments.model, dtype=kind, trust_remote_code=arguments.trust_remote_code, with_tokenizer=False)
    model, config = loaded.model, text_config(loaded.model)
    law = law_of(model)
    about = {
        "model": loaded.source,
        "architecture": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters",
        "law": "none: stock" if law is None else _described(law),
        "attention": str(config._attn_implementation),
    }
    if broken := not_finite(model):
        about["not supported"] = f"its weights are not finite: {broken}"
        return about
    try:
        found = probe(model, config)
        pretrained = pretrained_length(model)
        about["pretrained context"] = str(pretrained)
        if law is None and (own := own_context(config)) is not None:
            about["carries"] = str(own)
            if own.law is not None:
                about["to use it"] = f"rpe3d extend {arguments.model} --law {own.law} --context {own.length} --out DIR"
        pairs = "neighbours" if found.interleaved else "halves"
        about["rotary"] = f"{2 * found.frequencies.numel()} of {found.head_dim} dimensions, {pairs} paired"
        kept = f"; {found.windowed} keep their sliding window" if found.windowed else ""
        kept += f"; {len(found.unrotated)} do not rotate" if found.unrotated else ""
        layers = found.layers + found.windowed + len(found.unrotated)
        about["layers a law changes"] = f"{found.layers} of {layers}{kept}"
        if arguments.context is not None:
            sizes = cache_bytes(layer_caches(model), arguments.context, model.dtype)
            about[f"cache at {arguments.context}"] = told(sizes, model.dtype)
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


def _described(law: Law) -> str:
    """Return a law's name and positions, and how many far keys a query chooses, if it does."""
    told = f"{law.name}, {law.pretrained} to {law.context} positions"
    for choice in (region.choice for region in law.regions if region.choice is not None):
        told += f", far keys chosen: {choice.most} block{'s' * (choice.most > 1)} of {choice.size}"
    if law.both is not None:
        told += ", and all of them seen beside these in every layer"
    elif law.layers:
        layers = f"layer{'s' * (len(law.layers) > 1)} {', '.join(map(str, law.layers))}"
        told += f", and all of them seen beside these in {layers}"
    return told


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _choices(device: str, dtype: Any) -> list[dict[str, str]]:
    """Return the implementation that impl="auto" picks under every law, for a prompt and for one token after it."""
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
        Console().print(f"{name:<{width}}{value}", highlight=False, markup=False, emoji=False, soft_wrap=True)


def _print_rows(rows: list[dict[str, str]]) -> None:
    """Print one line for all laws that run the same way, and each reason once."""
    same = ("device", "dtype", "rotation", "prefill", "decode", "decode_reason")
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in same), []).append(row["law"])
    reasons = {reason: n for n, reason in enumerate(dict.fromkeys(key[-1] for key in groups), 1)}
    table = new_table("device", "laws", "rotation", "prefill", "decode", words=("laws",))
    for column in table.columns:
        column.justify = "left"
    for (device, dtype, rotation, prefill, decode, reason), laws in groups.items():
        which = f"all {len(laws)}" if len(laws) == len({row["law"] for row in rows}) else ", ".join(laws)
        table.add_row(f"{device} {dtype}", which, rotation, prefill, f"{decode} [{reasons[reason]}]")
    show(table)
    for reason, n in reasons.items():
        print(f"[{n}] {reason}")
