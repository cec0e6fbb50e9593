"""`rpe3d merge`: an adapter and its base as one checkpoint that carries its law."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rpe3d.cli.arguments import need, new_folder
from rpe3d.cli.compare import DTYPES
from rpe3d.config import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("adapter", metavar="ADAPTER", type=Path, help="the adapter folder of a `rpe3d train` run")
    add("--out", metavar="DIR", type=Path, required=True, help="a new folder for the checkpoint")
    add("--base", metavar="MODEL", help="the model that it was trained on; default the one that it names")
    add("--dtype", choices=DTYPES, default="bfloat16", help="type of the merged weights; default bfloat16")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    need("train", "peft")
    out: Path = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists", "pass a new folder to --out")
    import torch

    from rpe3d.train import merge

    dtype = getattr(torch, arguments.dtype)
    merged = merge(arguments.adapter, arguments.base, dtype=dtype, trust_remote_code=arguments.trust_remote_code)
    for note in merged.notes:
        print(f"note: {note}", file=sys.stderr)
    with new_folder("--out", out) as unfinished:
        merged.model.save_pretrained(unfinished)
        if merged.tokenizer is not None:
            merged.tokenizer.save_pretrained(unfinished)
    print(f"wrote {out}: `import rpe3d`, then AutoModelForCausalLM.from_pretrained({str(out)!r})", file=sys.stderr)
    return 0
