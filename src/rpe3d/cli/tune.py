"""`rpe3d tune`: measure how much context a model really uses, and pick the parameters of 3d-rpe or dpe for it.

JSON, schema 1: {"schema": 1, "kind": "tune"} with the content of the law file: the law's parameters, and "measured".
"""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpe3d import files
from rpe3d.cli.arguments import check_writable, command_line, need, size, write_json
from rpe3d.cli.compare import add_text_arguments
from rpe3d.cli.model import MODEL, add_model_arguments, check_law, load_model
from rpe3d.cli.terminal import STDOUT, new_table, note, progress_bar, say, show
from rpe3d.config import ConfigError, whole

if TYPE_CHECKING:
    from rpe3d.evaluate.detection import Trial
    from rpe3d.evaluate.effective import Distance
    from rpe3d.evaluate.tune import Tuned

LAWS = ("3d-rpe", "dpe")
TRIALS, QUESTIONS = 4, 10
CHOSEN = "also try a far field where each query sees only the keys it chooses; default: on a GPU only"
WAYS = {
    "even": "if all far keys fade",
    "anchored": "if the first token does not fade",
    "chosen": "if a query chooses its far keys",
    "wide": "if it chooses twice as many",
}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--context", metavar="N", type=size, required=True, help="target context length, e.g. 64k")
    add("--law", choices=LAWS, default=LAWS[0], help="law to pick parameters for; default 3d-rpe")
    add("--out", metavar="FILE", type=Path, default=Path("law.json"), help="law file to write; default law.json")
    add_text_arguments(parser)
    add("--trials", metavar="N", type=int, help=f"windows to measure; default {TRIALS}; for dpe, {QUESTIONS} questions")
    add("--seed", metavar="N", type=int, help="seed of the first trial; default 0; dpe uses RULER's")
    add("--chosen", action=BooleanOptionalAction, help=CHOSEN)
    add_model_arguments(parser)
    add("--json", metavar="FILE", type=Path, help="also write law and measurements here; - is stdout, instead of words")
    add("--overwrite", action="store_true", help="replace an existing law file")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    need("models", "transformers")
    out: Path = arguments.out
    if out.suffix != ".json":
        raise ConfigError(f"the law file {out} does not end in .json", "pass a name such as law.json to --out")
    check_writable("--out", out)
    if out.exists() and not arguments.overwrite:
        raise ConfigError(f"{out} already exists", "pass another name to --out, or add --overwrite")
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    usual_trials = QUESTIONS if arguments.law == "dpe" else TRIALS
    trials = whole("trials", usual_trials if arguments.trials is None else arguments.trials)
    if arguments.law == "dpe":
        if arguments.chosen is not None:
            raise ConfigError("--chosen is about the far field of 3d-rpe, and dpe has none", "leave --chosen out")
        if arguments.seed is not None:
            raise ConfigError("--seed is about 3d-rpe: the questions of dpe have RULER's seed", "leave --seed out")
        return _detect(arguments, trials)
    seed = whole("seed", 0 if arguments.seed is None else arguments.seed, least=0)
    from rpe3d.evaluate import read_texts, tune
    from rpe3d.geometry import LawSpec
    from rpe3d.models import law_of

    texts = read_texts(arguments.texts)
    check_law(arguments, LawSpec(label="3d-rpe", name="3d-rpe", parameters={}), arguments.context)
    loaded = load_model(arguments)
    if law_of(loaded.model) is not None:
        note("the checkpoint's own law is set aside: tuning measures the stock model")
    with progress_bar() as progress:
        tuned = tune(
            loaded.model,
            loaded.tokenizer,
            context=arguments.context,
            texts=texts,
            trials=trials,
            seed=seed,
            chosen=arguments.chosen,
            name=arguments.model,
            command=command_line(),
            progress=progress,
        )
    with files.refusing(f"cannot write {out}", "pass a writable path to --out"):
        tuned.write(out)
    if not _told(arguments, tuned.content):
        _print_distances(tuned.distances)
        for line in _reasons(tuned):
            print(line)
    say(f"wrote {out}: pass it as `--laws {out}`")
    return 0


def _detect(arguments: Namespace, count: int) -> int:
    """Find the scales of dpe with its published detection method."""
    need("eval", "wonderwords")
    from rpe3d.evaluate import detection
    from rpe3d.evaluate.origin import versions
    from rpe3d.evaluate.texts import read_texts
    from rpe3d.evaluate.under import about
    from rpe3d.geometry import make_law
    from rpe3d.models import as_stock, facts

    texts = read_texts(arguments.texts)
    loaded = load_model(arguments)
    known = facts(as_stock(loaded.model))
    make_law("dpe", context=arguments.context, **known)  # refuses a context before anything is measured
    essay = " ".join(text.content for text in texts)
    asked = detection.questions(loaded.tokenizer, arguments.context, count, essay)
    with progress_bar() as progress:
        law, trials = detection.detect(loaded.model, loaded.tokenizer, known, arguments.context, asked, progress)
    others = detection.base_scale(known["pretrained"], arguments.context)
    measured = {
        "command": command_line(),
        "model": about(loaded.model, arguments.model, known),
        "versions": versions(),
        "texts": [{"name": text.name, "sha256": text.sha256} for text in texts],
        "task": f"ruler:{detection.TASK}",
        "samples": count,
        "others": others,
        "trials": [asdict(trial) for trial in trials],
    }
    content = {**law.to_dict(), "measured": measured}
    write_json("--out", arguments.out, content)
    if not _told(arguments, content):
        _print_trials(trials)
        print(
            f"scales {'-'.join(map(str, law.own['scales']))}: the best of each group, with all other groups at {others}"
        )
    say(f"wrote {arguments.out}: pass it as `--laws {arguments.out}`")
    return 0


def _told(arguments: Namespace, content: dict[str, Any]) -> bool:
    """Write the JSON where it is asked for; say whether stdout holds it already."""
    if arguments.json is not None:
        write_json("--json", arguments.json, {"schema": 1, "kind": "tune", **content})
    return bool(arguments.json == STDOUT)


def _print_trials(trials: list[Trial]) -> None:
    scales = sorted({trial.scale for trial in trials})
    table = new_table("group", *(f"scale {scale}" for scale in scales))
    for group in sorted({trial.group for trial in trials}):
        found = {trial.scale: trial.score for trial in trials if trial.group == group}
        table.add_row(str(group + 1), *(f"{found[scale]:.1f}" for scale in scales))
    show(table)


def _print_distances(distances: list[Distance]) -> None:
    from rpe3d.evaluate import effective

    table = new_table("distance", "first sight", "repeated", "share", "averaged", "text up to here")
    for one, mean in zip(distances, effective.averaged(distances), strict=True):
        losses = f"{one.first:.2f}", f"{one.again:.2f}", f"{one.share:.0%}", f"{mean:.0%}"
        table.add_row(str(one.distance), *losses, f"{one.text:.2f}")
    show(table)


def _reasons(tuned: Tuned) -> list[str]:
    """Return what was chosen and why, one line per parameter."""
    from rpe3d.evaluate import effective

    law, used = tuned.law.to_dict(), tuned.effective
    pretrained = law["pretrained"]
    if not used:
        return [
            "The model copies from nowhere, so its effective context cannot be measured: the rule of thumb applies.",
            f"chunk {law['chunk']}, window {law['window']}, reach {law['reach']}: 1/16, 5/16 and 1/2 of {pretrained}",
        ]
    found = (
        f"The model copies from up to {used} of its {pretrained} positions back "
        f"(averaged share at most {effective.AT_MOST:.0%}): that is its effective context."
    )
    if law["context"] <= used:
        return [found, f"The context of {law['context']} is not longer than that, so all of it is exact RoPE."]
    least = "half of the pretrained length" if law["reach"] < 3 * used // 4 else "3/4 of that"
    weights = f"focus {law['focus']:g}, fade {law['fade']:g}, sinks {law['sinks']}"
    far = []
    if "far" in law:
        share = "as many keys as the reach" if tuned.picked == "wide" else "half of the reach"
        fewest = f"at least {effective.FEWEST} blocks"
        far = [f"far {law['far']}: blocks of {law['block']} keys that a query sees; {share}, {fewest}"]
    return [
        found,
        f"reach {law['reach']}: {least}; no pair is shown a distance beyond it",
        f"window {law['window']}: {'1/2' if law['sinks'] else '5/8'} of the reach, in whole chunks, is exact",
        f"chunk {law['chunk']}: a tenth of the effective context, as a power of two from 128 to 512; at most a quarter",
        *far,
        f"{weights}: {_weighing(tuned)}",
    ]


def _weighing(tuned: Tuned) -> str:
    """Return the cost of each way that was tried, and which was picked and why."""
    from rpe3d.evaluate import effective

    if tuned.picked is None:
        return "the defaults, since the texts are too short to try others"
    first, *others = (
        (f"{one.text:.3f} + {one.again:.3f}", f"{WAYS[way]} ({way})") for way, one in tuned.weighed.items()
    )
    costs = ", ".join([" nats ".join(first), *(" ".join(other) for other in others)])
    why = "since none costs less"
    if tuned.picked != effective.cheapest(tuned.weighed):
        why = f"since it costs at most {effective.LEVEL} more and gains with the length of a text"
    return f"at {tuned.length} tokens text and repetitions cost {costs}; {tuned.picked} is picked, {why}"
