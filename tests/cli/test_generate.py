"""`rpe3d generate`: a document is asked under a law that has room for it, and the answer alone is data."""

from __future__ import annotations

import io

import pytest
import torch
from refusal import refusal

import rpe3d
import tiny_lm
from rpe3d.cli import generate, main
from rpe3d.config import ConfigError
from rpe3d.models.load import load

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = ("--max-new", "8", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture
def document(tmp_path):
    (tmp_path / "long.txt").write_text("the sun and the moon " * 30)  # a token for each byte: beyond 256
    return tmp_path / "long.txt"


def said(capsys, *argv):
    assert main(["generate", *map(str, argv)]) == 0
    return capsys.readouterr()


def answer_of(folder, text, **law):
    """What transformers itself says, with the model extended by hand."""
    loaded = load(str(folder), device="cpu")
    if law:
        rpe3d.extend(loaded.model, **law)
    ids = torch.tensor([loaded.tokenizer(text).input_ids])
    made = loaded.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return loaded.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_document_is_asked_under_a_law_with_room_for_it(folder, document, capsys):
    found = said(capsys, folder, "where?", "--document", document, *FEW)
    text = f"{document.read_text().strip()}\n\nwhere?"
    assert found.out.rstrip("\n") == answer_of(folder, text, context=1024).rstrip("\n")
    assert "note: 3d-rpe from 256 to 1024 tokens" in found.err


def test_a_document_is_read_in_pieces_and_answered_alike(folder, document, capsys):
    argv = (folder, "where?", "--document", document, *FEW)
    whole = said(capsys, *argv)
    pieces = said(capsys, *argv, "--piece", "100")
    assert pieces.out == whole.out
    assert "reading" in pieces.err
    assert "reading" not in whole.err
    grown = said(capsys, *argv, "--piece", "100", "--law", "dynamic", "-v")
    assert "the prompt is read in one piece: its frequencies change" in grown.err
    assert "tokens read and 8 written in" in grown.err
    assert "--piece is 0" in refusal(capsys, "generate", *argv, "--piece", "0")[1]


def test_a_document_is_read_under_one_law_and_asked_under_another(folder, document, capsys):
    """As by hand: the document up to the question under --law, the rest under --ask, on the same cache."""
    laws = {"law": {"chunk": 16, "window": 32, "reach": 64, "far": 2}, "ask": {"chunk": 16, "window": 16, "reach": 200}}
    words = {
        f"--{option}": "3d-rpe:" + ",".join(f"{name}={value}" for name, value in own.items())
        for option, own in laws.items()
    }
    argv = ["--document", document, "--context", "1k", *FEW, *(x for pair in words.items() for x in pair)]
    found = said(capsys, folder, "where?", *argv, "--piece", "100")
    assert "note: asked under 3d-rpe from 256 to 1024 tokens, chunk 16, window 16, reach 200" in found.err

    loaded = load(str(folder), device="cpu")
    model, tokenizer = rpe3d.extend(loaded.model, context=1024, **laws["law"]), loaded.tokenizer
    ids = torch.tensor([tokenizer(f"{document.read_text().strip()}\n\nwhere?").input_ids])
    with torch.no_grad():
        cache = model(ids[:, : -len("where?")], use_cache=True).past_key_values  # a token for each byte
    rpe3d.extend(model, context=1024, **laws["ask"])
    made = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found.out.rstrip("\n") == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).rstrip("\n")
    assert found.out != said(capsys, folder, "where?", *argv[:-2]).out


def test_what_cannot_be_asked_under_another_law_is_refused(folder, document, capsys):
    """A law that rotates what lies in the cache otherwise would be wrong without a word."""
    argv = ("generate", folder, "where?", "--document", document, *FEW)
    assert refusal(capsys, *argv, "--ask", "yarn")[1] == "--ask is for 3d-rpe, but --ask is yarn"
    assert refusal(capsys, *argv, "--law", "yarn", "--ask", "3d-rpe")[1] == "--ask is for 3d-rpe, but --law is yarn"
    assert "after a document" in refusal(capsys, "generate", folder, "where?", *FEW, "--ask", "3d-rpe")[1]
    assert "chunk is 999" in refusal(capsys, *argv, "--ask", "3d-rpe:chunk=999")[1]
    assert "decay is 0" in refusal(capsys, *argv, "--ask", "3d-rpe:far=2,decay=0")[1]


@pytest.mark.parametrize("option", ["--law", "--ask"])
def test_layers_that_the_model_lacks_are_refused_before_anything_is_read(folder, document, capsys, monkeypatch, option):
    monkeypatch.setattr(generate, "_read", lambda *_: pytest.fail("read"))
    argv = ("generate", folder, "where?", "--document", document, *FEW, option, "3d-rpe:far=2,full=99")
    assert "names layer 99, but the model has layers 0 to 1" in refusal(capsys, *argv)[1]


CHAT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"


@pytest.mark.parametrize(
    ("template", "question"),
    [
        (None, "where?"),
        (CHAT, "where?"),
        (CHAT, "assistant"),  # stands in the template as well
        (CHAT, "the sun"),  # and in the document
        (CHAT, "  where?\n"),
        (CHAT.replace("m.content", "m.content | trim"), " where? "),
        (CHAT.replace("<|assistant|>", "Question: "), "Question"),
    ],
)
def test_the_question_begins_where_the_document_ends(template, question):
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = template
    document = "the sun and the moon \n\n"
    text, how = generate._as_read(tokenizer, document + question, raw=False)
    count = generate._question_tokens(tokenizer, document, question, raw=False)
    assert tokenizer(text, **how).input_ids[:-count] == tokenizer(text[:-count], **how).input_ids  # a token a byte
    assert text[:-count].endswith(document)
    assert text[-count:].startswith(question.rstrip() if template and "trim" in template else question)


@pytest.mark.parametrize("made_of", ["m.content | upper", "m.content | replace('where', 'in what place')"])
def test_a_template_may_change_letters(made_of):
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = CHAT.replace("m.content", made_of)
    text, _ = generate._as_read(tokenizer, "the sun\n\nwhere?", raw=False)
    count = generate._question_tokens(tokenizer, "the sun\n\n", "where?", raw=False)
    assert text[:-count].lower() == "<|user|>\nthe sun\n\n"


@pytest.mark.parametrize("made_of", ["m.content[:30]", "m.content | length"])
def test_a_template_that_makes_something_else_of_the_prompt_is_refused(made_of):
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = CHAT.replace("m.content", made_of)
    with pytest.raises(ConfigError, match="the model's chat template changes the prompt"):
        generate._question_tokens(tokenizer, "the sun and the moon\n\n", "where is it that they stand?", raw=False)


def test_a_token_that_depends_on_what_comes_before_it_is_counted_in_its_place():
    """A tokenizer that puts a space before a text cuts a question by itself otherwise than after a document."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(dict.fromkeys("\u2581where?tsun\n "))}
    vocabulary = letters | {"\u2581w": len(letters), "\u2581wh": len(letters) + 1}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u2581", "w"), ("\u2581w", "h")]))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    alone = len(tokenizer("where?").input_ids)
    assert generate._question_tokens(tokenizer, "the sun\n\n", "where?", raw=True) == len("where?") == alone + 1


def test_a_checkpoint_keeps_its_own_3d_rpe_for_the_document(folder, tmp_path, document, capsys):
    argv = ["--document", document, "--ask", "3d-rpe:chunk=16,window=16,reach=200", *FEW]
    for law, out in (("3d-rpe:chunk=32,far=2", "own"), ("yarn", "other")):
        assert main(["extend", str(folder), "--context", "1k", "--out", str(tmp_path / out), "--law", law]) == 0
    found = said(capsys, tmp_path / "own", "where?", *argv).err
    assert "replaced" not in found
    assert "asked under 3d-rpe from 256 to 1024 tokens, chunk 16" in found
    refused = refusal(capsys, "generate", tmp_path / "other", "where?", *argv)[1]
    assert refused == "--ask is for 3d-rpe, but the checkpoint's own law is yarn"


def test_a_template_that_refuses_the_prompt_is_said(folder, tmp_path, capsys):
    made = tiny_lm.save(tmp_path / "chat")
    (made / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    code, problem, hint = refusal(capsys, "generate", made, "where?", *FEW)
    assert (code, problem) == (1, "the model's chat template rejects the prompt: no users here")
    assert "--raw" in hint


def test_a_short_prompt_is_answered_by_the_model_as_it_is(folder, capsys):
    found = said(capsys, folder, "where?", *FEW)
    assert found.out.rstrip("\n") == answer_of(folder, "where?").rstrip("\n")
    assert "note" not in found.err


def test_any_law_with_its_parameters_and_stdin(folder, document, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("where?"))
    argv = ["--law", "near=3d-rpe:chunk=16", "--reach", "64", "--context", "1k", "--document", document, *FEW]
    found = said(capsys, folder, *argv, "-")
    assert "chunk 16, window 48, reach 64" in found.err
    text = f"{document.read_text().strip()}\n\nwhere?"
    assert found.out.rstrip("\n") == answer_of(folder, text, context=1024, chunk=16, reach=64).rstrip("\n")


def test_what_has_no_room_is_refused(folder, document, capsys):
    argv = ("--document", document, *FEW)
    code, problem, hint = refusal(capsys, "generate", folder, "where?", "--context", "512", *argv)
    assert code == 1
    assert problem.endswith("tokens, above the context of 512")
    assert "raise --context" in hint
    assert refusal(capsys, "generate", folder, " ", *FEW)[1] == "the prompt is empty"
    assert refusal(capsys, "generate", folder, "x", "--law", "3drpe")[2].startswith("did you mean '3d-rpe'?")
    assert "cannot read" in refusal(capsys, "generate", folder, "x", "--document", document.parent / "none")[1]


def test_a_law_of_the_checkpoint_that_is_replaced_is_said(folder, tmp_path, document, capsys):
    """--context alone puts the checkpoint under the default law: its own must not go without a word."""
    own = str(tmp_path / "own")
    assert main(["extend", str(folder), "--context", "512", "--out", own, "--law", "3d-rpe:chunk=32"]) == 0
    with pytest.warns(UserWarning, match="is longer than the context 512"):
        kept = said(capsys, own, "where?", "--document", document, *FEW).err
    assert "the checkpoint's law is for 512; --context N replaces it" in kept
    replaced = said(capsys, own, "where?", "--document", document, "--context", "1k", *FEW).err
    assert "note: the checkpoint's own law (3d-rpe from 256 to 512 tokens, chunk 32," in replaced


def test_a_seed_that_has_no_effect_is_said(folder, capsys):
    told = "note: --seed has no effect without a --temperature above 0"
    assert told in said(capsys, folder, "where?", *FEW, "--seed", "1").err
    assert "no effect" not in said(capsys, folder, "where?", *FEW, "--seed", "1", "--temperature", "1").err
