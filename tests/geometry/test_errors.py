"""A wrong parameter is one sentence with the value, the rule and what to do; a right one never turns into NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpe3d import ConfigError, laws, make_law
from rpe3d.config import make_scaling
from rpe3d.geometry import Region

MODEL = {"pretrained": 8192, "context": 65536, "head_dim": 64, "rope_theta": 1e5}

WRONG = [
    ("3d-rpe", {"chunk": 0}, "chunk is 0, outside"),
    ("3d-rpe", {"chunk": -512}, "chunk is -512, outside"),
    ("3d-rpe", {"chunk": 512.5}, "chunk is 512.5, which is not a whole number"),
    ("3d-rpe", {"chunk": 5000}, "above half of the pretrained length 8192"),
    (
        "3d-rpe",
        {"chunk": 512, "window": 2500},
        "window is 2500, not a multiple of chunk 512: choose window 2048",
    ),
    (
        "3d-rpe",
        {"chunk": 512, "window": 2560, "reach": 2048},
        "reach is 2048, below window \\+ chunk = 3072: raise",
    ),
    ("3d-rpe", {"reach": 8193}, "reach is 8193, above the pretrained length 8192: lower reach"),
    ("3d-rpe", {"window": 8192}, "reach is 8704, above the pretrained length 8192: lower reach"),
    ("3d-rpe", {"context": 4096}, "context is 4096, below the pretrained length 8192: raise context"),
    ("3d-rpe", {"context": 2**40}, "context is 1099511627776, outside"),
    ("3d-rpe", {"head_dim": 63}, "head_dim is 63, which is odd: RoPE rotates pairs"),
    ("3d-rpe", {"rotary_dim": 128}, "rotary_dim is 128, above head_dim 64"),
    ("3d-rpe", {"rotary_dim": 7}, "rotary_dim is 7, which is odd"),
    ("3d-rpe", {"rope_theta": 1.0}, "rope_theta is 1.0, which is not a finite number above 1"),
    ("3d-rpe", {"rope_theta": math.nan}, "rope_theta is nan"),
    ("3d-rpe", {"windows": 1}, "law '3d-rpe' has no parameter 'windows': did you mean 'window'?"),
    ("rope", {"chunk": 1}, "law 'rope' has no parameter 'chunk': it takes none"),
    ("3drpe", {}, "law '3drpe' is not known: did you mean '3d-rpe'?"),
    ("ntk", {"head_dim": 2}, "rotary_dim is 2, but NTK scaling needs at least 4"),
    (
        "yarn",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "would drop the model's own 'linear' scaling",
    ),
    (
        "yarn",
        {"beta_slow": 32.0, "beta_fast": 32.0},
        "beta_fast is 32.0, which is not a finite number above 32",
    ),
    ("yarn", {"beta_fast": 1e308}, "beta_fast is 1e\\+308, which is not a finite number above 1 and at most 1e\\+09"),
    ("yarn", {"beta_slow": 1e-320}, "beta_slow is 1e-320, which is not a finite number at least 1e-09"),
    ("yarn", {"attention_factor": 1e308}, "attention_factor is 1e\\+308, which is not a finite number above 0"),
    ("dca", {"window": 8193}, "dca shows position 8193 itself"),
    ("dca", {"chunk": 7000}, "chunk is 7000, above window 6144"),
    ("self-extend", {"group": 2}, "beyond the pretrained length 8192: raise group or lower window"),
    ("rerope", {"window": 0}, "window is 0, outside"),
    ("leaky-rerope", {"slope": 1.5}, "slope is 1.5, which is not a finite number at least 0 and at most 1"),
    ("streaming-llm", {"window": 8190}, "more than the pretrained length 8192: lower window or sinks"),
    ("string", {"context": 8192, "shift": 100}, "shift is 100"),
    ("string", {"context": 8192, "local": -1}, "local is -1, outside"),
    ("string", {"context": 8192, "attention_factor": 0.0}, "attention_factor is 0.0"),
    ("3d-rpe", {"full": 3}, "full is 3, but far is not given"),
    ("3d-rpe", {"far": 64, "full": "3-x"}, "full is '3-x', which does not name layers: pass numbers of layers"),
    ("3d-rpe", {"far": 64, "full": [1.5]}, "full is \\[1.5\\], which does not name layers"),
    ("3d-rpe", {"far": 64, "full": "3-4+3"}, "full names a layer twice: '3-4\\+3'"),
    ("dpe", {"scales": 8}, "scales is 8, which is not a list of whole numbers: write them as .* or 4-4-2-16"),
    ("dpe", {"scales": "4-x"}, "scales is '4-x', which is not a list of whole numbers"),
    ("dpe", {"scales": (4, 0)}, "scale is 0, outside"),
    ("dpe", {"scales": (4, 2.5)}, "scale is 2.5, which is not a whole number"),
    ("dpe", {"scales": []}, "there are 0 scales for 32 pairs of dimensions: pass between 1 and 32"),
    ("dpe", {"scales": [2] * 33}, "there are 33 scales for 32 pairs"),
    ("longrope", {"long_factor": 8}, "long_factor is 8, which is not a list of numbers: pass one number per pair"),
    ("longrope", {"long_factor": "1-2-x"}, "long_factor is '1-2-x', which is not a list of numbers"),
    ("longrope", {"short_factor": [1.0] * 31}, "short_factor has 31 numbers for 32 pairs of dimensions: pass 32"),
    ("longrope", {"long_factor": [0.0] * 32}, "long_factor is 0.0, which is not a finite number above 0"),
    ("cope", {"clipped": 33}, "clipped is 33, outside"),
    ("lampe", {"like": "llama-4"}, "like 'llama-4' is not known: did you mean 'llama-"),
    ("lampe", {"mapped": 8192}, "mapped is 8192, outside"),
    ("lampe", {"length": 1_000_000}, "length is 1000000, outside"),
    ("lampe", {"head": 0}, "head is 0, outside"),
    (
        "lampe",
        {"length": 1100, "tail": 600},
        "head 512 and 600 tokens of tail leave nothing between them in 1100 tokens",
    ),
    ("3d-rpe-definition", {"chunk": 9000}, "chunk is 9000, above 8192: lower chunk to at most 8192"),
    (
        "3d-rpe-definition",
        {"chunk": 6144, "interpolate": True},
        r"grows chunk 6144 to 32768, above 8192 .*: lower chunk to at most 1024",
    ),
    ("3d-rpe-definition", {"interpolate": "yes"}, "interpolate is 'yes', which is neither True nor False"),
    ("3d-rpe-definition", {"phi_base": 1.0}, "phi_base is 1.0"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), WRONG)
def test_a_wrong_parameter_says_the_value_the_rule_and_what_to_do(name, wrong, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_law(name, **MODEL | wrong)
    assert "\n" not in str(caught.value)
    assert caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "axial", "factor": 2.0}, "rope_type 'axial' is not known"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_type": "linear", "factor": 0.5}, "linear factor is 0.5"),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, "has no parameter 'beta'"),
        (
            {"rope_type": "longrope", "factor": 2.0, "long_factor": 5, "original_max_position_embeddings": 64},
            "long_factor is 5, which is not a list of numbers",
        ),
    ],
)
def test_a_wrong_model_scaling_is_named(scaling, message):
    with pytest.raises(ConfigError, match=message):
        make_scaling(scaling)


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        (torch.tensor([1.5]), 0, "query positions have dtype torch.float32"),
        (torch.tensor([True]), 0, "dtype torch.bool"),
        ("first", 0, "query is 'first', which is not a position"),
        (1.5, 0, "query positions have dtype torch.float32"),
        (torch.tensor([5]), torch.tensor([-1]), "key position -1 is negative"),
        (torch.zeros(3, dtype=torch.long), torch.zeros(4, dtype=torch.long), "do not broadcast"),
    ],
)
def test_wrong_positions_are_named(query, key, message):
    with pytest.raises(ConfigError, match=message):
        make_law("3d-rpe", **MODEL).relative_position(query, key)


numbers = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([0, 1, 2, 2**31, 2**31 + 1, 2**63, -(2**63)]),
)
anything = st.one_of(
    numbers,
    st.floats(allow_nan=True, allow_infinity=True),
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.lists(numbers, max_size=3),
)


@st.composite
def constructions(draw):
    """A law's name and arguments, most of them plausible, any of them wrong."""
    name = draw(st.sampled_from(sorted(laws())))
    arguments = {
        "pretrained": draw(st.one_of(numbers, anything)),
        "context": draw(st.one_of(numbers, anything)),
        "head_dim": draw(st.one_of(numbers, anything)),
        "rope_theta": draw(st.one_of(st.floats(), st.sampled_from([1e4, 5e5]))),
    }
    for key in draw(st.sets(st.sampled_from(["rotary_dim", *laws()[name].parameters]))):
        arguments[key] = draw(st.one_of(numbers, anything))
    return name, arguments


@settings(max_examples=600, deadline=None)
@given(constructions())
def test_no_combination_gives_nan_or_a_stack_trace(case):
    """Fuzz: an accepted law has a finite table and finite angles at its ends; a refused one says why."""
    name, arguments = case
    try:
        law = make_law(name, **arguments)
    except ConfigError:
        return
    assert law.frequencies().isfinite().all()
    assert (law.frequencies() >= 0).all()  # CoPE stops the slowest pair
    assert math.isfinite(law.attention_scaling)
    ends = torch.tensor([0, law.context // 2, law.context - 1])
    query, key = torch.broadcast_tensors(ends[:, None], ends[None, :])
    seen = torch.zeros_like(query, dtype=torch.bool)
    for region in law.regions:
        assert isinstance(region, Region)
        seen |= region.contains(query, key)
    angles = law.relative_angles(query, key)
    assert angles[seen].isfinite().all()
    assert make_law(**law.to_dict()) == law


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(laws())),
    st.integers(2, 5000),
    st.integers(0, 200_000),
    st.sampled_from([4, 64, 128]),
)
def test_the_defaults_of_every_law_are_valid_for_any_model(name, pretrained, extra, head_dim):
    """A user who gives no parameters is never told that a parameter is wrong. (STRING alone has an end.)"""
    extra = min(extra, pretrained - min(128, pretrained // 16)) if name == "string" else extra
    law = make_law(name, pretrained=pretrained, context=pretrained + extra, head_dim=head_dim)
    assert law.relative_angles(law.context - 1, 0).shape == (head_dim // 2,)
