"""Build the wheel, install it with each extra into an empty virtual environment, and let it do that extra's work.

    python tools/check_wheel.py [EXTRA ...]        # default: all but serve, which needs vLLM

What `pip install -e` forgives, a wheel does not: data files that are not packaged, imports of packages that no extra
names. Commands run in an empty folder, so that nothing is read from the checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = """
import torch, rpe3d
from transformers import LlamaConfig, LlamaForCausalLM, AutoModelForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).eval()
ids = torch.randint(64, (1, 100))
"""
EXTEND = f"""{TINY}
stock = model(ids).logits
rpe3d.extend(model, context=256)
expected = model(ids).logits
assert not torch.equal(expected, stock)
model.save_pretrained("saved")
assert torch.equal(AutoModelForCausalLM.from_pretrained("saved")(ids).logits, expected)
assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (1, 104)
assert torch.equal(rpe3d.restore(model)(ids).logits, stock)
"""
ADAPT = f"""{TINY}
from peft import LoraConfig, get_peft_model
rpe3d.extend(model, context=256)
tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
expected = tuned(ids).logits
rpe3d.models.save_adapter(tuned, "adapter")
base = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).eval()
base.load_state_dict(tuned.unload().state_dict())
assert torch.allclose(rpe3d.models.load_adapter(rpe3d.extend(base, context=256), "adapter")(ids).logits, expected)
"""
SCORE = """
import json, subprocess, sys
line = {"pred": "in 1999", "answers": ["1999"], "all_classes": None, "length": 9}
open("p.jsonl", "w").write(json.dumps(line) + "\\n")
args = [sys.executable, "-m", "rpe3d", "score", "--suite", "longbench", "--task", "hotpotqa", "p.jsonl"]
said = json.loads(subprocess.run(args, check=True, capture_output=True).stdout)
assert said["n"] == 1 and 0 < said["score"] < 100, said
"""
COMPARE = f"""{TINY.replace("vocab_size=64", "vocab_size=256").replace("embeddings=64", "embeddings=256")}
import pathlib, subprocess, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = {{letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}}
made = Tokenizer(models.BPE(vocab=letters, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
model.save_pretrained("tiny")
PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained("tiny")
options = "--laws rope,3d-rpe --lengths 512 --windows 1 --measures ppl --report report".split()
subprocess.run([sys.executable, "-m", "rpe3d", "compare", "tiny", *options], check=True)
assert "3d-rpe" in pathlib.Path("report/report.html").read_text(encoding="utf-8")
"""
WORK = {
    "": ["-c \"import rpe3d; assert '3d-rpe' in rpe3d.laws()\"", "-m rpe3d --version"],
    "cli": ["-m rpe3d figures --out figures --only positions", "-m rpe3d doctor"],
    "models": [EXTEND],
    "eval": [SCORE, COMPARE],
    "train": [ADAPT, "-m rpe3d train --help"],
}
"""What an installation with each extra must be able to do: arguments of python, or a program of several lines."""


def main() -> int:
    """Check the extras that are named, or all of them; return how many failed."""
    wanted = sys.argv[1:] or list(WORK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # else files that were deleted would be packaged
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", name, str(ROOT))
        (wheel,) = folder.glob("*.whl")
        failed = [extra for extra in wanted if not works(wheel, extra, folder / f"venv-{extra}")]
    print(f"{len(failed)} of {len(wanted)} installations failed" + (f": {', '.join(failed)}" if failed else ""))
    return len(failed)


def works(wheel: Path, extra: str, place: Path) -> bool:
    """Say whether the wheel with an extra installs and does its work."""
    began = time.monotonic()
    try:
        venv.create(place, with_pip=True)
        python, empty = place / "bin" / "python", place / "empty"
        empty.mkdir()
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]" if extra else str(wheel))
        run(python, "-m", "pip", "check")
        for number, work in enumerate(WORK[extra]):
            if "\n" in work:
                (empty / f"{number}.py").write_text(work, encoding="utf-8")
                run(python, f"{number}.py", cwd=empty)
            else:
                run("sh", "-c", f"{python} {work}", cwd=empty)
    except subprocess.CalledProcessError as error:
        print(f"{wheel.name}[{extra}] failed: {error}\n{error.output}")
        return False
    print(f"{wheel.name}[{extra}] works ({time.monotonic() - began:.0f} s)", flush=True)
    return True


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command; its words are shown where it fails."""
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, **told)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
