"""`rpe3d tune`: measures the context that a model really uses, and picks the parameters of 3d-rpe for it.

The law file: what `Law.to_dict` gives, and "measured": {"command", "model", "versions", "texts", "seeds", "criterion",
"effective": positions, or 0 where it copies from nowhere, "distances": [{"distance", "first", "again", "text"}],
"weighed": {"even" and "anchored": {"length", "seeds", "text", "again"}}, empty where there was nothing to choose}.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d.cli.arguments import command_line, need, size, write_json
from rpe3d.cli.compare import add_model_arguments, add_text_arguments, load_model, progress_bar
from rpe3d.config import ConfigError, whole

if TYPE_CHECKING:
    from rpe3d.evaluate.effective import Distance, Weighed

TRIALS = 4
WEIGHED = 2
"""Trials for each of two laws, at twice the pretrained length."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face name or folder, a .gguf file, or `default`")
    add("--context", metavar="N", type=size, required=True, help="target context length, e.g. 64k")
    add("--out", metavar="FILE", type=Path, default=Path("law.json"), help="the law file; default law.json")
    add_text_arguments(parser)
    add("--trials", metavar="N", type=int, default=TRIALS, help=f"windows to measure; default {TRIALS}")
    add("--seed", metavar="N", type=int, default=0, help="seed of the first trial; default 0")
    add_model_arguments(parser)
    add("--overwrite", action="store_true", help="replace an existing law file")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    need("models", "transformers")
    out: Path = arguments.out
    if out.suffix != ".json":
        raise ConfigError(f"the law file {out} is not called .json", "give --out a name such as law.json")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}", "make it, or give --out another place")
    if out.exists() and not arguments.overwrite:
        raise ConfigError(f"{out} already exists", "pass another name to --out, or add --overwrite")
    seed, trials = whole("seed", arguments.seed, least=0), whole("trials", arguments.trials)
    from rpe3d.evaluate import effective
    from rpe3d.evaluate.origin import versions
    from rpe3d.evaluate.texts import read_texts, tokenize
    from rpe3d.evaluate.under import about
    from rpe3d.geometry import make_law
    from rpe3d.models import as_stock, facts
    from rpe3d.text import opening

    texts = read_texts(arguments.texts)
    loaded = load_model(arguments)
    model, tokenizer = loaded.model, loaded.tokenizer
    known = facts(as_stock(model))
    usual = make_law("3d-rpe", context=arguments.context, **known)  # refuses a context before anything is measured
    tokens = [tokenize(tokenizer, text) for text in texts]
    seeds = list(range(seed, seed + trials))
    with progress_bar() as progress:
        distances = effective.measure_distances(model, tokens, known["pretrained"], seeds, opening(tokenizer), progress)
    used = effective.effective_context(distances)
    length = min(arguments.context, 2 * known["pretrained"], effective.longest(tokens))
    again, weighed = seeds[:WEIGHED], {}
    if 0 < used < length:
        with progress_bar() as progress:
            first, pretrained = opening(tokenizer), known["pretrained"]
            weighed = effective.weigh(model, used, pretrained, tokens, length, again, first, progress)
    law = usual
    if used:
        anchored = bool(weighed) and weighed["anchored"].cost < weighed["even"].cost
        chosen = effective.pick(used, known["pretrained"], arguments.context, anchored=anchored)
        law = make_law("3d-rpe", context=arguments.context, **known, **chosen)
    measured = {
        "command": command_line(),
        "model": about(model, arguments.model, known),
        "versions": versions(),
        "texts": [{"name": text.name, "sha256": text.sha256} for text in texts],
        "seeds": seeds,
        "criterion": f"again / first, averaged with both neighbours, is at most {effective.AT_MOST}",
        "effective": used,
        "distances": [asdict(one) for one in distances],
        "weighed": {name: {"length": length, "seeds": again, **asdict(one)} for name, one in weighed.items()},
    }
    write_json("--out", out, {**law.to_dict(), "measured": measured})
    _print_distances(distances)
    for line in _reasons(used, known["pretrained"], effective.AT_MOST, law.to_dict(), length, weighed):
        print(line)
    print(f"wrote {out}: `--laws {out}` compares with it", file=sys.stderr)
    return 0


def _print_distances(distances: list[Distance]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rpe3d.evaluate import effective

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("distance", "first sight", "repeated", "share", "averaged", "text up to here"):
        table.add_column(column, justify="right", no_wrap=True)
    for one, mean in zip(distances, effective.averaged(distances), strict=True):
        losses = f"{one.first:.2f}", f"{one.again:.2f}", f"{one.share:.0%}", f"{mean:.0%}"
        table.add_row(str(one.distance), *losses, f"{one.text:.2f}")
    Console().print(table)


def _reasons(
    used: int, pretrained: int, at_most: float, law: dict[str, Any], length: int, weighed: dict[str, Weighed]
) -> list[str]:
    """What was chosen, and why, one line each."""
    if not used:
        return [
            "It copies from nowhere, so its effective context cannot be told this way: the rule of thumb stands.",
            f"chunk {law['chunk']}, window {law['window']}, reach {law['reach']}: 1/16, 5/16 and 1/2 of {pretrained}",
        ]
    found = (
        f"It copies from up to {used} of its {pretrained} positions back (averaged share at most {at_most:.0%}): "
        "that is its effective context."
    )
    if law["context"] <= used:
        return [found, f"The context of {law['context']} is no longer, so that all of it is exact RoPE."]
    least = "half of the pretrained length" if law["reach"] < 3 * used // 4 else "3/4 of that"
    reason = "the defaults, since the texts are too short to try another"
    if weighed:
        even, anchored = (f"{one.text:.3f} + {one.again:.3f}" for one in weighed.values())
        reason = (
            f"at {length} tokens text and repetitions cost {even} nats where all far keys fade, "
            f"{anchored} where the first token does not"
        )
    return [
        found,
        f"reach {law['reach']}: {least}; no pair is shown a distance beyond",
        f"window {law['window']}: {'1/2' if law['sinks'] else '5/8'} of the reach, in whole chunks, is exact",
        f"chunk {law['chunk']}: a tenth of what it uses, as a power of two from 128 to 512",
        f"focus {law['focus']:g}, fade {law['fade']:g}, sinks {law['sinks']}: {reason}",
    ]
