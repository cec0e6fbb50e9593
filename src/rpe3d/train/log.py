"""Show the progress of a run, log it to a CSV that is complete after every step, and plot the loss."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rpe3d.drawing.axes import RC, Paint, line, plain
from rpe3d.drawing.palette import GREY, INK, OWN, SOFT, Style
from rpe3d.train.folder import write

Progress = Callable[[str, float, float], None]
"""Called with what is done, how much of it, and of how much."""
COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second")


class Watch(TrainerCallback):  # type: ignore[misc]
    """Shows progress and writes the CSV, from the first process."""

    def __init__(self, out: Path, progress: Progress) -> None:
        self.out = out
        self.progress = progress

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rows = rows_of(state.log_history)
        if not state.is_world_process_zero or not rows:
            return
        last = rows[-1]
        what = (
            f"step {last['step']}/{state.max_steps}, loss {last['loss']:.4f}, {last['tokens_per_second']:.0f} tokens/s"
        )
        self.progress(what, state.global_step, state.max_steps)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write(self.out / "log.csv", text.getvalue())


def rows_of(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps among the entries that a Trainer has logged."""
    return [{name: entry[name] for name in COLUMNS} for entry in history if "tokens_per_second" in entry]


def draw_loss(rows: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Draw the loss by step, and its mean over a twentieth of the run."""
    import matplotlib
    from matplotlib.figure import Figure

    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    width = max(1, len(rows) // 20)
    means = [sum(part) / len(part) for i in range(len(losses)) if (part := losses[max(0, i - width + 1) : i + 1])]
    paint: Paint = lambda colour: colour.light  # noqa: E731
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7, 4), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        plain(axes, paint)
        line(axes, paint, Style(GREY, width=1.0), steps, losses)
        line(axes, paint, OWN, steps, means)
        axes.lines[0].set_label("each step")
        axes.lines[1].set_label(f"mean of {width}")
        axes.set_title(title, loc="left", color=paint(INK))
        axes.set_xlabel("step", color=paint(SOFT))
        axes.set_ylabel("loss per token", color=paint(SOFT))
        axes.legend(frameon=False, labelcolor=paint(INK))
        figure.savefig(path, dpi=144)
    return path
