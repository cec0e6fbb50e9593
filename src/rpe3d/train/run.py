"""Run training from settings to a folder: a run resumes where it stopped, and ends with an adapter or a model."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rpe3d.config import ConfigError, choice, real
from rpe3d.geometry import Law, saved_law
from rpe3d.models import extend, law_of, pretrained_length
from rpe3d.models.adapters import FILE, adapter_law
from rpe3d.models.card import public_name, write_model_card
from rpe3d.models.carried import parameters_of
from rpe3d.models.checkpoint import fingerprint
from rpe3d.models.devices import has_cuda
from rpe3d.models.extend import check_savable
from rpe3d.models.load import Loaded, load
from rpe3d.models.processes import processes
from rpe3d.train import folder, sharded, sound
from rpe3d.train.attention import TrainingAttention, training_attention
from rpe3d.train.batches import Steps
from rpe3d.train.chat import Chats
from rpe3d.train.corpus import Corpus, open_corpus
from rpe3d.train.limit import Limit, OutOfTime
from rpe3d.train.log import Progress, Watch, draw_loss, rows_of
from rpe3d.train.lora import base_name, save_trained, trainable
from rpe3d.train.samples import READ, Place, Sample, read_so_far
from rpe3d.train.settings import FREE, Settings
from rpe3d.train.trainer import LawTrainer, training_arguments
from rpe3d.train.ulysses import sequence_parallel
from rpe3d.train.windows import Windows


def silent(what: str, done: float, total: float) -> None:
    """Ignore progress."""


def train(
    settings: Settings,
    out: Path,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    note: Any = lambda text: None,
    minutes: float | None = None,
) -> Path:
    """Train as `settings` say, in the folder `out`, and return the folder of the result.

    The same call resumes where an earlier one stopped. `note` is called with messages for the user. Before the
    `minutes` are up, the run stops at a checkpoint and raises `OutOfTime`.
    """
    begun = time.monotonic()
    if minutes is not None:
        real("minutes", minutes, above=True)
    kind = choice("device", device or ("cuda" if has_cuda() else "cpu"), ("cpu", "cuda"))
    corpus = open_corpus(settings.data, settings.split)
    state = processes(cpu=kind == "cpu")
    first = state is None or state.process_index == 0
    result = out / ("model" if settings.method == "full" else "adapter")
    with folder.locked(out) if first else nullcontext():
        asked = _asked(settings, corpus) if first else {}
        if first:
            over = folder.finished_steps(out, result) == settings.total_steps
            folder.check_training(out, asked if over else {**asked, **dict.fromkeys(folder.DATA)}, result)
            if not over:
                sound.set_damaged_aside(out, note)
        if state is not None:
            state.wait_for_everyone()
        if (finished := folder.finished_steps(out, result)) == settings.total_steps:
            note(f"{result} is already finished")
            return result
        sharded.check(settings, kind, folder.last_checkpoint(out))
        bf16 = settings.precision == "bf16" or (settings.precision is None and kind != "cpu")
        loaded = load(
            settings.model,
            dtype=torch.bfloat16 if bf16 and settings.method != "full" else torch.float32,
            device=_place(state, kind),
            trust_remote_code=trust_remote_code,
        )
        for text in loaded.notes:
            note(text)
        trainer = _prepared(settings, out, corpus, loaded, kind, bf16, progress)
        limit = None if minutes is None else Limit(minutes, begun)
        if limit is not None:
            trainer.add_callback(limit)
        last = folder.last_checkpoint(out)
        if first:
            asked["model_sha256"] = asked["model_sha256"] or fingerprint(settings.model)  # it may have been downloaded
            before = folder.asked_before(out) or asked
            changed = before.get("data_sha256") != asked["data_sha256"]
            unread = changed and _reads_the_same(settings, corpus, loaded.tokenizer, last)
            folder.check_training(out, {**asked, **dict.fromkeys(folder.DATA)} if unread else asked, result)
            folder.sweep(out)
            folder.write_json(out / folder.ASKED, {**asked, folder.FINISHED: finished})
            if last is None:
                (out / "log.csv").unlink(missing_ok=True)  # of a run that left nothing else
        if last is not None:
            note(f"resuming from {last.name}")
        learn(trainer, loaded.model, settings, resume=last)
        if limit is not None and limit.stopped:
            raise OutOfTime(trainer.state.global_step, settings.total_steps)
        _finish(trainer, loaded, settings, out, result, note)
        if first:
            folder.write_json(out / folder.ASKED, {**asked, folder.FINISHED: settings.total_steps})
    return result


def _place(state: Any, kind: str) -> Any:
    """Return where the weights are loaded: what FSDP will divide must not first be whole on one GPU."""
    if sharded.wanted(kind):
        return "cpu"
    return kind if state is None or kind == "cpu" else state.device


def _asked(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """Return what identifies a run."""
    asked = {name: value for name, value in settings.to_dict().items() if name not in FREE}
    data = {"data": [base_name(name) for name in settings.data], "documents": len(corpus)}
    prints = {"model_sha256": fingerprint(settings.model), "data_sha256": corpus.fingerprint()}
    return {**asked, "model": base_name(settings.model), **data, **prints}


def _prepared(
    settings: Settings, out: Path, corpus: Corpus, loaded: Loaded, device: str, bf16: bool, progress: Progress
) -> LawTrainer:
    """Return the model under its law with its trainable parameters, and its data, at the last checkpoint."""
    from transformers import set_seed

    model: Any = loaded.model
    settings.spec.check(pretrained_length(model))
    last = folder.last_checkpoint(out)
    begun = None if last is None else law_in_checkpoint(last)
    if begun is None:
        extend(model, settings.law, context=settings.context, **settings.parameters)
    else:  # defaults may have changed since the run began
        extend(model, begun)
    if settings.method == "full":
        check_savable(model)
    model.config.use_cache = False
    set_seed(settings.seed)
    model = trainable(model, settings)
    index, count = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _started() else (0, 1)
    place = {} if last is None else _place_of(last)
    steps = Steps(
        samples=_samples(settings, corpus, loaded.tokenizer, place),
        settings=settings,
        done=0 if last is None else folder.step_of(last),
        process=index,
        processes=count,
        parallel=sequence_parallel(settings.sequence_parallel),
        read=place.get(READ, ""),
    )
    arguments = training_arguments(settings, out, steps, device, bf16)
    return LawTrainer(model, arguments, steps, [Watch(out, progress)])


def law_in_checkpoint(checkpoint: Path) -> Law | None:
    """Return the law that a checkpoint was trained under; None if it names none."""
    if (checkpoint / FILE).is_file():
        return adapter_law(checkpoint)
    content = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    parameters = parameters_of(SimpleNamespace(**content.get("text_config", content)))
    return saved_law(parameters["law"]) if parameters and "law" in parameters else None


def _reads_the_same(settings: Settings, corpus: Corpus, tokenizer: Any, last: Path | None) -> bool:
    """Return whether the data trained on before a checkpoint would be read again, so that only later data changed."""
    if last is None:
        return False
    samples, read = iter(_samples(settings, corpus, tokenizer, {})), ""
    with suppress(ConfigError):
        for _ in range(folder.step_of(last)):
            read = read_so_far(read, islice(samples, settings.batch))
    return read == _place_of(last).get(READ)


def _place_of(checkpoint: Path) -> Place:
    place: Place = json.loads((checkpoint / folder.PLACE).read_text(encoding="utf-8"))
    return place


def _started() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _samples(settings: Settings, corpus: Corpus, tokenizer: Any, place: Place) -> Iterable[Sample]:
    if settings.kind == "sft":
        return Chats(corpus, tokenizer, length=settings.window, seed=settings.seed, place=place)
    return Windows(
        corpus,
        tokenizer,
        length=settings.window,
        mix=settings.mix,
        pack=settings.pack,
        seed=settings.seed,
        field=settings.text_field,
        place=place,
    )


def learn(trainer: LawTrainer, model: Any, settings: Settings, resume: Path | None = None) -> None:
    """Run the steps of a trainer, with the attention that its model's law needs."""
    with _quiet(), _attention(trainer, model, settings):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))


@contextmanager
def _attention(trainer: LawTrainer, model: Any, settings: Settings) -> Iterator[None]:
    """Return our attention if the law, shifted sparse attention or shared sequences need it; else the model's own."""
    law = law_of(model)
    assert law is not None
    parallel = trainer.steps.parallel
    group = settings.window // 4 if settings.attention == "s2" else None
    with ExitStack() as stack:
        if law.needs_attention or group or parallel:
            chosen = TrainingAttention(skipping=bool(settings.pose), group=group, parallel=parallel)
            stack.enter_context(training_attention(model, chosen))
        yield


def _told(settings: Settings) -> dict[str, Any]:
    """Return what the result's card says about its training."""
    shown = ("kind", "method", "rank", "alpha", "steps", "batch", "length", "learning_rate", "schedule", "seed")
    names = ", ".join(map(public_name, settings.data))
    return {"data": names} | {name.replace("_", " "): getattr(settings, name) for name in shown}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the Trainer's messages for developers."""
    logger = logging.getLogger("transformers.trainer")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _finish(trainer: LawTrainer, loaded: Loaded, settings: Settings, out: Path, result: Path, note: Any) -> None:
    """Write a plot, and then the result under its name: once that exists, the run is over."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    whole = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    if trainer.args.process_index == 0:
        draw_loss(rows_of(trainer.state.log_history), f"{settings.model} under {settings.law}", out / "loss.png")
        made = out / f"{folder.UNFINISHED}-{result.name}"
        try:
            with folder.writing(str(result)):
                made.mkdir()
                model.config.use_cache = True
                digest = (folder.asked_before(out) or {}).get("model_sha256")
                save_trained(model, made, whole, _told(settings), digest)
                if settings.method == "full" and (law := law_of(loaded.model)):
                    write_model_card(made, law, settings.model, training=_told(settings))
                if loaded.tokenizer is not None:
                    loaded.tokenizer.model_max_length = settings.context
                    loaded.tokenizer.save_pretrained(made)
                folder.settle(made, result)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        folder.forget_old(out, kept=1)
        if left_out := getattr(trainer.steps.samples, "left_out", 0):
            note(f"{left_out} conversations are longer than {settings.window} tokens and were left out")
    if trainer.args.world_size > 1:
        torch.distributed.barrier()
