"""`rpe3d train lm` and `rpe3d train sft`: fine-tune under a law, with the paper's settings as defaults.

On several GPUs: `accelerate launch --num_processes 4 -m rpe3d train lm ...`, or torchrun, which can also run on CPUs.
"""

from __future__ import annotations

import os
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import need, note_unused, size
from rpe3d.cli.extend import SIZES, add_law_arguments, law_given, law_parameters
from rpe3d.cli.terminal import note, progress_bar, say
from rpe3d.config import ConfigError
from rpe3d.train.settings import HELP, TOKENS, Settings, read_recipe

HOW: dict[str, dict[str, Any]] = {
    "int": {"metavar": "N", "type": int},
    "float": {"metavar": "X", "type": float},
    "bool": {"action": BooleanOptionalAction},
    "Sequence[str]": {"metavar": "DATA", "nargs": "+"},
}
"""How argparse reads a field, by its type; a string is read as it is."""


OUT_OF_TIME = 3
"""Exit status of a run that stopped because its --minutes were up."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run's options, with defaults, and those of `Settings`, whose defaults yield to a recipe's."""
    add = parser.add_argument
    add("kind", choices=("lm", "sft"), help="lm: windows of text; sft: conversations, trained on the answers only")
    add("model", metavar="MODEL", nargs="?", help="a Hugging Face name or folder, a .gguf file, or `default`")
    add("--out", metavar="DIR", type=Path, required=True, help="folder of the run; the same command resumes it")
    add(
        "--recipe",
        metavar="FILE",
        type=Path,
        help="settings to start from: a file, or a name such as table3-3d-rpe-llama2-7b-32k-small",
    )
    add("--minutes", metavar="N", type=float, help="stop at a checkpoint before N minutes are up, with exit status 3")
    add("--device", help="cpu or cuda; default: the GPU if there is one")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--law", help="law name, name:parameter=value, or law file; default 3d-rpe")
    add_law_arguments(parser)
    _add_settings(parser)


def _add_settings(parser: ArgumentParser) -> None:
    """Add an option for every field of `Settings` that has a help text."""
    for field in fields(Settings):
        if HELP not in field.metadata:
            continue
        kind = str(field.type).removesuffix(" | None")
        how = dict(HOW.get(kind, {}))
        if field.metadata[TOKENS]:
            how["type"] = size
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", default=SUPPRESS, help=field.metadata[HELP], **how)
    parser.add_argument("--lora-plus", action="store_true", help="the same as --method lora-plus")


def given_settings(arguments: Namespace) -> dict[str, Any]:
    """Return the recipe's keywords, overridden by those of the command line."""
    recipe = {} if arguments.recipe is None else read_recipe(arguments.recipe)
    own = {"quiet", "verbose", "out", "recipe", "device", "trust_remote_code", "law", "set", *SIZES, "model", "kind"}
    own |= {"lora_plus", "minutes"}
    if recipe.get("kind", arguments.kind) != arguments.kind:
        raise ConfigError(f"{arguments.recipe} is a recipe for {recipe['kind']}", f"use `rpe3d train {recipe['kind']}`")
    given = {**recipe, "kind": arguments.kind}
    given |= {name: value for name, value in vars(arguments).items() if name not in own}
    if arguments.lora_plus:
        if getattr(arguments, "method", "lora-plus") != "lora-plus":
            raise ConfigError(f"--lora-plus is given with --method {arguments.method}", "pass only one of them")
        given["method"] = "lora-plus"
    if arguments.law is not None:
        chosen = law_given(arguments.law, arguments)
        given |= {"law": chosen.name, "parameters": chosen.parameters, "pretrained": chosen.pretrained}
    elif parameters := law_parameters(arguments):
        given["parameters"] = {**given.get("parameters", {}), **parameters}
    if arguments.model is not None:
        given["model"] = arguments.model
    for name, option in (("model", "MODEL"), ("context", "--context"), ("data", "--data")):
        if name not in given:
            raise ConfigError(f"{option} is missing", f"pass it, or a --recipe that has {name!r}")
    return given


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    need("train", "peft", "accelerate")
    need("cli", "rich", "matplotlib")
    settings = Settings(**given_settings(arguments))
    without = dict.fromkeys(("rank", "alpha"), "LoRA: --method is full") if settings.method == "full" else {}
    if settings.kind == "sft":
        without |= dict.fromkeys(("pack", "mix", "text_field"), "windows of text: sft reads conversations")
    note_unused(arguments, without)
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard is not installed", "pip install tensorboard, or leave --tensorboard out")
    from rpe3d.train import OutOfTime, train

    first = os.environ.get("RANK", "0") == "0"

    def tell(text: str) -> None:
        if first:
            note(text)

    try:
        with progress_bar(first) as progress:
            result = train(
                settings,
                arguments.out,
                device=arguments.device,
                trust_remote_code=arguments.trust_remote_code,
                progress=progress,
                note=tell,
                minutes=arguments.minutes,
            )
    except OutOfTime as stop:
        tell(str(stop))
        return OUT_OF_TIME
    if first:
        print(result)
        after = "`rpe3d merge` merges it into its base" if settings.method != "full" else "it carries its law"
        say(f"wrote {result}, {arguments.out / 'log.csv'}, {arguments.out / 'loss.png'}; {after}")
    return 0
