"""All laws on one model within given minutes, in one process that can be run again: ppl, tail, LongPPL, copy, passkeys.

    python benchmarks/peers.py --model default --lengths 16k,32k,64k --minutes 25 --texts FILE ... --out DIR
    python benchmarks/peers.py --model tinyllama.gguf --lengths 4k,8k,16k --minutes 25 --texts FILE ... --out DIR
    python benchmarks/peers.py --model qwen.gguf --lengths 64k,128k --minutes 28 --texts FILE ... --out DIR

It is `rpe3d compare --measures ppl,copy,passkey,longppl` with a clock. When the minutes are over it stops, between two
probes, and says how many rows there are; the same command resumes there. `--detect N` first finds the scales of
`dpe` for the longest length with N questions (`rpe3d tune --law dpe`), for as long as it takes, and writes them to
DIR/dpe.json, which is read from then on; without it `dpe` is `self-extend`. DIR/compare.json has the rows, as `rpe3d
compare --json` writes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from rpe3d.cli.arguments import laws, size, sizes, write_json
from rpe3d.evaluate import Settings, compare, detection, read_texts
from rpe3d.evaluate.under import about
from rpe3d.models import as_stock, facts
from rpe3d.models.load import Loaded, load
from stamp import stamp

LAWS = (
    "rope,3d-rpe,dca,dca:attention_factor=deployed,yarn,lampe,self-extend,dpe,rerope,streaming-llm,leaky-rerope,string,"
    "longrope,logn,cope,ntk,dynamic,linear"
)
"""Those that decide come first. The two other forms of 3D-RPE are for training."""


class TimeUpError(Exception):
    """The minutes are over."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--lengths", type=sizes, required=True)
    add("--laws", default=LAWS)
    add("--minutes", type=float, required=True, help="of measuring; loading the model is not counted")
    add("--texts", type=Path, nargs="+", default=[])
    add("--windows", type=int, default=12)
    add("--copies", type=int, default=16)
    add("--passkeys", type=int, default=40)
    add("--measures", default="ppl,copy,passkey,longppl")
    add("--detect", type=int, metavar="N", help="questions for the scales of dpe")
    add("--detect-at", type=size, metavar="N", help="tokens of these; default the longest length")
    add("--device")
    add("--out", type=Path, required=True)
    return parser.parse_args()


def detected(asked: argparse.Namespace, loaded: Loaded) -> Path:
    """The law file of `dpe`, found now if it is not there."""
    file = Path(asked.out) / "dpe.json"
    if file.exists():
        return file
    context = asked.detect_at or max(asked.lengths)
    known = facts(as_stock(loaded.model))
    essay = " ".join(text.content for text in read_texts(asked.texts))
    questions = detection.questions(loaded.tokenizer, context, asked.detect, essay)
    law, trials = detection.detect(loaded.model, loaded.tokenizer, known, context, questions, said)
    measured = {
        "model": about(loaded.model, asked.model, known),
        "samples": asked.detect,
        "trials": [asdict(trial) for trial in trials],
        **stamp(cuda=torch.cuda.is_available()),
    }
    write_json("--out", file, {**law.to_dict(), "measured": measured})
    return file


def said(what: str, done: float, total: float) -> None:
    print(f"{what}: {done:.0f} of {total:.0f}", file=sys.stderr, flush=True)


def main() -> int:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    loaded = load(asked.model, device=asked.device)
    names = asked.laws
    if asked.detect is not None or (asked.out / "dpe.json").exists():
        names = ",".join(str(detected(asked, loaded)) if name == "dpe" else name for name in names.split(","))
    counts = {name: getattr(asked, name) for name in ("lengths", "windows", "copies", "passkeys")}
    settings = Settings(laws=laws(names), measures=asked.measures.split(","), **counts)
    file, end = asked.out / "compare.json", time.monotonic() + 60 * asked.minutes

    def progress(what: str, done: float, total: float) -> None:
        if time.monotonic() > end:
            raise TimeUpError
        said(what, done, total)

    keys = asked.out / "keys.json" if "longppl" in settings.measures else None
    try:
        compare(
            loaded.model,
            loaded.tokenizer,
            settings,
            texts=read_texts(asked.texts),
            file=file,
            keys=keys,
            progress=progress,
            name=asked.model,
            command=stamp(cuda=torch.cuda.is_available())["recipe"],
        )
    except TimeUpError:
        rows = len(json.loads(file.read_text())["rows"]) if file.exists() else 0
        print(f"the time is up at {rows} of {len(settings.entries) * len(settings.lengths)} rows; run it again")
        return 3
    print(f"all {len(settings.entries) * len(settings.lengths)} rows are in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
