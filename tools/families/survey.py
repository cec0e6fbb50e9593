"""Which of transformers' causal-LM families `extend` serves: every one built tiny, extended and compared with itself.

    python tools/families/survey.py --out docs/families.md

A family counts as supported when seven things hold that a user would notice if they did not: see `_check`.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle import calls
from rpe3d.config import ConfigError
from rpe3d.models.extend import check_savable, extend, law_of, restore
from tiny import CLOSE, CONTEXT, LAW, LONG, PICTURES, build, decoded, logits, near, published

SHORT = LAW["window"] + LAW["chunk"]  # fact 1 of docs/paper.md: up to w + c tokens 3D-RPE is RoPE
SECONDS = 90
NO_ROTATION = "describes no rotary position encoding"
VERDICTS = ("WRONG", "supported", "partly", "refused", "not tried")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found out about one family."""

    family: str
    verdict: str
    """One of `VERDICTS`."""
    reason: str = ""


def survey(names: Iterable[str] | None = None) -> list[Row]:
    """A row per family: the installed transformers' causal LMs and some for pictures, unless named.

    Progress goes to stderr.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    names = [*known, *PICTURES] if names is None else list(names)
    rows = []
    for n, name in enumerate(names, 1):
        start = time.perf_counter()
        row = _row(name)
        rows.append(row)
        took = time.perf_counter() - start
        print(f"{n}/{len(names)} {name} ({took:.1f} s): {row.verdict}: {row.reason}", file=sys.stderr, flush=True)
    return rows


def _row(name: str) -> Row:
    ids = torch.randint(3, 97, (1, LONG), generator=torch.Generator().manual_seed(1))
    try:
        with _within(SECONDS), _quiet(), torch.no_grad():
            return _check(name, build(name, ids), ids)
    except _Late:
        return Row(family=name, verdict="not tried", reason=f"took longer than {SECONDS} s")
    except ConfigError as refusal:
        before, _, after = refusal.problem.partition(" cannot be extended: ")
        return Row(family=name, verdict="refused", reason=after or before)
    except Exception as error:  # a family that breaks must not end the survey
        return Row(family=name, verdict="not tried", reason=f"its tiny model does not run: {_line(error)}")


def _check(name: str, model: Any, ids: Tensor) -> Row:
    """Accepted; short inputs and a restored model as stock; long ones not; decoding; saved; each layer by the law."""
    stock = logits(model, ids)
    seen = calls(model, ids)
    close = CLOSE * float(stock.abs().max())
    step, wrong = "extend", ""
    try:
        extend(model, "3d-rpe", context=CONTEXT, **LAW)
        step = "a forward"
        extended = logits(model, ids)
        if not near(logits(model, ids[:, :SHORT]), stock[:, :SHORT], close):
            wrong = f"an input of {SHORT} tokens is changed"
        elif near(extended, stock, close):
            wrong = f"an input of {LONG} tokens is not changed"
        step = "decoding"
        if not wrong and not near(decoded(model, ids), extended, close):
            wrong = "prefill and decode differ from one forward"
        step = "saving"
        kept = bool(wrong) or _same_when_loaded(model, ids, extended, close)
        step = "a layer of its own"
        law = law_of(model)
        outputs = [] if wrong else [call.again(**call.masked()) for call in seen]
        step = "restore"
        restore(model)
        if not wrong and not torch.equal(logits(model, ids), stock):
            wrong = "restore does not give the stock logits"
        step = "a stock layer"
        changed = unturned = 0
        for call, got in zip(seen, outputs, strict=False):
            close = CLOSE * float(call.output.abs().max())
            if law is None or near(got, call.output, close):
                unturned += call.unturned()
                continue
            changed += 1
            expected = call.at(law.relative_position(LONG - 1, torch.arange(LONG)))
            if not near(got[:, -1], expected[:, -1], close):
                wrong = "a layer's scores are not the law's"
                if call.unturned():
                    wrong = "a layer without rotation is turned"
    except ConfigError as error:
        if step == "extend":
            raise
        wrong = wrong or f"accepted, but {step} raises {_line(error)}"
    except Exception as error:
        wrong = wrong or f"{step} raises {_line(error)}"
    if wrong:
        return Row(family=name, verdict="WRONG", reason=wrong)
    row = _accepted(name, model, changed, unturned, bool(seen))
    if published(name):
        row = replace(row, reason=f"{row.reason}; as {published(name)} has them")
    return row if kept else replace(row, reason=f"{row.reason}; in memory only: its config cannot hold a law")


def _same_when_loaded(model: Any, ids: Tensor, expected: Tensor, close: float) -> bool:
    """Whether a model can be saved with its law; raises if what is loaded then is another model."""
    try:
        check_savable(model)
    except ConfigError:
        return False
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    if not near(logits(again, ids), expected, close):
        raise ValueError("another model than was saved")
    return True


def _accepted(name: str, model: Any, changed: int, unturned: int, seen: bool) -> Row:
    config = model.config.get_text_config(decoder=True)
    layers = int(config.num_hidden_layers)
    if not seen:
        return Row(family=name, verdict="supported", reason="its layers could not be looked at one by one")
    if changed >= layers:
        return Row(family=name, verdict="supported", reason=f"{changed} of {layers} layers")
    kinds = {kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"}
    named = {"sliding_attention": "keep their sliding window", "conv": "are convolutions"}
    what = [named.get(kind, f"are {kind.replace('_', ' ')}") for kind in kinds]
    what += ["have no rotation"] if unturned else []
    others = " or ".join(sorted(what)) or "do not attend to the text alone"
    reason = f"{changed} of {layers} layers, the others {others}"
    return Row(family=name, verdict="partly", reason=reason)


# Around a run


class _Late(BaseException):
    """Time is up; no Exception, so that nothing on the way takes it for a family's own."""


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    """`_Late` after so many seconds, where signals can be had."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(*_: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, as families warn of their own defaults; one thread: more only wait in models this small."""
    from transformers.utils import logging

    level, threads, bars = logging.get_verbosity(), torch.get_num_threads(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        torch.set_num_threads(threads)
        if bars:
            logging.enable_progress_bar()


def _line(error: Exception, width: int = 110) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {lines[-1] if 'validation' in lines[0].lower() else lines[0]}"
    return text if len(text) <= width else text[: width - 3] + "..."


# The page


def page(rows: list[Row]) -> str:
    """The survey as Markdown."""
    import transformers

    causal = [row for row in rows if row.family not in PICTURES]
    with_pictures = [row for row in rows if row.family in PICTURES]
    rotating = [row for row in causal if NO_ROTATION not in row.reason]
    extended = sum(row.verdict in ("supported", "partly") for row in rotating)
    lines = [
        "# Which model families can be extended",
        "",
        f"{len(causal)} causal-LM families of transformers {transformers.__version__}: {_total(causal)}.",
        f"Of the {len(rotating)} that rotate, {extended} can be extended, whole or in the layers that reach the whole",
        "text.",
        "",
        "Made by `python tools/families/survey.py --out docs/families.md` on CPU: a tiny random model of every family,",
        f"under `3d-rpe` (context {CONTEXT}, chunk {LAW['chunk']}, window {LAW['window']}, reach {LAW['reach']}).",
        "A family is judged by its config's defaults, or by the config of the model that its row names: the default of",
        "mistral has a window, which v0.1 had and later models do not.",
        "",
        f"- *Supported*: `extend` accepts it; {SHORT} tokens give the stock logits and {LONG} do not; prefill and",
        "  decode equal one forward; the last query of every changed layer equals the stock layer with its keys at the",
        "  law's distances; saved and loaded it is the same; and `restore` gives the stock logits bit for bit.",
        "- *Partly*: so for the layers that reach the whole text, while the others are left as they are.",
        "- *Refused*: `extend` says why, in these words, and changes nothing.",
        "- *Not tried*: the survey's one recipe built no tiny model that runs, which says nothing about real ones.",
        "- *WRONG*: accepted by `extend`, yet one of the checks fails. Do not use it; it is a bug of ours.",
        "",
        "Caches, quantised weights, checkpoints with a long context, and the peers: [caches.md](caches.md).",
        "",
        *_table(causal),
    ]
    if with_pictures:
        lines += [
            "",
            "## Pictures and text",
            "",
            f"{len(with_pictures)} families that take pictures as well, with text alone: {_total(with_pictures)}.",
            "Where a picture's tokens stand on the line of the text (LLaVA, InternVL), a law places them like text.",
            "Where they stand on a plane (Qwen-VL, GLM-V: time, height, width), a prompt with a picture is refused.",
            "",
            *_table(with_pictures),
        ]
    return "\n".join(lines) + "\n"


def _total(rows: list[Row]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])


def _table(rows: list[Row]) -> list[str]:
    lines = ["| Family | Verdict | What was found |", "|---|---|---|"]
    for row in sorted(rows, key=lambda r: (VERDICTS.index(r.verdict), r.family)):
        reason = row.reason.replace("|", "\\|")
        lines.append(f"| {row.family} | {row.verdict} | {reason} |")
    return lines


def main() -> None:
    """Survey, and write the page."""
    parser = argparse.ArgumentParser(prog="python tools/families/survey.py", description=__doc__)
    parser.add_argument("families", nargs="*", help="only these; all unless given")
    parser.add_argument("--out", type=Path, help="a Markdown file; stdout unless given")
    given = parser.parse_args()
    text = page(survey(given.families or None))
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
