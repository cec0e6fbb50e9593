"""Supervised fine-tuning: conversations in the model's own chat template, trained on the answers only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.train.corpus import Corpus
from rpe3d.train.samples import IGNORED, Place, Sample, shuffled

FORMS = 'a record needs "messages" (role and content), or "instruction", optionally "input", and "output"'

Message = dict[str, str]


def messages_of(name: str, record: dict[str, Any]) -> list[Message]:
    """Return a record as a conversation. LongAlpaca's records have an instruction and an output."""
    if isinstance(record.get("messages"), list):
        messages: list[Message] = record["messages"]
        if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
            raise ConfigError(f"{name} has a message without role or content", FORMS)
    elif isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        question = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    else:
        raise ConfigError(f"{name} is not a conversation: it has {', '.join(record) or 'no fields'}", FORMS)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{name} has no answer (role assistant)", FORMS)
    return messages


def tokenized(tokenizer: Any, name: str, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Return tokens and labels. An answer is what the template adds to the prompt that a user would send."""

    def rendered(some: list[Message], prompt: bool) -> str:
        try:
            text = tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # templates raise what they like, on roles that do not alternate, say
            raise ConfigError(f"{name} does not fit the chat template ({error})", "fix or remove it") from error
        return str(text)

    whole = rendered(messages, prompt=False)
    answers: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = rendered(messages[:i], prompt=True), rendered(messages[: i + 1], prompt=False)
        if not whole.startswith(after) or not after.startswith(before):
            raise ConfigError(
                f"the chat template changes what comes before answer {len(answers) + 1} of {name}",
                "put one question and one answer in a record",
            )
        answers.append((len(before), len(after)))
    read = tokenizer(whole, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    learned = [any(a <= start < z for a, z in answers) for start, _ in read.offset_mapping]
    labels = [token if learn else IGNORED for token, learn in zip(read.input_ids, learned, strict=True)]
    return list(read.input_ids), labels


class Chats:
    """The endless sequence of conversations, from a place on; those that are too long are left out and counted."""

    def __init__(self, corpus: Corpus, tokenizer: Any, *, length: int, seed: int, place: Place) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the model's tokenizer has no chat template", "use an instruct or chat model")
        for source in corpus.sources:
            source.record(0)  # a text without fields is refused at once
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.length = length
        self.seed = seed
        self.epoch = int(place.get("epoch", 0))
        self.next = int(place.get("next", 0))
        self.left_out = int(place.get("left_out", 0))

    def __iter__(self) -> Iterator[Sample]:
        while True:
            order = shuffled(len(self.corpus), self.seed, self.epoch)
            given = 0
            whole_epoch = self.next == 0
            for number in order[self.next :]:
                self.next += 1
                source, index = self.corpus[number]
                name = source.name(index)
                ids, labels = tokenized(self.tokenizer, name, messages_of(name, source.record(index)))
                if len(ids) > self.length:
                    self.left_out += 1
                    continue
                given += 1
                place = {"epoch": self.epoch, "next": self.next, "left_out": self.left_out}
                yield Sample(ids=ids, labels=labels, name=name, after=place)
            if whole_epoch and not given:
                raise ConfigError(
                    f"no conversation has at most {self.length} tokens", "raise --length, or pass shorter ones"
                )
            self.epoch, self.next = self.epoch + 1, 0
