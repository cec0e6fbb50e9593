"""L-Eval's closed-ended tasks (An et al. 2023, arXiv 2307.11088) as its repository renders, cuts and scores them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.chat import TEMPLATE, Chat
from rpe3d.evaluate.tasks.metrics import normalized
from rpe3d.evaluate.tasks.predictions import Record, Score, check_fields
from rpe3d.evaluate.tasks.sample import Sample

WORDS = json.loads((files(__package__) / "data" / "leval.json").read_text(encoding="utf-8"))
TASKS = tuple(WORDS["system"])
DEFAULT = ("coursera", "quality", "codeU", "gsm100", "tpo")
"""Tasks of the paper's Table 2."""
CONTINUED = ("gsm100", "codeU")
"""Tasks whose prompt is left open for the model to continue, as the examples do."""
MAX_NEW = 512
STEP = 250
KEY = "rpe3d_pred"
HINT = 'pass predictions in L-Eval\'s format: {"query": ..., "gt": ..., "MODEL_pred": ..., "evaluation": "exam"}'
DATA_HINT = "pass L-Eval's own files, with input, instructions, outputs and evaluation in each line"
SOURCE = "the closed-ended tasks (Exam) of the hub's data set L4NLP/LEval"


# --- prompts


def longest(length: int) -> int:
    """Return how many document tokens fit a context of `length`: 3488 for 4k, 15488 for 16k."""
    return length // 1024 * 1000 - MAX_NEW


def truncated(task: str, document: str, chat: Chat, most: int) -> str:
    """Shorten a document that is too long to its first words, 250 fewer at each try; for code, to its last words."""
    cut = 0
    while len(chat.encode(document)) > most:
        words = document.split(" ")
        document = " ".join(words[cut - most :] if "code" in task else words[: most - cut])
        cut += STEP
    return document


def message(task: str, document: str, question: str, chat: Chat) -> tuple[str, str]:
    """Return the prompt, and the words around the document, which are all that upstream stores.

    For Llama 2 and Vicuna they are as in their scripts, where the whole prompt goes through `str.format`; other models
    get the words of Llama 2's script in their own chat template, or bare.
    """
    system = WORDS["system"][task]
    asks = WORDS["question"]["vicuna" if chat.form == "vicuna" else "llama2"]
    whole = f"{document}\n\n{question}"
    answer = "\nAnswer:"
    if chat.form == TEMPLATE:
        if task in CONTINUED or task.startswith("topic"):
            return chat.wrap(whole, system), system
        return chat.wrap(asks.format(document=document, inst=question), system) + answer.lstrip(), system + asks
    if chat.form == "llama2":
        begin = f"[INST]<<SYS>>\n{system}\n<</SYS>>\n\n"
        forms = {
            "continued": begin + whole,
            "topic": begin + whole + "[/INST]",
            "asked": f"{begin}{asks}[/INST]{answer}",
        }
    elif chat.form == "vicuna":
        begin = f"{WORDS['vicuna_header']} USER: {system}"
        forms = {
            "continued": system + whole,
            "topic": f"{begin}{whole} \nASSISTANT: ",
            "asked": f"{begin}{asks} {answer}",
        }
    else:
        forms = {"continued": system + whole, "topic": system + whole, "asked": system + asks + answer}
    text = forms["continued" if task in CONTINUED else "topic" if task.startswith("topic") else "asked"]
    around = text.replace(document, "<long document>") if document else text
    with suppress(KeyError, IndexError, ValueError, AttributeError):  # braces of a document: then it stays as it is
        text = text.format(document=document, inst=question)
    return text, around


def samples(
    task: str, records: Sequence[Record], chat: Chat, length: int, limit: int | None = None, authors: bool = False
) -> list[Sample]:
    """Return the first `limit` prompts of a task for a context of `length` tokens, question by question."""
    most = longest(length)
    if most < 1:
        raise ConfigError(f"L-Eval has no room in a context of {length}", "raise --length to 1k or more")
    check_fields(records, {"input": str, "instructions": list, "outputs": list, "evaluation": str}, DATA_HINT)
    made: list[Sample] = []
    for one in records:
        if limit is not None and len(made) >= limit:
            break
        document = truncated(task, one["input"], chat, most)
        for question, answer in zip(one["instructions"], one["outputs"], strict=False):
            prompt, around = message(task, document, question, chat)
            gold = {"query": question, "gt": answer, "prompt": around, "evaluation": one["evaluation"]}
            prompts = (prompt, _fact(question, chat)) if task == "sci_fi" else (prompt,)
            made.append(Sample(prompts=prompts, max_new=MAX_NEW, gold=gold))
    return made[:limit]


def _fact(question: str, chat: Chat) -> str:
    """Return the second question of sci_fi, about the real world, without the document."""
    fact = WORDS["fact"]
    return str(question.replace(fact["from"], fact["to"]) + fact["vicuna" if chat.form == "vicuna" else "llama2"])


def record(sample: Sample, said: Sequence[str]) -> dict[str, Any]:
    """Return a line of the predictions file."""
    prediction = said[0] if len(said) == 1 else f"{said[0]} [fact: {said[1]}]"
    return {**sample.gold, KEY: prediction}


# --- scores


def score(task: str, records: Sequence[Record]) -> Score:
    """Return exact match in percent, to two digits; for topic_retrieval_longchat and sci_fi the mean over questions."""
    key = next((name for name in records[0] if "_pred" in name), "MODEL_pred")
    check_fields(records, {"gt": str, key: str, "evaluation": str}, HINT)
    kinds: dict[int, list[float]] = {}
    for number, one in enumerate(records):
        if one["evaluation"] != "exam":
            raise ConfigError(f"record {number + 1} is of an open-ended task ({one['evaluation']!r})", HINT)
        try:
            pairs = _pairs(task, one["gt"], one[key])
        except IndexError:
            what = "an answer and a [fact: ...]" if task == "sci_fi" else "an answer in 'gt'"
            raise ConfigError(f"record {number + 1} lacks {what}, as {task} has it", HINT) from None
        for kind, (said, gold) in enumerate(pairs):
            place = number % 3 if task.startswith("topic") else kind
            kinds.setdefault(place, []).append(_match(said, gold))
    means = [100.0 * sum(part) / len(part) for part in kinds.values()]
    empty = sum(not one[key].strip() for one in records)
    return Score(score=round(sum(means) / len(means), 2), n=len(records), metric="exact_match", empty=empty)


def _pairs(task: str, gold: str, said: str) -> list[tuple[str, str]]:
    """Reduce answer and gold to the part that the task compares."""
    if task in ("coursera", "quality", "tpo"):
        return [(_letters(said, several=task == "coursera"), re.sub("[^A-D]", "", gold.split()[0]) or "A")]
    if task == "gsm100":
        return [(_number(said), _number(gold))]
    if task == "codeU":
        return [(_output(said, len(gold.split())), _code(gold))]
    if task == "sci_fi":
        return [(_judged(part), right) for part, right in zip(_judgements(said), _judgements(gold), strict=True)]
    return [(said, gold)]


def _match(said: str, gold: str) -> float:
    """Return 1 if equal; for letters, 0.25 for some of the right ones; else compare as numbers, or find gold inside."""
    choice, right = normalized(said), normalized(gold)
    if set(right) <= set("ABCD"):
        return 1.0 if choice == right else 0.25 if set(choice) <= set(right) else 0.0
    try:
        return float(float(said) == float(gold))
    except ValueError:
        return float(gold.lower().replace(" ", "") in said.lower().replace(" ", ""))


def _letters(said: str, several: bool) -> str:
    """Return the options that an answer chooses: the first letter in ABCD, or for `several` the leading or listed ones.

    The result is "A" if there is none, and "None" for an answer without a word.
    """
    if not said.strip():
        return "None"
    if said in "ABCD":
        return said
    if not several and (first := re.search("[A-D]", said)):
        return first[0]
    front = _front(said, "[A-D]*")
    if len(front) > 1:
        return "".join(sorted(set(front)))
    rest = said[len(front) :].split("Question")[0]
    listed = front + "".join(re.findall(r"\s*[A-Z](?=[\s.)])", rest))
    chosen = "".join(sorted(set(re.sub("[^A-D]", "", listed))))
    return chosen or _front(rest, "[^A-D]*([A-D]*)") or "A"


def _front(text: str, pattern: str) -> str:
    found = re.match(pattern, text)
    assert found is not None
    return found[found.re.groups]


def _number(said: str) -> str:
    """Return the digits, up to a full stop, of what `The answer is` names, or of the first paragraph's last number."""
    named = re.search(r"The answer is (\S+)", said)
    words = said.split("\n\n")[0].split(" ")[::-1]
    word = named[1] if named else next((word for word in words if any(map(str.isdigit, word))), "")
    return "".join(filter(str.isdigit, word.split(".")[0]))


def _code(text: str) -> str:
    """Strip what a comparison of values ignores: commas, quotes and spaces."""
    text = re.sub(r"\s+", " ", text)
    for what, by in ((",", ""), ("'", ""), ("\\", ""), (".0", ""), ("] [", "]["), ("[ [", "[["), ("] ]", "]]")):
        text = text.replace(what, by)
    return text


def _output(said: str, words: int) -> str:
    """Return the `words` + 3 words after the last `the final output`, or at the end."""
    text = _code(said)
    for what in ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed"):
        text = text.replace(what, "")
    *before, last = text.split("the final output")
    parts = re.split(r"\s+", last)
    return " ".join(parts[: words + 3] if before else parts[-(words + 3) :])


def _judgements(text: str) -> list[str]:
    """Split an answer into its judgements on the story and on the fact."""
    parts = text.lower().split("[fact:")
    return [parts[0].strip(), parts[1][:-1].strip()]


def _judged(text: str) -> str:
    """Return the first of true and false in a text."""
    for word in text.split():
        for verdict in ("true", "false"):
            if verdict in word:
                return verdict
    return "<error>"
