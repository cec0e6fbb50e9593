"""Extended models on vLLM: a plugin that vLLM finds by itself where this package is installed.

Keys lie in vLLM's cache as stock RoPE turns them, so they depend on their position alone: prefix caching, chunked
prefill, preemption and tensor parallelism need nothing from us. Texts that a law leaves to plain RoPE run in vLLM's own
attention; longer ones run in `rpe3d.attention`, as they do under Hugging Face.

    plugin      what vLLM calls in each of its processes
    configs     configs that name a long context of their own
    rope        the rotary layer of a model that carries a law
    backend     attention under a law, between any vLLM backend and its cache; cpu and cuda say how theirs is read
    adapters    LoRA adapters that were trained under a law
    checks      what is refused, and why; versions: of vLLM, and how they differ
    refusals    what a process of vLLM refuses, told to `rpe3d serve`
    metrics     the law among the metrics of a server
    launch      vLLM's server for `rpe3d serve`; entry: what it tells of a stock model's law
"""
