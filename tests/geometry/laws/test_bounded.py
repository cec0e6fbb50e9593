"""The six facts of docs/paper.md about bounded 3D-RPE, as properties over random parameters and positions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rpe3d import make_law
from rpe3d.config import ConfigError
from rpe3d.geometry import Fade, decay_bound, resolution, saved_law
from rpe3d.geometry.laws.bounded import FADE, FOCUS, bounded_regions

SLACK = 1e-9  # float64 rounding of positions up to a few million; no fact turns on less


@st.composite
def parameters(draw):
    """Those of any valid bounded law: c, A, R and context free within the rules."""
    chunk = draw(st.integers(1, 700))
    window = draw(st.integers(1, 12)) * chunk
    reach = window + chunk + draw(st.integers(0, 9000))
    pretrained = reach + draw(st.integers(0, 5000))
    context = draw(st.integers(pretrained, max(pretrained, 1 << 20)))
    return {"pretrained": pretrained, "context": context, "chunk": chunk, "window": window, "reach": reach}


@st.composite
def parameters_and_pairs(draw):
    """A law's parameters and causal pairs inside its context, chunk borders and the last token among them."""
    p = draw(parameters())
    border = st.integers(0, (p["context"] - 1) // p["chunk"]).map(lambda j: j * p["chunk"])
    place = st.one_of(
        st.integers(0, p["context"] - 1),
        border,
        border.map(lambda x: max(x - 1, 0)),
        st.sampled_from([0, p["context"] - 1]),
    )
    return p, draw(st.lists(st.tuples(place, place), min_size=1, max_size=30))


def bounded(parameters):
    return make_law("3d-rpe", head_dim=16, **parameters)


def built(case):
    """The law, and the pairs as two tensors."""
    parameters, ends = case
    query, key = torch.tensor([max(pair) for pair in ends]), torch.tensor([min(pair) for pair in ends])
    return bounded(parameters), query, key


@given(parameters_and_pairs())
def test_f_is_the_formula_of_the_design(case):
    law, query, key = built(case)
    c, r, near = law.chunk, law.slope, law.near_chunks
    a = (query // c - key // c).double()
    within = (query % c - key % c).double()
    expected = within + c * (r * a + (1 - r) * a.clamp(max=near))
    torch.testing.assert_close(law.relative_position(query, key), expected, rtol=1e-13, atol=SLACK)


@given(parameters_and_pairs())
def test_pairs_within_the_window_are_exactly_rope(case):
    """Fact 1: f = p_q - p_k exactly when a <= A."""
    law, query, key = built(case)
    near = query // law.chunk - key // law.chunk <= law.near_chunks
    assert torch.equal(law.relative_position(query, key)[near], (query - key).double()[near])


@given(parameters())
def test_short_inputs_cannot_tell_it_from_rope(parameters):
    """Fact 1: no pair of an input of at most w + c tokens is changed, bit for bit."""
    law = bounded(parameters)
    last = min(law.window + law.chunk, law.context) - 1
    key = torch.arange(last + 1)
    assert torch.equal(law.relative_position(last, key), (last - key).double())


@given(parameters_and_pairs())
def test_no_causal_pair_of_two_chunks_sees_a_position_below_one_or_unseen(case):
    """Fact 2: 1 <= f < R."""
    law, query, key = built(case)
    assert 0 <= law.slope <= 1
    f = law.relative_position(query, key)
    apart = query // law.chunk > key // law.chunk
    assert (f[apart] >= 1 - SLACK).all()
    assert (f < law.reach).all()
    assert (f >= 0).all()


@given(parameters_and_pairs(), st.integers(0, 1000))
def test_f_depends_on_differences_only(case, chunks):
    """Fact 3: moving both ends by whole chunks changes nothing."""
    law, query, key = built(case)
    moved = chunks * law.chunk
    f, g = law.relative_position(query, key), law.relative_position(query + moved, key + moved)
    torch.testing.assert_close(f, g, rtol=1e-12, atol=SLACK)


@given(parameters(), st.lists(st.integers(0, 2**20), min_size=1, max_size=30))
def test_far_keys_and_queries_are_turned_back_by_their_own_chunk_alone(parameters, positions):
    """Fact 3: against stock RoPE a far key is turned by -c (1 - r) j θ, a far query by -c (1 - r) (i - A) θ.

    Neither depends on the other or on the length of the prompt, so cached keys stay right.
    """
    law = bounded(parameters)
    p, theta = torch.tensor(positions), law.frequencies()
    back = -law.chunk * (1 - law.slope) * (p // law.chunk).double()
    ahead = law.chunk * (1 - law.slope) * (law.window // law.chunk)
    for region in law.regions[1:]:
        key, query = (turn.angle(p, theta, stock=True) for turn in (region.key, region.query))
        torch.testing.assert_close(key, back[:, None] * theta, rtol=0, atol=1e-8)
        torch.testing.assert_close(query, (back + ahead)[:, None] * theta, rtol=0, atol=1e-8)


@given(st.integers(1, 600), st.integers(1, 9), st.integers(0, 10**6), st.integers(0, 10**6))
def test_slope_one_is_rope(chunk, near, a, b):
    """Fact 4, first limit. No reach gives r = 1 exactly, so the regions are asked directly."""
    query, key = torch.tensor(max(a, b)), torch.tensor(min(a, b))
    for region in bounded_regions(chunk, near, slope=1.0):
        if region.contains(query, key):
            assert region.query.position(query) - region.key.position(key) == query - key


@given(st.integers(1, 500), st.integers(0, 2000), st.integers(1, 50_000), st.integers(0, 10**5))
def test_chunks_of_one_token_are_leaky_rerope(window, more, extra, distance):
    """Fact 4, second limit: c = 1 is Leaky ReRoPE with window A (whose window counts distances below A)."""
    reach = window + 1 + more
    size = {"pretrained": reach, "context": reach + extra, "head_dim": 16}
    law = make_law("3d-rpe", chunk=1, window=window, reach=reach, **size)
    leaky = make_law("leaky-rerope", window=window, slope=law.slope, **size) if window < reach else law
    assume(distance < law.context)
    torch.testing.assert_close(
        law.relative_position(distance, 0), leaky.relative_position(distance, 0), rtol=1e-12, atol=SLACK
    )


@given(st.integers(1, 500), st.integers(1, 50_000), st.integers(0, 10**5))
def test_chunks_of_one_token_with_slope_zero_are_rerope(window, extra, distance):
    """Fact 4: R = w + c makes r = 0."""
    size = {"pretrained": window + 1, "context": window + 1 + extra, "head_dim": 16}
    law = make_law("3d-rpe", chunk=1, window=window, reach=window + 1, **size)
    rerope = make_law("rerope", window=window, **size)
    assume(distance < law.context)
    assert law.slope == 0
    assert law.relative_position(distance, 0) == rerope.relative_position(distance, 0)


@given(parameters_and_pairs())
def test_neighbours_keep_resolution_one_and_borders_drop_by_a_sawtooth(case):
    """Facts 5 and 6: one step of the key is one step of f, at any distance; at a far border f drops by c (1 - r)."""
    law, query, key = built(case)
    c, near = law.chunk, law.near_chunks
    key = key.clamp(max=law.context - 2)
    query = torch.maximum(query, key + 1)
    step = law.relative_position(query, key) - law.relative_position(query, key + 1)
    same_chunk = key // c == (key + 1) // c
    beyond = query // c - (key + 1) // c >= near
    far_border = ~same_chunk & beyond
    torch.testing.assert_close(step[~far_border], torch.ones_like(step[~far_border]), rtol=0, atol=SLACK)
    drop = torch.full_like(step[far_border], 1 - c * (1 - law.slope))
    torch.testing.assert_close(step[far_border], drop, rtol=1e-12, atol=SLACK)


def test_the_decay_bound_is_evaluated_below_the_reach_only():
    """Fact 5: R controls long-term decay: every pair's bound is RoPE's at the position it is shown."""
    law = make_law("3d-rpe", pretrained=4096, context=32768, head_dim=128, chunk=256, window=1024, reach=2560)
    rope = make_law("rope", pretrained=4096, context=32768, head_dim=128)
    key = torch.arange(0, 32768, 7)
    f = law.relative_position(32767, key)
    theta = rope.frequencies()
    sums = torch.exp(1j * f[:, None] * theta).cumsum(-1).abs().mean(-1)
    torch.testing.assert_close(decay_bound(law, 32767, key), sums, rtol=0, atol=1e-9)
    least = decay_bound(rope, torch.arange(2560), 0).min()
    assert decay_bound(law, 32767, key).min() > 0.9 * least
    assert f.max() < 2560


def test_resolution_is_one_in_every_plane_within_a_chunk():
    """Theorem 1, in the planes' own units."""
    law = make_law("3d-rpe", pretrained=4096, context=32768, head_dim=128, chunk=256, window=1024, reach=2560)
    key = torch.arange(0, 32000)
    key = key[key % 256 != 255]
    torch.testing.assert_close(
        resolution(law, 32767, key), torch.ones(len(key), 64, dtype=torch.float64), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("pretrained", "expected"), [(8192, (512, 2560, 4096)), (2048, (128, 640, 1024))])
def test_the_default_rule_is_the_documented_one(pretrained, expected):
    """c = L_p / 16, w = 5/16 L_p, R = L_p / 2 (docs/log.md)."""
    law = make_law("3d-rpe", pretrained=pretrained, context=8 * pretrained, head_dim=64)
    assert (law.chunk, law.window, law.reach) == expected


def test_far_keys_fade_from_the_reach_on():
    """A query at p > R takes them (log p / log R)^focus times sharper, at (R / p)^fade of their weight; none before."""
    law = make_law("3d-rpe", pretrained=8192, context=65536, head_dim=64)
    near, far = law.regions
    assert (near.fade, far.fade) == (None, Fade(rate=law.fade, focus=law.focus, span=4096.0))
    fade, p = Fade(rate=0.5, focus=2.0, span=4096.0), torch.tensor([0, 100, 4096, 65536])
    exact = {"rtol": 1e-15, "atol": 0.0}
    torch.testing.assert_close(fade.sharpness(p), torch.tensor([1, 1, 1, (4 / 3) ** 2], dtype=torch.float64), **exact)
    torch.testing.assert_close(torch.exp(-fade.loss(p)), torch.tensor([1, 1, 1, 0.25], dtype=torch.float64), **exact)


def test_focus_makes_a_crowd_weigh_as_much_as_the_reach_would():
    """p keys alike count as R of them with a focus of 1; one that stands out counts as it did."""
    fade, p = Fade(rate=0.0, focus=1.0, span=4096.0), 65536
    (sharpness,), (eased, _) = fade.sharpness(torch.tensor([p])), fade.shift(torch.tensor([p]))
    alike = torch.full((p,), 3.0, dtype=torch.float64)
    alone = torch.tensor([40.0, 3.0], dtype=torch.float64)
    for scores, weight in ((alike, 4096 * math.exp(3.0)), (alone, math.exp(40.0))):
        together = (sharpness * scores).logsumexp(0)
        torch.testing.assert_close(float((together * (1 - eased)).exp()), weight, rtol=1e-11, atol=0)


def test_the_default_reach_and_the_same_reach_given_are_one_law():
    """One value, one meaning: what far keys weigh by default does not depend on who chose the reach."""
    given = {"pretrained": 8192, "context": 65536, "head_dim": 64}
    law = make_law("3d-rpe", **given)
    assert make_law("3d-rpe", **given, reach=law.reach) == law
    assert make_law("3d-rpe", **given, reach=law.reach, window=law.window, chunk=law.chunk) == law
    for name, other in (("focus", 0.5), ("fade", 0.25)):
        changed = make_law("3d-rpe", **given, reach=5120, **{name: other})
        assert {"focus": changed.focus, "fade": changed.fade} == {"focus": FOCUS, "fade": FADE, name: other}
        with pytest.raises(ConfigError, match=name):
            make_law("3d-rpe", **given, **{name: -1})
    plain = make_law("3d-rpe", **given, reach=5120, focus=0, fade=0)
    assert all(region.fade is None for region in plain.regions)


def test_a_choice_of_far_keys_takes_the_place_of_fading():
    """What a query does not see needs no fading; whoever wants both says so."""
    given = {"pretrained": 8192, "context": 65536, "head_dim": 64, "far": 64}
    for law in (make_law("3d-rpe", **given), make_law("3d-rpe", **given, reach=4096)):
        assert (law.focus, law.fade) == (0.0, 0.0)
    assert make_law("3d-rpe", **given, fade=0.125).fade == 0.125


def test_files_of_every_version_give_the_law_that_they_were_written_for():
    """Files name every parameter; those from before `focus` and `fade` existed were laws without them."""
    given = {"pretrained": 8192, "context": 65536, "head_dim": 64}
    for law in (make_law("3d-rpe", **given), make_law("3d-rpe", **given, reach=5120, focus=0, fade=0)):
        assert saved_law(law.to_dict()) == law
    oldest = {k: v for k, v in law.to_dict().items() if k not in ("focus", "fade", "sinks")}
    assert saved_law(oldest) == law
    chosen = make_law("3d-rpe", **given, far=64)
    assert saved_law(chosen.to_dict()) == chosen
    before = saved_law({k: v for k, v in chosen.to_dict().items() if k != "first"})
    assert before == make_law("3d-rpe", **given, far=64, first=0)
    assert [law.regions[-1].choice.always for law in (before, chosen)] == [1, 8]
    sharper = make_law("3d-rpe", **given, far=64, decay=0.8)
    assert saved_law(sharper.to_dict()) == sharper
    assert "decay" not in chosen.to_dict()  # so that a version from before it reads the file
    assert [law.regions[-1].choice.decay for law in (chosen, sharper)] == [0.9, 0.8]
    with pytest.raises(ConfigError, match="law 'mine' is not known"):
        saved_law({"name": "mine"})


def test_the_first_tokens_stand_where_they_did_and_do_not_fade():
    given = {"pretrained": 8192, "context": 65536, "head_dim": 64}
    plain, law = make_law("3d-rpe", **given), make_law("3d-rpe", **given, sinks=4)
    near, sinks, far = law.regions
    assert (near.fade, sinks.fade, far.fade) == (None, None, plain.regions[1].fade)
    query, key = torch.meshgrid(torch.tensor([0, 3000, 3072, 40000]), torch.arange(8), indexing="ij")
    inside = torch.stack([region.contains(query, key) for region in law.regions])
    assert (inside.sum(0) == 1).all()
    assert sinks.contains(query, key)[2].tolist() == [True] * 4 + [False] * 4
    assert torch.equal(law.relative_position(query, key), plain.relative_position(query, key))
    assert len(make_law("3d-rpe", **given, sinks=4, focus=0, fade=0).regions) == 2
    for wrong in (-1, 513, 1.5):
        with pytest.raises(ConfigError, match="sinks"):
            make_law("3d-rpe", **given, sinks=wrong)


@pytest.mark.parametrize("idle", [{"block": 16}, {"first": 0}, {"decay": 0.8}])
def test_a_parameter_of_the_choice_without_a_choice_is_refused(idle):
    """It would have no effect. `far=0` turns the choice off on purpose; old files with such a parameter still load."""
    given = {"pretrained": 8192, "context": 65536, "head_dim": 64}
    plain = make_law("3d-rpe", **given)
    (name,) = idle
    with pytest.raises(ConfigError, match=f"{name} is .*, but far is not given") as refused:
        make_law("3d-rpe", **given, **idle)
    assert "give far as well" in refused.value.hint
    assert make_law("3d-rpe", **given, far=0, **idle) == plain
    assert saved_law({**plain.to_dict(), **idle}) == plain
    assert make_law(**plain.to_dict()) == plain
    assert not {"far", *idle} & plain.to_dict().keys()
    assert getattr(make_law("3d-rpe", **given, far=64, **idle), name) == idle[name]


def test_sinks_beside_a_choice_where_nothing_fades_are_refused():
    given = {"pretrained": 8192, "context": 65536, "head_dim": 64, "far": 64}
    with pytest.raises(ConfigError, match="sinks is 4, but chosen far keys do not fade") as refused:
        make_law("3d-rpe", **given, sinks=4)
    assert "first=4" in refused.value.hint
    assert make_law("3d-rpe", **given, sinks=4, fade=0.125).sinks == 4
    chosen = make_law("3d-rpe", **given)
    assert saved_law({**chosen.to_dict(), "sinks": 4}) == chosen


def test_full_layers_see_all_far_keys_at_the_same_positions():
    """Beside the choice, which they keep. The keys fade as under `3d-rpe` without `far`, or as focus and fade say."""
    given = {"pretrained": 1024, "context": 8192, "head_dim": 16, "chunk": 64, "window": 256, "reach": 512}
    law = make_law("3d-rpe", **given, far=8, full="5+2")
    assert law == make_law("3d-rpe", **given, far=8, full=[2, 5]) == saved_law(law.to_dict())
    assert law.to_dict()["full"] == [2, 5]
    assert make_law("3d-rpe", **given, far=8, full="4+0-2").full == (0, 1, 2, 4)
    assert make_law("3d-rpe", **given, far=8, full=0).full == (0,)
    every = make_law("3d-rpe", **given, far=8, full="all")
    assert dict(law.layers) == dict.fromkeys((2, 5), every)
    assert not every.layers
    assert law.both is None
    choice, rest = every.both
    assert choice == make_law("3d-rpe", **given, far=8)
    assert law.regions == every.regions == choice.regions
    assert rest.regions == make_law("3d-rpe", **given).regions[1:]
    weak = make_law("3d-rpe", **given, far=8, full="all", focus=1.0, fade=0.0)
    assert weak.both[1].regions == make_law("3d-rpe", **given, focus=1.0, fade=0.0).regions[1:]
    own = {"far": 8, "block": 8, "first": 64, "decay": 0.7, "focus": 1.0, "fade": 0.0, "sinks": 3}
    first, second = make_law("3d-rpe", **given, **own, full="all").both
    assert first == make_law("3d-rpe", **given, **own)
    assert second.regions == make_law("3d-rpe", **given, focus=1.0, fade=0.0, sinks=3).regions[1:]
    assert "full" not in make_law("3d-rpe", **given, far=8).to_dict()
    assert not make_law("3d-rpe", **given, far=0, full=3).layers


@pytest.mark.parametrize("full", ["18-19-20", "5-2", "-1", -1, "1_0", "a", "", "1+", 1.5, True, "0-99999", [1, None]])
def test_what_does_not_name_layers_is_refused(full):
    given = {"pretrained": 1024, "context": 8192, "head_dim": 16, "chunk": 64, "window": 256, "reach": 512, "far": 8}
    with pytest.raises(ConfigError, match=r"does not name layers.*18-20 for 18 to 20"):
        make_law("3d-rpe", **given, full=full)
    with pytest.raises(ConfigError, match="full names a layer twice: '3\\+1-4'"):
        make_law("3d-rpe", **given, full="3+1-4")
