"""`rpe3d merge`: merge an adapter into its base model, as one checkpoint that carries its law."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rpe3d.cli.arguments import check_new_folder, need, new_folder
from rpe3d.cli.model import DTYPES, summary
from rpe3d.cli.terminal import note, say


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("adapter", metavar="ADAPTER", type=Path, help="the adapter folder of a `rpe3d train` run")
    add("--out", metavar="DIR", type=Path, required=True, help="a new folder for the checkpoint")
    add("--base", metavar="MODEL", help="model that the adapter was trained on; default: the one it names")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the merged weights; default bfloat16")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    need("train", "peft")
    out: Path = arguments.out
    check_new_folder("--out", out)
    import torch

    from rpe3d.models import law_of
    from rpe3d.models.card import write_model_card
    from rpe3d.train import merge
    from rpe3d.train.merging import adapter_base

    dtype = getattr(torch, arguments.dtype)
    merged = merge(arguments.adapter, arguments.base, dtype=dtype, trust_remote_code=arguments.trust_remote_code)
    for text in merged.notes:
        note(text)
    with new_folder("--out", out) as unfinished:
        merged.model.save_pretrained(unfinished)
        if merged.tokenizer is not None:
            merged.tokenizer.save_pretrained(unfinished)
        made = law_of(merged.model)
        assert made is not None
        write_model_card(unfinished, made, arguments.base or adapter_base(arguments.adapter), merged=True)
    say(summary(made))
    say(f"wrote {out}: `import rpe3d`, then AutoModelForCausalLM.from_pretrained({str(out)!r})")
    return 0
