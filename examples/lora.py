"""Fine-tune with LoRA under a law, and generate with the adapter.

    python examples/lora.py DATA [--out runs/lora] [--context 16384] [--length 2048] [--steps 20]

DATA is a text file or a folder of them. The same command resumes a run that was interrupted.
"""

import argparse
from pathlib import Path

import rpe3d
from rpe3d.models import load_adapter
from rpe3d.models.adapters import adapter_law
from rpe3d.models.load import load
from rpe3d.train import Settings, train

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--out", type=Path, default=Path("runs/lora"))
parser.add_argument("--context", type=int, default=16384)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--steps", type=int, default=20)
given = parser.parse_args()

sizes = {"context": given.context, "length": given.length, "steps": given.steps, "batch": 1}
settings = Settings(kind="lm", model="default", data=[given.data], learning_rate=5e-4, warmup=2, **sizes)
adapter = train(settings, given.out, note=print)
print("the adapter and its law lie in", adapter)

loaded = load("default")
rpe3d.extend(loaded.model, adapter_law(adapter))  # an adapter refuses a base under another law
model = load_adapter(loaded.model, adapter)
prompt = loaded.tokenizer("Once upon a time", return_tensors="pt").to(model.device)
print(loaded.tokenizer.decode(model.generate(**prompt, max_new_tokens=10, do_sample=False)[0]))
