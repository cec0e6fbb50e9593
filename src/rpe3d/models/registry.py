"""The parts that transformers calls: the rope type that carries a law, its mask, and the attention that applies it.

`register` is called whenever a model under a law is made, any number of times, and changes nothing for models whose
config does not name us.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_buffer_registration_hook

from rpe3d.attention import Memory, attention
from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.models import noted
from rpe3d.models.carried import carried, law_in, module_carried, parameters_of, stock_of
from rpe3d.models.guard import tell_of_length, watch
from rpe3d.models.positions import Layout, capturing, layer_mask, layout
from rpe3d.models.probe import unknown

NAME = "rpe3d"  # transformers parses names: none of "flash", "sdpa", "flex", "/" may be in it
memories: WeakKeyDictionary[torch.nn.Module, Memory] = WeakKeyDictionary()
"""Per layer, what is known of the cache it last read. Caches are not identified by address: this knowledge is checked
against the cache's keys before it is used, so it never goes stale, whatever happens to a cache."""
DYNAMIC = "rpe3d-dynamic"  # transformers looks for "dynamic" in a rope type to know that it grows


_looking_out: list[Any] = []
"""The one hook that sees modules being created, installed once there is a model under a law."""


def register() -> None:
    """Register our attention and mask with transformers, and watch for modules that are created under a law."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not _looking_out:
        _looking_out.append(register_module_buffer_registration_hook(_made))
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    watch()


def rope_init(
    config: Any, device: Any = None, seq_len: Any = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Return the law's frequencies to transformers (rope init), and select our attention if the law needs it."""
    register()
    law = law_in(config, layer_type)
    held = carried(config, layer_type)
    assert held is not None
    if law.needs_attention:
        config._attn_implementation = NAME
    if law.keeps_frequencies:
        return _stock_table(config, law, device, layer_type), law.attention_scaling
    length = law.pretrained if seq_len is None else int(seq_len)  # dynamic NTK is stock until the text has grown
    theta = law.frequencies(length).to(device=device, dtype=torch.float32)
    return torch.nn.functional.pad(theta, (0, held.get("unturned_pairs", 0))), law.attention_scaling


def _made(module: Any, name: str, _: Any) -> None:
    """Prepare a module that gets the frequencies of a law: it may note positions, or be made from another config.

    A saved model is built by transformers, which calls nothing of ours but `rope_init`, and that receives no module.
    """
    if not name.endswith("inv_freq"):
        return
    held = carried(getattr(module, "config", None))
    if held is not None and held.law.needs_attention:
        module.config._attn_implementation = NAME
        if held.notes:
            noted.watch([module])


def _stock_table(config: Any, law: Law, device: Any, layer_type: str | None) -> Tensor:
    """Return the model's frequencies, rounded as by transformers, so that short prompts stay bit-identical."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = parameters_of(config, layer_type)
    assert parameters is not None
    stock = copy.copy(config)
    stock.rope_parameters = stock_of(parameters)
    own = parameters_of(stock, layer_type) or {}
    if (rope_type := own.get("rope_type", "default")) != "default":
        long = {"seq_len": own["original_max_position_embeddings"] + 1} if rope_type == "longrope" else {}
        table: Tensor = ROPE_INIT_FUNCTIONS[rope_type](stock, device, layer_type=layer_type, **long)[0]
        return table.to(device)
    dim = 2 * law.rotary.pairs
    return (1.0 / (law.rotary.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float, device="cpu") / dim))).to(
        device
    )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return `layer_mask`, None if every slot holds a token, or the window's mask of a sliding layer."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if local_size is not None:
        window: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            **{**kwargs, "allow_is_causal_skip": False},
        )
        return window
    if mask_function is not causal_mask_function:
        raise ConfigError(
            "this batch is packed, or has a custom mask", "pass one sequence per row: a law is causal from 0 on"
        )
    if kv_offset:
        raise ConfigError("this cache has dropped its first keys", "use a DynamicCache: a law needs all keys")
    if isinstance(q_offset, int) and q_offset + q_length == kv_length and _all_tokens(attention_mask, kv_length):
        return None
    device = kwargs.get("device") if attention_mask is None else attention_mask.device
    return layer_mask(attention_mask, batch_size, q_length, kv_length, q_offset, device)


def _all_tokens(mask: Tensor | None, slots: int) -> bool:
    """Return whether a padding mask leaves nothing out, as in `generate`; False in a graph, where it cannot be read.

    One number is read from the device, as in transformers' own mask; the positions then tell the rest.
    """
    if mask is None:
        return True
    if mask.shape[1] != slots or torch.compiler.is_compiling() or capturing(mask):
        return False
    return bool(mask.all())


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention under the module's law, as transformers calls it; q, k and the cache hold stock RoPE."""
    if sliding_window is not None:
        return _stock(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs)
    if strange := unknown(kwargs):
        raise ConfigError(f"this attention also takes {strange}", "rpe3d cannot extend this model")
    if dropout:
        raise ConfigError(f"attention dropout is {dropout}", "set config.attention_dropout = 0")
    if torch.is_autocast_enabled(
        kind := query.device.type
    ):  # as SDPA under autocast: norms and tables of cos and sin make q and k float32
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return attend(
                module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, None, position_ids
            )
    held = module_carried(module)
    if held.notes:
        position_ids = noted.positions(module.config, position_ids).to(query.device)
    layer = getattr(module, "layer_idx", 0)
    law = held.law_at(layer)
    where: Layout = layout(query, key, attention_mask, position_ids, layer, module.config)
    if where.end is not None and where.end > law.context:
        tell_of_length(law, where.end)
    query, key, value = where.gathered(query, key, value)
    if held.pieces:
        query, key = held.arranged(query), held.arranged(key)
    if law.chooses:
        query, key = where.turned_back(query, law), where.turned_back(key, law)
    if where.shared is None:
        out, _ = attention(query, key, value, law, scale=scaling, softcap=softcap, sinks=s_aux, **where.arguments)
    else:
        memory = memories.setdefault(module, Memory()) if law.chooses else None
        out = where.shared.output(query, key, value, law, scale=scaling, softcap=softcap, sinks=s_aux, memory=memory)
    return where.returned(out, law.chooses).transpose(1, 2).contiguous(), None


def _stock(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run a layer that keeps its own sliding window, with the model's own attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is None and s_aux is None:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out, None
    import sys

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    extra = {} if softcap is None else {"softcap": softcap}
    out, _ = eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **extra, **kwargs)
    return out, None
