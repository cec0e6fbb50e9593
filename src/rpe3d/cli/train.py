"""`rpe3d train lm` and `rpe3d train sft`: fine-tuning under a law, with the paper's settings as defaults.

Several GPUs: `accelerate launch --num_processes 4 -m rpe3d train lm ...`, or torchrun, which also starts CPU processes.
"""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import law, need, size
from rpe3d.cli.extend import law_parameters
from rpe3d.config import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the run itself have defaults here; those of `Settings` have theirs there, below a recipe's."""
    add = parser.add_argument
    add("kind", choices=("lm", "sft"), help="lm: windows of text; sft: conversations, learning the answers only")
    add("model", metavar="MODEL", nargs="?", help="a Hugging Face name or folder, a .gguf file, or `default`")
    add("--out", metavar="DIR", type=Path, required=True, help="the run's folder; the same command goes on in it")
    add("--recipe", metavar="FILE", type=Path, help="settings to start from, as in recipes/; options override them")
    add("--device", help="cpu or cuda; default the GPU if there is one")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--law", help="the law, name:parameter=value, or a law file; default 3d-rpe")
    add("--set", metavar="NAME=VALUE", action="append", default=[], help="a parameter of the law; again for more")
    for name in ("chunk", "window", "reach"):
        add(f"--{name}", metavar="N", type=size, help=f"the law's {name}, in tokens")
    _add_settings(parser)


def _add_settings(parser: ArgumentParser) -> None:
    def add(name: str, text: str, **kwargs: Any) -> None:
        parser.add_argument(f"--{name}", default=SUPPRESS, help=text, **kwargs)

    add("context", "tokens that the model shall take, as 32768 or 32k", metavar="N", type=size)
    add("data", "text files, folders, .jsonl or .json files, or a dataset's name", metavar="DATA", nargs="+")
    add("split", "of a dataset; default train, train[:20000] for a part")
    add("text-field", "the field of a record that holds its text; default text")
    add("pack", "join documents, end-of-text between; else a window is of one document", action=BooleanOptionalAction)
    add("mix", "documents that are read in turn; default 16", metavar="N", type=int)
    add("length", "tokens in a window, or at most in a conversation; default the context", metavar="N", type=size)
    add("steps", "default 1000 (lm) or 3000 (sft); more than before continue a finished run", metavar="N", type=int)
    add("batch", "windows in a step, over all processes; default 8", metavar="N", type=int)
    add("micro-batch", "windows in one forward; default 1", metavar="N", type=int)
    add("method", "lora (default), lora-plus (embeddings and norms, too, as LongLoRA), or full")
    add("rank", "of LoRA; default 8", metavar="N", type=int)
    add("alpha", "of LoRA; default 16", metavar="N", type=int)
    add("learning-rate", "default 2e-5", metavar="X", type=float)
    add("beta1", "of AdamW; default 0.9", metavar="X", type=float)
    add("beta2", "of AdamW; default 0.95", metavar="X", type=float)
    add("weight-decay", "default 0", metavar="X", type=float)
    add("clip", "the largest norm of a gradient; default 1", metavar="X", type=float)
    add("schedule", "after the warm-up: constant (default), linear or cosine")
    add("warmup", "steps of linear warm-up; default 20", metavar="N", type=int)
    add("attention", "full (default), or s2: LongLoRA's shifted sparse attention while training")
    add("pose", "PoSE: skip positions up to the context between N parts of a window; 2 as in its paper", type=int)
    add("sequence-parallel", "processes that share one sequence; default 1", metavar="N", type=int)
    add("precision", "bf16 (default on a GPU) or fp32 (default on a CPU)")
    add("gradient-checkpointing", "less memory, a third more time; default on", action=BooleanOptionalAction)
    add("seed", "of the data's order and the adapter's start; default 0", metavar="N", type=int)
    add("save-every", "steps between checkpoints; default 100", metavar="N", type=int)
    add("tensorboard", "write a TensorBoard log into the run's folder", action=BooleanOptionalAction)
    add("lora-plus", "the same as --method lora-plus", action="store_const", const="lora-plus", dest="method")


def given_settings(arguments: Namespace) -> dict[str, Any]:
    """The recipe's keywords, and those of the command line before them."""
    from rpe3d.train.settings import read_recipe

    recipe = {} if arguments.recipe is None else read_recipe(arguments.recipe)
    own = {"out", "recipe", "device", "trust_remote_code", "law", "set", "chunk", "window", "reach", "model", "kind"}
    if recipe.get("kind", arguments.kind) != arguments.kind:
        raise ConfigError(f"{arguments.recipe} is a recipe for {recipe['kind']}", f"use `rpe3d train {recipe['kind']}`")
    given = {**recipe, "kind": arguments.kind}
    given |= {name: value for name, value in vars(arguments).items() if name not in own}
    parameters = law_parameters(arguments)
    if arguments.law is not None:
        chosen = law(arguments.law)
        given |= {"law": chosen.name, "parameters": chosen.parameters, "pretrained": chosen.pretrained}
    if parameters:
        given["parameters"] = {**given.get("parameters", {}), **parameters}
    if arguments.model is not None:
        given["model"] = arguments.model
    for name, option in (("model", "MODEL"), ("context", "--context"), ("data", "--data")):
        if name not in given:
            raise ConfigError(f"{option} is missing", f"give it, or a --recipe that has {name!r}")
    return given


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    need("train", "peft", "accelerate")
    need("cli", "rich", "matplotlib")
    from rpe3d.train.settings import Settings

    settings = Settings(**given_settings(arguments))
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard is not installed", "pip install tensorboard, or leave --tensorboard out")
    from rpe3d.cli.compare import progress_bar
    from rpe3d.train import train

    first = os.environ.get("RANK", "0") == "0"

    def note(text: str) -> None:
        if first:
            print(f"note: {text}", file=sys.stderr)

    with progress_bar(first) as progress:
        result = train(
            settings,
            arguments.out,
            device=arguments.device,
            trust_remote_code=arguments.trust_remote_code,
            progress=progress,
            note=note,
        )
    if first:
        print(result)
        after = "`rpe3d merge` makes it one model" if settings.method != "full" else "it carries its law"
        print(f"wrote {result}, {arguments.out / 'log.csv'}, {arguments.out / 'loss.png'}; {after}", file=sys.stderr)
    return 0
