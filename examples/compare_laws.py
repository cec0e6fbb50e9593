"""Measure which law reads past the pretrained length best: perplexity of one window under each.

    python examples/compare_laws.py [--length 11776] [--laws rope,yarn,dca,3d-rpe]

`rpe3d compare` does the same on the command line, with copying, passkeys, intervals and a report.
"""

import argparse

from rpe3d.evaluate import Settings, compare
from rpe3d.models.load import load

parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=11776)
parser.add_argument("--laws", default="rope,yarn,dca,3d-rpe")
given = parser.parse_args()

loaded = load("default")
settings = Settings(laws=given.laws.split(","), lengths=[given.length], windows=1, measures=["ppl"])
results = compare(loaded.model, loaded.tokenizer, settings)

print(f"{'law':10}{'perplexity':>12}{'its tail':>12}{'seconds':>9}")
for row in sorted(results["rows"], key=lambda row: row["ppl"]):
    print(f"{row['law']:10}{row['ppl']:12.2f}{row['tail_ppl']:12.2f}{row['seconds']:9.1f}")
print("One window: differences of a few hundredths are within the noise.")
