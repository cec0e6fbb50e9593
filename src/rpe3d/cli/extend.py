"""`rpe3d extend`: write a checkpoint that carries its law, for `from_pretrained` after `import rpe3d`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import check_new_folder, law, need, new_folder, size, value
from rpe3d.cli.model import DTYPES, MODEL, check_law, summary
from rpe3d.cli.terminal import note, say
from rpe3d.config import ConfigError

if TYPE_CHECKING:
    from rpe3d.geometry import LawSpec

SIZES = ("chunk", "window", "reach")
"""Parameters of laws that have their own command-line option."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--context", metavar="N", type=size, required=True, help="target context length, e.g. 64k")
    add("--out", metavar="DIR", type=Path, required=True, help="a new folder for the checkpoint")
    add(
        "--law",
        default="3d-rpe",
        help="law name, name:parameter=value, or law file; default 3d-rpe; `rpe3d laws` lists them",
    )
    add_law_arguments(parser)
    add("--dtype", choices=DTYPES, help="convert the weights; default: copy them as they are (a .gguf becomes float32)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_law_arguments(parser: ArgumentParser) -> None:
    """Add the options that `law_parameters` reads."""
    add = parser.add_argument
    add("--set", metavar="NAME=VALUE", action="append", default=[], help="set a parameter of the law; repeatable")
    for name in SIZES:
        add(f"--{name}", metavar="N", type=size, help=f"the law's {name}, in tokens")


def law_parameters(arguments: Namespace) -> dict[str, Any]:
    """Return --chunk, --window, --reach and --set as keywords of `extend`."""
    sizes = {name: getattr(arguments, name) for name in SIZES}
    parameters: dict[str, Any] = {name: tokens for name, tokens in sizes.items() if tokens is not None}
    for item in arguments.set:
        name, equals, given = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item} has no value", "write it as --set name=value")
        name = name.replace("-", "_")
        if name in parameters:
            raise ConfigError(f"{name} is given twice", f"give it once, e.g. as --set {name}=VALUE")
        parameters[name] = value(given)
    return parameters


def law_given(text: str, arguments: Namespace) -> LawSpec:
    """Return the law of --law with --chunk, --window, --reach and --set, which override a law file."""
    given, parameters = law(text), law_parameters(arguments)
    twice = sorted(given.parameters.keys() & parameters) if given.pretrained is None else []
    if twice:
        raise ConfigError(f"{twice[0]} is given twice: in --law {text}, and as an option", "give it once")
    return replace(given, parameters={**given.parameters, **parameters})


def run(arguments: Namespace) -> int:
    need("models", "transformers")
    given = law_given(arguments.law, arguments)
    out: Path = arguments.out
    check_new_folder("--out", out)
    check_law(arguments, given, arguments.context)
    import torch

    from rpe3d.models.card import write_model_card
    from rpe3d.models.checkpoint import can_be_copied, copy_with_config, origin
    from rpe3d.models.extend import check_savable, extend, law_of, pretrained_length
    from rpe3d.models.load import load

    source = Path(arguments.model).expanduser()
    tokenizer = not source.is_dir() or any(source.glob("tokenizer*"))
    is_file = arguments.model == "default" or source.is_file()
    dtype: Any = getattr(torch, arguments.dtype) if arguments.dtype else torch.float32 if is_file else "auto"
    trust = arguments.trust_remote_code
    loaded = load(arguments.model, dtype=dtype, trust_remote_code=trust, with_tokenizer=tokenizer)
    for text in (*loaded.notes, *(() if tokenizer else ("the folder has no tokenizer, so none is written",))):
        note(text)
    given.check(pretrained_length(loaded.model))
    own = law_of(loaded.model)
    extend(loaded.model, given.name, context=arguments.context, **given.parameters)
    check_savable(loaded.model)
    folder = None if arguments.dtype else origin(loaded.source)
    with new_folder("--out", out) as unfinished:
        if folder is not None and can_be_copied(folder, loaded.model):
            copy_with_config(folder, loaded.model, arguments.context, unfinished)
        else:
            loaded.model.save_pretrained(unfinished)
            if loaded.tokenizer is not None:
                loaded.tokenizer.model_max_length = arguments.context
                loaded.tokenizer.save_pretrained(unfinished)
        made = law_of(loaded.model)
        assert made is not None
        write_model_card(unfinished, made, arguments.model)
    if own is not None and own != made:
        note(f"the law that {arguments.model} carried ({summary(own)}) is replaced")
    say(summary(made))
    say(f"wrote {out}: `import rpe3d`, then AutoModelForCausalLM.from_pretrained({str(out)!r})")
    return 0
