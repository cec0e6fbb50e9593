"""Run transformers' Trainer on our batches.

A loss, gradient or weight that is not finite stops it, and its checkpoints are complete or absent.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from rpe3d.config import ConfigError
from rpe3d.models.probe import not_finite
from rpe3d.train import folder, sharded, sound
from rpe3d.train.batches import NAMES, Steps
from rpe3d.train.lora import save_trained
from rpe3d.train.settings import SCHEDULES, Settings


def training_arguments(settings: Settings, out: Path, steps: Steps, device: str, bf16: bool) -> TrainingArguments:
    """Return the settings as the arguments of a Trainer."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if bf16 else "no"  # not a launcher's, or an earlier run's
    again = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"  # transformers 5.23
    checkpointing = {
        f"{again}_checkpointing": settings.gradient_checkpointing,
        f"{again}_checkpointing_kwargs": {"use_reentrant": False} if settings.gradient_checkpointing else None,
    }
    made: TrainingArguments = TrainingArguments(
        output_dir=str(out),
        max_steps=settings.total_steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=steps.accumulation,
        learning_rate=settings.learning_rate,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        lr_scheduler_type=SCHEDULES[settings.schedule],
        warmup_steps=settings.warmup,
        bf16=bf16,
        **checkpointing,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=settings.save_every,
        ignore_data_skip=True,  # the data goes on from a place, not by reading it all again
        remove_unused_columns=False,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if device == "cpu" and steps.processes > 1 else None,
        use_cpu=device == "cpu",
        dataloader_pin_memory=False,
        report_to=["tensorboard"] if settings.tensorboard else [],
        disable_tqdm=True,
        seed=settings.seed,
    )
    made._n_gpu = min(made.n_gpu, 1)  # several GPUs are several processes, not threads of one
    sharded.allow_cpus(made.distributed_state)
    return made


class BeforeStep(TrainerCallback):  # type: ignore[misc]
    """Checks the complete gradient before the optimizer uses it."""

    def __init__(self, trainer: LawTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.check_step()


class LawTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose data are `Steps`, on any number of processes."""

    def __init__(self, model: Any, arguments: TrainingArguments, steps: Steps, callbacks: list[Any]) -> None:
        super().__init__(model=model, args=arguments, train_dataset=steps, callbacks=[*callbacks, BeforeStep(self)])
        self.remove_callback(PrinterCallback)
        self.steps = steps
        self.writing_to: str | None = None
        self.tokens = 0
        self.since = time.perf_counter()
        self.step_names: list[str] = []
        self.bad_loss: str | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, with float32 where FSDP needs it."""
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            sharded.keep_float32(self.accelerator.state.fsdp_plugin)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this process's batches unchanged: they are already divided among processes."""
        return DataLoader(self.steps, batch_size=None)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run a forward and a backward pass; a loss that is not finite stops the run before its step."""
        names = inputs.pop(NAMES)
        self.step_names += names
        self.tokens += inputs["input_ids"].numel() * self.steps.processes
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self.bad_loss is None and not torch.isfinite(loss):
            self.bad_loss = f"the loss is {loss.item()} at step {self.state.global_step + 1}, on {', '.join(names)}"
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass on the number of tokens as an int: transformers 5.23 makes it a float, which FSDP rounds to 8 bits."""
        count = kwargs.get("num_items_in_batch")
        if isinstance(count, Tensor) and count.is_floating_point():
            kwargs["num_items_in_batch"] = count.item()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def check_step(self) -> None:
        """Refuse a step whose loss or gradient is not finite, in all processes together, before it is made."""
        problem, names = self.bad_loss, self.step_names
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        if problem is None and not sound.finite(gradients):
            step = self.state.global_step + 1
            problem = f"the gradient of step {step} is not finite, on {', '.join(dict.fromkeys(names))}"
        self.bad_loss, self.step_names = None, []
        hint = "check that text, or lower the learning rate"
        if problem is not None and (weight := not_finite(self.accelerator.unwrap_model(self.model))):
            problem, hint = f"{problem}: {weight}", "copy or convert the model's weights again"
        if problem := sound.first_of_all(problem, self.args.device):
            raise ConfigError(problem, f"{hint}; the same command resumes from the last checkpoint")

    def check_weights(self, step: int) -> None:
        """Refuse to save weights or optimizer states that are not finite: every later run would resume from them."""
        weights = (p.detach() for p in self.model.parameters() if p.requires_grad)
        states = sound.tensors_in(self.optimizer.state_dict()["state"])
        good = sound.finite([*weights, *states])
        problem = None if good else f"the weights after step {step}, or their optimizer's states, are not finite"
        if problem := sound.first_of_all(problem, self.args.device):
            hint = "lower the learning rate, and pass a new folder to --out"
            raise ConfigError(problem, hint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Also log the tokens of the step and their rate."""
        if "loss" in logs:
            now = time.perf_counter()
            logs = {**logs, "tokens": self.tokens, "tokens_per_second": round(self.tokens / (now - self.since), 1)}
            self.tokens, self.since = 0, now
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return self.writing_to or str(super()._get_output_dir(trial))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:  # from transformers 5.23 on, every process is asked
            return
        target = Path(output_dir or self.args.output_dir)
        target.mkdir(parents=True, exist_ok=True)
        save_trained(self.accelerator.unwrap_model(self.model), target, state_dict)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write under another name, then rename: after a kill there are only complete checkpoints."""
        out, step = Path(self.args.output_dir), self.state.global_step
        self.check_weights(step)
        made = out / folder.UNFINISHED / f"checkpoint-{step}"
        self.writing_to = str(made.parent)
        try:
            with folder.writing(f"the checkpoint of step {step}"):
                super()._save_checkpoint(model, trial)
                if self.args.process_index == 0:
                    (made / folder.PLACE).write_text(json.dumps(self.steps.places[step]), encoding="utf-8")
                if self.args.world_size > 1:
                    dist.barrier()
                if self.args.process_index == 0:
                    folder.settle(made, out / made.name)
                    folder.forget_old(out)
        finally:
            self.writing_to = None
            if self.args.process_index == 0:
                folder.sweep(out)
