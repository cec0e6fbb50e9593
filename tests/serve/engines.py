"""Tiny extended models, engines that serve them, and what transformers answers."""

from __future__ import annotations

import copy

import torch

import rpe3d

PRETRAINED, CONTEXT = 64, 512
SIZE = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": PRETRAINED,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def model(family="llama", law=None, config=None, **parameters):
    """A tiny random model of a family, float32, with more in its config and under a law if they are given."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = SIZE | ({"sliding_window": None} if family == "mistral" else {}) | copy.deepcopy(config or {})
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given)).eval()
    return made if law is None else rpe3d.extend(made, law, context=CONTEXT, **parameters)


def train(base):
    """A LoRA adapter on a model, after a few steps on one text: enough to change what the model says."""
    import peft

    torch.manual_seed(0)
    made = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=32, target_modules=TARGETS))
    (text,) = prompts(100, seed=11)
    optimizer = torch.optim.Adam((p for p in made.parameters() if p.requires_grad), lr=0.02)
    for _ in range(5):
        ids = torch.tensor([text])
        made(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return made.eval()


def engine(folder, **options):
    """vLLM in this process, in small steps: 64 tokens of prompts at a time, pages of 32."""
    from vllm import LLM

    usual = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "block_size": 32, "seed": 0,
             "max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**25,
             "disable_log_stats": False}  # fmt: skip
    return LLM(str(folder), **usual | options)


def prompts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def answers(llm, texts, new=8, **options):
    """Greedy, with log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, logprobs=3, detokenize=False, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False, **options)


def assert_as_transformers(stock, texts, outputs, atol=1e-4):
    """Every token is transformers' greedy choice, and each log-probability its own."""
    for text, output in zip(texts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens
        with torch.no_grad():
            logs = stock(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1].log_softmax(-1)
        assert tokens == logs.argmax(-1).tolist(), f"a prompt of {len(text)} tokens"
        for row, given in zip(logs, output.outputs[0].logprobs, strict=True):
            for token, entry in given.items():
                assert abs(float(row[token]) - entry.logprob) <= atol, f"a prompt of {len(text)} tokens"
