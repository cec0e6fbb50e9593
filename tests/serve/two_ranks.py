"""`python two_ranks.py FOLDER`: a checkpoint served by two processes with half of the heads each, as transformers."""

from __future__ import annotations

import os
import sys

from engines import answers, assert_as_transformers, engine, prompts
from transformers import AutoModelForCausalLM

if __name__ == "__main__":  # vLLM's ranks import this file, too
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    texts = prompts(1, 20, 25, 64, 150, 301)
    outputs = answers(engine(sys.argv[1], tensor_parallel_size=2), texts)
    assert_as_transformers(AutoModelForCausalLM.from_pretrained(sys.argv[1]), texts, outputs)
