"""Wrap prompts in the words that a chat model expects, as LongBench's and L-Eval's own scripts do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError, choice

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. USER: {prompt} ASSISTANT:"
)
XGEN = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions.\n\n ### Human: {prompt}\n###"
)
FORMS = {
    "none": "{prompt}",
    "llama2": "[INST]{prompt}[/INST]",
    "vicuna": VICUNA,
    "xgen": XGEN,
    "internlm": "<|User|>:{prompt}<eoh>\n<|Bot|>:",
}
TEMPLATE = "template"
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A tokenizer and the form of its model's chats: one of FORMS, or its own template."""

    tokenizer: Any
    form: str

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens that the model reads, with those its tokenizer adds by default."""
        return list(self.tokenizer(prompt, verbose=False).input_ids)

    def wrap(self, prompt: str, system: str = "") -> str:
        """Return the prompt as a user's turn, up to where the assistant's turn begins.

        Only a template has a place for `system`. If it has none, that text opens the user's turn.
        """
        if self.form != TEMPLATE:
            before, after = FORMS[self.form].split("{prompt}")
            return before + system + prompt + after
        if system and not self.takes_system:
            prompt, system = f"{system}\n\n{prompt}", ""
        text = self._rendered(prompt, system)
        first = self.tokenizer.bos_token
        twice = first and text.startswith(first) and self.encode("a")[0] == self.tokenizer.bos_token_id
        return text.removeprefix(first) if twice else text

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template has a place for a system turn: some refuse it, some drop it."""
        from jinja2.exceptions import TemplateError

        try:
            return "Be kind." in self._rendered("Hello.", "Be kind.")
        except TemplateError:
            return False

    def _rendered(self, prompt: str, system: str) -> str:
        """Render a prompt with the template, with thinking switched off if possible: only answers count."""
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": prompt})
        thinks = "enable_thinking" in str(self.tokenizer.chat_template)
        options = {"enable_thinking": False} if thinks else {}
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options))

    def cleaned(self, said: str) -> str:
        """Strip what xgen and internlm put around an answer."""
        if self.form == "xgen":
            return said.strip().replace("Assistant:", "")
        return said.split("<eoa>")[0] if self.form == "internlm" else said


def chat_of(form: str, tokenizer: Any, model: str) -> tuple[Chat, str | None]:
    """Return the chat called `form` and a note for the user; `auto` goes by the model's name, as LongBench does."""
    note = None
    if check_form(form) == TEMPLATE and not tokenizer.chat_template:
        raise ConfigError(f"{model} has no chat template", f"choose another --chat: {', '.join(FORMS)}")
    if form == AUTO:
        form = _by_name(model.lower()) or (TEMPLATE if tokenizer.chat_template else "none")
        if form == "none":
            note = f"{model} has no chat template, so prompts are used as they are; --chat llama2 turns them into chats"
    return Chat(tokenizer=tokenizer, form=form), note


def check_form(form: str) -> str:
    """Refuse an unknown chat form, before there is a tokenizer."""
    return choice("chat", form, [AUTO, TEMPLATE, *FORMS])


def called(model: str) -> str:
    """Return a model's own name: the folder of a hub snapshot is a hash, two levels below the folder with the name."""
    path = Path(model).expanduser()
    real = path.resolve()
    if real.parent.name == "snapshots":
        return real.parent.parent.name.split("--")[-1]
    return path.name or real.name


def _by_name(model: str) -> str | None:
    if "longchat" in model or "vicuna" in model:
        return "vicuna"
    if ("llama2" in model or "llama-2" in model) and "chat" in model:
        return "llama2"
    return next((form for form in ("xgen", "internlm") if form in model), None)
