"""The paper's figures as tables: golden values, and the claims of errata.md that they show."""

from __future__ import annotations

import csv
import io
import math

import pytest

from rpe3d.analysis import paper


@pytest.fixture(scope="module")
def decay():
    return paper.decay()


@pytest.fixture(scope="module")
def matrices():
    return paper.matrices()


def roformer(distance, base=10000.0, pairs=64):
    """RoFormer section 3.4.3, term by term: (1 / (d/2)) Σ_j |S_j|."""
    partial, total = 0j, 0.0
    for pair in range(pairs):
        angle = distance * base ** (-pair / pairs)
        partial += complex(math.cos(angle), math.sin(angle))
        total += abs(partial)
    return total / pairs


def bound(table, law):
    rows = table.where(law=law)
    return dict(zip(rows.column("distance"), rows.column("bound"), strict=True))


def test_figure_1a_turns_every_token_by_its_position():
    """θ_10 = 10000^(-20/128); 16 tokens in training, 8 beyond."""
    table = paper.circle()
    theta = 10000 ** (-20 / 128)
    assert table.column("in training") == [True] * 16 + [False] * 8
    assert table.column("angle") == pytest.approx([p * theta for p in range(24)], rel=1e-12)
    assert table.column("x")[7] == pytest.approx(math.cos(7 * theta))
    assert table.column("y")[7] == pytest.approx(math.sin(7 * theta))


def test_figure_1b_keeps_chunks_apart_with_base_2_and_not_with_the_printed_one():
    """Errata 3: the height is cos 2φ_j, φ_j = base^(-j)."""
    table = paper.sphere()
    height = {(row[0], row[2]): row[7] for row in table.rows}
    assert [height[2.0, j] for j in range(3)] == pytest.approx([math.cos(2), math.cos(1), math.cos(0.5)])
    assert height[10000.0, 0] == pytest.approx(math.cos(2))
    assert [height[10000.0, j] for j in (1, 2)] == pytest.approx([1.0, 1.0], abs=1e-7)
    turned = [math.atan2(y, x) % math.tau for *_, x, y, _ in table.where(phi_base=2.0, chunk=1).rows]
    assert turned == pytest.approx([m * 10000 ** (-8 / 128) for m in range(8)])


@pytest.mark.parametrize("distance", [0, 1, 100, 913, 1000, 4000, 7999])
def test_figure_1c_is_roformers_bound(decay, distance):
    assert bound(decay, "rope")[distance] == pytest.approx(roformer(distance), rel=1e-9)


def test_figure_1c_is_above_5_at_many_distances_beyond_1000(decay):
    """Erratum 8."""
    far = [value for distance, value in bound(decay, "rope").items() if distance >= 1000]
    assert sum(value > 5 for value in far) > 2500


def test_figure_1d_falls_to_3_92_at_distance_913_and_again_in_every_chunk(decay):
    """Erratum 7: with c = 1000 the bound does not stay at or above 5."""
    values = bound(decay, "3d-rpe-definition")
    assert sorted(values) == list(range(8000))
    assert values[913] == pytest.approx(3.92, abs=5e-3)
    assert min(values.values()) == pytest.approx(values[913], abs=1e-9)
    assert [values[913 + 1000 * j] for j in range(8)] == pytest.approx([values[913]] * 8, abs=1e-9)


@pytest.mark.parametrize("distance", [10, 1279, 1500, 4321, 7999])
def test_figure_1d_of_the_bounded_form_is_ropes_bound_at_the_position_shown(decay, distance):
    """Fact 5 of docs/paper.md, with c = 256, w = 1280, R = 2048 and L = 8000: f by hand."""
    query, key = 7999, 7999 - distance
    a = query // 256 - key // 256
    slope = (2048 - 256 - 1280) / (8000 - 1280)
    f = query % 256 - key % 256 + 256 * (slope * a + (1 - slope) * min(a, 5))
    assert bound(decay, "3d-rpe")[distance] == pytest.approx(roformer(f), rel=1e-9)


def test_figure_1d_of_dual_chunk_shows_far_keys_from_one_place(decay):
    """Far queries stand at w = 3072, keys at their offset in chunks of 2816; a common phase drops out of the bound."""
    key = 100
    assert bound(decay, "3d-rpe-dual-chunk")[7999 - key] == pytest.approx(roformer(3072 - key), rel=1e-9)


def test_figure_1e_is_the_ratio_of_lengths():
    """Supplement C: E'_rope = L_p / L."""
    table = paper.interpolation().where(law="linear")
    assert table.column("context") == [4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536]
    ratios = [1, 2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 12, 1 / 16]
    assert table.column("within") == pytest.approx(ratios, rel=1e-9)


def test_figure_1f_is_1_within_a_chunk_and_negative_at_a_border():
    """Theorem 1, and erratum 11: -(c' - 1) - (φ_1 - φ_0) = -(c' - 1) + 0.9999."""
    table = paper.interpolation()
    for law in ("3d-rpe-definition", "3d-rpe"):
        assert table.where(law=law).column("within") == pytest.approx([1.0] * 9, abs=1e-9)
    defined = table.where(law="3d-rpe-definition")
    assert set(defined.column("chunk")) <= set(range(3, 4097))
    expected = [1 - chunk + 0.9999 for chunk in defined.column("chunk")]
    assert defined.column("border") == pytest.approx(expected, abs=1e-9)


def test_figure_2_turns_by_offset_and_phase():
    """Definition 1: m θ + π/2 - φ_j, and h = (1, 0) goes to the point at that angle."""
    theta = 10000 ** (-8 / 128)
    rows = paper.chunking().rows
    assert [row[:3] for row in rows] == [(p, p // 4, p % 4) for p in range(12)]
    for _, j, m, phi, angle, x, y in rows:
        assert phi == 0.5**j
        assert angle == pytest.approx(m * theta + math.pi / 2 - phi)
        assert (x, y) == pytest.approx((math.cos(angle), math.sin(angle)))


def row_of(table, form, query, *columns):
    part = table.where(form=form, query=query)
    assert part.column("key") == list(range(query + 1))
    return list(zip(*(part.column(column) for column in columns), strict=True))


def test_figure_3_as_printed(matrices):
    """The last row of the printed figure, and its first column."""
    last = [(2, 3), (2, 2), (2, 1), (2, 0), (1, 3), (1, 2), (1, 1), (1, 0), (0, 3), (0, 2), (0, 1), (0, 0)]
    assert row_of(matrices, "printed", 11, "between", "within") == last
    column = matrices.where(form="printed", key=0)
    assert list(zip(column.column("between"), column.column("within"), strict=True)) == last[::-1]
    assert [f for (f,) in row_of(matrices, "printed", 9, "shown")] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_figure_3_as_definition_1_gives_it(matrices):
    """Errata 4 and 5: (i - j, m - n), the chunk before in the future."""
    eighth = [(2, 0), (2, -1), (2, -2), (2, -3), (1, 0), (1, -1), (1, -2), (1, -3), (0, 0)]
    assert row_of(matrices, "definition", 8, "between", "within") == eighth
    assert [f for (f,) in row_of(matrices, "definition", 8, "shown")] == [w for _, w in eighth]


@pytest.mark.parametrize(
    ("form", "query", "shown"),
    [
        ("dual-chunk", 7, [6, 5, 4, 3, 3, 2, 1, 0]),
        ("dual-chunk", 11, [6, 5, 4, 3, 6, 5, 4, 3, 3, 2, 1, 0]),
        ("bounded", 7, [7, 6, 5, 4, 3, 2, 1, 0]),
        ("bounded", 8, [5, 4, 3, 2, 4, 3, 2, 1, 0]),
        ("bounded", 11, [8, 7, 6, 5, 7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_figure_3_of_the_other_forms(matrices, form, query, shown):
    """Dual-chunk with w = 6; bounded with w = 4, R = 10 and so r = 1/4: f = (m - n) + 4 (a + 3 min(a, 1)) / 4."""
    assert [f for (f,) in row_of(matrices, form, query, "shown")] == pytest.approx(shown, abs=1e-12)


def test_the_bloch_sphere_has_its_poles_and_one_point_for_a_chunk():
    """Supplement A: |0> and |1> at the poles; eq. 1 with θ_1 = 0 and φ/2 = φ_j for the chunks."""
    points = {row[0]: row[3:] for row in paper.bloch().rows}
    assert points["|0⟩"] == pytest.approx((0, 0, 1))
    assert points["|1⟩"] == pytest.approx((0, 0, -1), abs=1e-12)
    assert points["|+⟩"] == pytest.approx((1, 0, 0), abs=1e-12)
    assert points["|i⟩"] == pytest.approx((0, 1, 0), abs=1e-12)
    state = (math.sin(1) * math.cos(0.9), math.sin(1) * math.sin(0.9), math.cos(1))
    assert points["|φ⟩"] == pytest.approx(state)
    for j in range(3):
        assert points[f"chunk {j}"] == pytest.approx((math.sin(2 * 0.5**j), 0, math.cos(2 * 0.5**j)), abs=1e-12)


def test_a_csv_holds_every_number_unrounded():
    table = paper.interpolation()
    heading, *rows = csv.reader(io.StringIO(table.csv()))
    assert tuple(heading) == table.columns
    assert [float(row[3]) for row in rows] == table.column("within")
    assert rows[0][4] == ""
