"""Read a text that is longer than the model was pretrained on, and continue it.

    python examples/extend_and_generate.py [FILE] [--tokens 9000] [--law 3d-rpe]

Without FILE it reads the Python language reference. 9000 tokens take about a minute on two CPU cores.
"""

import argparse
from pathlib import Path

import torch

import rpe3d
from rpe3d.evaluate import default_texts
from rpe3d.models.load import load

parser = argparse.ArgumentParser()
parser.add_argument("file", nargs="?", type=Path)
parser.add_argument("--tokens", type=int, default=9000)
parser.add_argument("--law", default="3d-rpe")
given = parser.parse_args()

loaded = load("default")  # or transformers' from_pretrained, with any model of docs/families.md
model, tokenizer = loaded.model, loaded.tokenizer
text = given.file.read_text(encoding="utf-8") if given.file else default_texts()[0].content
ids = tokenizer(text, return_tensors="pt").input_ids[:, : given.tokens].to(model.device)

rpe3d.extend(model, given.law, context=65536)
law = rpe3d.law_of(model)
print(f"{ids.shape[1]} tokens under {law.name} {law.own}, on a model of {law.pretrained}:")
print("...", tokenizer.decode(ids[0, -30:]), end="")
new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
print(" =>", tokenizer.decode(new[0, ids.shape[1] :]))
