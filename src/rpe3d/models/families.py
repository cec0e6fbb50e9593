"""Which of transformers' causal-LM families `extend` serves: every one built tiny, extended and compared with itself.

    python -m rpe3d.models.families --out docs/families.md

A family counts as supported when six things hold that a user would notice if they did not: see `_check`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpe3d.config import ConfigError
from rpe3d.models.extend import extend, law_of, restore

CONTEXT = 256
LAW = {"chunk": 8, "window": 16, "reach": 32}
SHORT = LAW["window"] + LAW["chunk"]  # DESIGN 2.1 fact 1: up to w + c tokens 3D-RPE is RoPE
LONG = 100
PROMPT = 70
CLOSE = 1e-3  # of the largest logit; float32 and another order of summation stay two orders below it
SECONDS = 20
LARGEST = 100_000_000
VERDICTS = ("WRONG", "supported", "partly", "refused", "not tried")

_HEADS, _EXPERTS = 4, 4
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_SIZES: dict[int, str] = {
    97: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim input_embedding_size output_embedding_size "
    "lru_width max_position_embeddings backbone_hidden_size attention_hidden_size",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dense_intermediate_size "
    "intermediate_size_mlp n_inner dff dim_ff",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size q_lora_rank o_lora_rank router_hidden_size",
    16: "head_dim kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim swa_head_dim sliding_window "
    "sliding_window_size attention_chunk_size attention_window_size linear_key_head_dim linear_value_head_dim "
    "linear_head_dim kv_channels global_head_dim index_head_dim index_topk window_size swa_v_head_dim "
    "hidden_size_per_layer_input attention_head_dim mamba_d_state mamba_d_head "
    "mamba_chunk_size",
    8: "index_block_size mamba_n_heads",
    _HEADS: "num_attention_heads decoder_attention_heads encoder_attention_heads n_head n_heads num_heads "
    "swa_num_attention_heads linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token "
    "index_topk_blocks moe_k moe_topk top_k_experts num_global_key_value_heads moe_num_active_experts",
    1: "n_group topk_group n_groups o_groups num_expert_group",
}
_SIZE = {name: size for size, names in _SIZES.items() for name in names.split()}
# None in some defaults, which do not build then
_UNSET = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
_MIXED = {"layer_types": ["conv", "full_attention"] * 2}
_SPARSE = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2}
_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2}
_OWN: dict[str, dict[str, Any]] = {  # defaults that say less than any real model's config does
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}, "max_seq_len": 64},
    "dots1": {"n_shared_experts": 1},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 16},
    "falcon_h1": {"mamba_d_ssm": 128},
    "laguna": _WINDOWS,
    "lfm2": _MIXED,
    "lfm2_moe": _MIXED,
    "mellum": _WINDOWS,
    "minimax_m3_vl_text": _SPARSE,
    "mimo_v2_flash": {"head_dim": 24, "swa_head_dim": 24},  # a third of it is turned, in pairs
}
_TRIES: tuple[dict[str, Any], ...] = (  # what is left as the family has it, or set, until one builds and runs
    {},
    {"num_key_value_heads": _HEADS},
    {"index_topk": None},
    {"head_dim": None},
    {"head_dim": None, "hidden_size": 128},
    {"head_dim": None, "hidden_size": None, "num_attention_heads": None, "num_key_value_heads": None},
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found out about one family."""

    family: str
    verdict: str
    """One of `VERDICTS`."""
    reason: str = ""


def survey(names: Iterable[str] | None = None) -> list[Row]:
    """A row per family, all of the installed transformers' causal LMs unless named; progress goes to stderr."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    names = list(known if names is None else names)
    rows = []
    for n, name in enumerate(names, 1):
        start = time.perf_counter()
        row = _row(name)
        rows.append(row)
        took = time.perf_counter() - start
        print(f"{n}/{len(names)} {name} ({took:.1f} s): {row.verdict}: {row.reason}", file=sys.stderr, flush=True)
    return rows


def _row(name: str) -> Row:
    ids = torch.randint(3, 97, (1, LONG), generator=torch.Generator().manual_seed(1))
    try:
        with _within(SECONDS), _quiet(), torch.no_grad():
            return _check(name, _build(name, ids), ids)
    except _Late:
        return Row(family=name, verdict="not tried", reason=f"took longer than {SECONDS} s")
    except ConfigError as refusal:
        before, _, after = refusal.problem.partition(" cannot be extended: ")
        return Row(family=name, verdict="refused", reason=after or before)
    except Exception as error:  # a family that breaks must not end the survey
        return Row(family=name, verdict="not tried", reason=_line(error))


def _check(name: str, model: Any, ids: Tensor) -> Row:
    """The six: accepted; short inputs and a restored model as stock; long ones not; decoding; each layer by the law."""
    stock = _logits(model, ids)
    calls = _calls(model, ids)
    close = CLOSE * float(stock.abs().max())
    step, wrong = "extend", ""
    try:
        extend(model, "3d-rpe", context=CONTEXT, **LAW)
        step = "a forward"
        extended = _logits(model, ids)
        if not _near(_logits(model, ids[:, :SHORT]), stock[:, :SHORT], close):
            wrong = f"an input of {SHORT} tokens is changed"
        elif _near(extended, stock, close):
            wrong = f"an input of {LONG} tokens is not changed"
        step = "decoding"
        if not wrong and not _near(_decoded(model, ids), extended, close):
            wrong = "prefill and decode differ from one forward"
        step = "a layer of its own"
        law = law_of(model)
        outputs = [] if wrong else [call.again(**call.masked()) for call in calls]
        step = "restore"
        restore(model)
        if not wrong and not torch.equal(_logits(model, ids), stock):
            wrong = "restore does not give the stock logits"
        step = "a stock layer"
        changed = unturned = 0
        for call, got in zip(calls, outputs, strict=False):
            close = CLOSE * float(call.output.abs().max())
            if law is None or _near(got, call.output, close):
                unturned += call.unturned()
                continue
            changed += 1
            expected = call.at(law.relative_position(LONG - 1, torch.arange(LONG)))
            if not _near(got[:, -1], expected[:, -1], close):
                wrong = "a layer's scores are not the law's"
                if call.unturned():
                    wrong = "a layer without rotation is turned"
    except ConfigError as error:
        if step == "extend":
            raise
        wrong = wrong or f"accepted, but {step} raises {_line(error)}"
    except Exception as error:
        wrong = wrong or f"{step} raises {_line(error)}"
    if wrong:
        return Row(family=name, verdict="WRONG", reason=wrong)
    return _accepted(name, model, changed, unturned, bool(calls))


def _accepted(name: str, model: Any, changed: int, unturned: int, seen: bool) -> Row:
    config = model.config.get_text_config(decoder=True)
    layers = int(config.num_hidden_layers)
    if not seen:
        return Row(family=name, verdict="supported", reason="its layers could not be looked at one by one")
    if changed >= layers:
        return Row(family=name, verdict="supported", reason=f"{changed} of {layers} layers")
    kinds = {kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"}
    named = {"sliding_attention": "keep their sliding window", "conv": "are convolutions"}
    what = [named.get(kind, f"are {kind.replace('_', ' ')}") for kind in kinds]
    what += ["have no rotation"] if unturned else []
    others = " or ".join(sorted(what)) or "do not attend to the text alone"
    reason = f"{changed} of {layers} layers, the others {others}"
    return Row(family=name, verdict="partly", reason=reason)


# Tiny models


def _build(name: str, ids: Tensor) -> Any:
    """A tiny model that runs. If none does: the ConfigError that `extend` refuses one with, or the first error."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    first: Exception | None = None
    for attempt in _TRIES:
        built = None
        try:
            config = CONFIG_MAPPING[name](**_small(CONFIG_MAPPING[name], attempt))
            for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
                part.pad_token_id, part.bos_token_id, part.eos_token_id = 0, 1, None
                part.is_decoder = True
                part.initializer_range = 0.3  # so that positions matter
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(copy.deepcopy(config))
            if not getattr(config.get_text_config(decoder=True), "rope_parameters", None):
                extend(empty, "3d-rpe", context=CONTEXT, **LAW)  # refused before a weight is looked at
            size = sum(p.numel() for p in empty.parameters())
            if size > LARGEST:
                raise ValueError(f"the smallest that the recipe builds has {size / 1e6:.0f} M parameters")
            torch.manual_seed(0)
            built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            stock = _logits(built, ids)
            if not stock.isfinite().all():
                raise ValueError("its logits are not finite")
            if not _near(_decoded(built, ids), stock, CLOSE * float(stock.abs().max())):
                raise ValueError("its stock decode differs from its stock forward")
            return built
        except ConfigError:
            raise
        except Exception as error:  # whatever a config or a model of any family raises
            first = _refusal(built) or first or error
    raise first or ValueError("no try was made")


def _refusal(model: Any) -> ConfigError | None:
    """What `extend` refuses a model with that does not run, if it does."""
    try:
        extend(model, "3d-rpe", context=CONTEXT, **LAW)
    except ConfigError as refusal:
        return None if model is None else refusal
    except Exception:
        return None
    return None


def _small(kind: Any, attempt: dict[str, Any]) -> dict[str, Any]:
    """Arguments that shrink a config class: every size it has, and its lists of layers cut to one of every kind."""
    try:
        own = kind()
    except Exception:  # a few have no defaults
        return {}
    has = own.to_dict()
    size = {**_SIZE, **attempt}
    if "kv_lora_rank" in has:  # latent attention has a key for every query head
        size["num_key_value_heads"] = _HEADS
    given = {k: v for k, v in size.items() if isinstance(has.get(k), int) and v is not None and has[k] > v}
    given |= {k: size[k] for k in _UNSET if k in has and has[k] is None and size[k] is not None}
    layers = next((has[k] for k in _LAYERS if isinstance(has.get(k), int)), 0)
    kinds = [k for k, v in has.items() if isinstance(v, list) and len(v) == layers > 4]
    first = [has[k].index(x) + 1 for k in kinds if len({str(x) for x in has[k]}) < 5 for x in has[k]]
    least = max([4, *first])
    keep = min(layers, least)
    given |= {k: keep for k in _LAYERS if isinstance(has.get(k), int)}
    given |= {k: has[k][:keep] for k in kinds}
    for part in getattr(kind, "sub_configs", None) or {}:
        inner: Any = getattr(own, part, None)
        if hasattr(inner, "sub_configs"):
            given[part] = {**_small(type(inner), attempt), "model_type": inner.model_type}
    return given | _OWN.get(own.model_type, {})


# Runs


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


def _decoded(model: Any, ids: Tensor) -> Tensor:
    """A prompt, then one token after the other, through the cache."""
    out = model(ids[:, :PROMPT], use_cache=True)
    parts = [out.logits]
    for t in range(PROMPT, ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def _near(a: Tensor, b: Tensor, atol: float) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=atol)


@dataclass
class _Call:
    """One attention layer's part in a stock forward, to be called again on its own."""

    layer: int
    module: nn.Module
    given: dict[str, Any]
    output: Tensor
    rotary: nn.Module
    rotary_given: dict[str, Any]

    def again(self, **changes: Any) -> Tensor:
        bound = inspect.signature(self.module.forward).bind_partial()
        bound.arguments.update({k: v for k, v in self.given.items() if k in bound.signature.parameters})
        extra = {k: v for k, v in self.given.items() if k not in bound.signature.parameters}
        out = self.module(**{**bound.arguments, **extra, **changes})
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def masked(self) -> dict[str, Any]:
        """What a law's attention is given where nothing is padded: no mask, except for a layer's own window."""
        windowed = getattr(self.module, "sliding_window", None) is not None
        return {} if windowed or "attention_mask" not in self.given else {"attention_mask": None}

    def at(self, distances: Tensor) -> Tensor:
        """The stock layer, its keys placed at these distances before its last query: the oracle for that query."""
        positions = (distances.max() - distances)[None]
        given = {k: positions if _positions(v) else v for k, v in self.rotary_given.items()}
        return self.again(position_embeddings=self.rotary(**given))

    def unturned(self) -> bool:
        return _near(self.at(torch.zeros(LONG)), self.output, CLOSE * float(self.output.abs().max()))


def _positions(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.shape[-1] == LONG


def _calls(model: nn.Module, ids: Tensor) -> list[_Call]:
    """Every attention layer's arguments and output in one stock forward, with the rotary call that served it."""
    turns: list[tuple[nn.Module, dict[str, Any], Any]] = []
    calls: list[_Call] = []

    def bound(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        found = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        return {**found, **found.pop("kwargs", {})}

    def turned(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        turns.append((module, bound(module, args, kwargs), output))

    def attended(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = bound(module, args, kwargs)
        table = given.get("position_embeddings")
        for rotary, rotary_given, made in turns:
            if isinstance(table, tuple) and isinstance(made, tuple) and made[0] is table[0]:
                first = output[0] if isinstance(output, tuple) else output
                calls.append(_Call(module.layer_idx, module, given, first, rotary, rotary_given))

    hooks = []
    for module in model.modules():
        if hasattr(module, "inv_freq") or hasattr(module, "full_attention_inv_freq"):
            hooks.append(module.register_forward_hook(turned, with_kwargs=True))
        elif hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            hooks.append(module.register_forward_hook(attended, with_kwargs=True))
    try:
        _logits(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


# Around a run


class _Late(BaseException):
    """Time is up; no Exception, so that nothing on the way takes it for a family's own."""


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    """`_Late` after so many seconds, where signals can be had."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(*_: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, as families warn of their own defaults; one thread, as more only wait in models this small."""
    from transformers.utils import logging

    level, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        torch.set_num_threads(threads)


def _line(error: Exception, width: int = 110) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {lines[-1] if 'validation' in lines[0].lower() else lines[0]}"
    return text if len(text) <= width else text[: width - 3] + "..."


# The page


def page(rows: list[Row]) -> str:
    """The survey as Markdown."""
    import transformers

    counts = Counter(row.verdict for row in rows)
    total = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
    lines = [
        "# Which model families can be extended",
        "",
        f"{len(rows)} causal-LM families of transformers {transformers.__version__}: {total}.",
        "",
        "Made by `python -m rpe3d.models.families --out docs/families.md` on CPU: a tiny random model of every family,",
        f"under `3d-rpe` (context {CONTEXT}, chunk {LAW['chunk']}, window {LAW['window']}, reach {LAW['reach']}).",
        "A family is judged by its config's defaults: mistral's has a window, which v0.1 had and later ones do not.",
        "",
        f"- *Supported*: `extend` accepts it; {SHORT} tokens give the stock logits and {LONG} do not; prefill and",
        "  decode equal one forward; the last query of every changed layer equals the stock layer with its keys at the",
        "  law's distances; and `restore` gives the stock logits bit for bit.",
        "- *Partly*: so for the layers that reach the whole text, while the others are left as they are.",
        "- *Refused*: `extend` says why, in these words, and changes nothing.",
        "- *Not tried*: the survey's one recipe built no tiny model that runs, which says nothing about real ones.",
        "- *WRONG*: accepted by `extend`, yet one of the checks fails. Do not use it; it is a bug of ours.",
        "",
        "| Family | Verdict | What was found |",
        "|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: (VERDICTS.index(r.verdict), r.family)):
        reason = row.reason.replace("|", "\\|")
        lines.append(f"| {row.family} | {row.verdict} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Survey, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m rpe3d.models.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="only these; all unless given")
    parser.add_argument("--out", type=Path, help="a Markdown file; stdout unless given")
    given = parser.parse_args()
    text = page(survey(given.families or None))
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
