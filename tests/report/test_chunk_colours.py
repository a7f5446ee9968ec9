"""Colours of chunks: neighbours differ, for the colour-blind too; cut sequences keep their hue."""

import colorsys
from itertools import combinations, pairwise

import pytest
from papers.chunkflow_plan import plan_chunkflow

from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Slice
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.report.scene import (
    MOST_SEQUENCES,
    PACKED_COLOURS,
    PART_COLOURS,
    SEQUENCE_COLOURS,
    Panel,
    fill,
    ink_on,
    legend,
    make_scenes,
    tint,
)
from furlong.simulate.clock import simulate
from furlong.simulate.unit_costs import UnitCosts

# How the three kinds of dichromats see linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
EYES = {
    "any": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def parts_of(colour):
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def lab(colour, eye):
    """CIE L*a*b* of a colour as an eye sees it; a difference of 2.3 is just noticeable."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts_of(colour)]
    seen = [
        min(1, max(0, sum(a * c for a, c in zip(row, linear, strict=True)))) for row in EYES[eye]
    ]
    white = (0.9505, 1.0, 1.089)
    xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (
        (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116)
        for row, w in zip(xyz, white, strict=True)
        for value in [sum(a * c for a, c in zip(row, seen, strict=True)) / w]
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one, other, eye):
    return sum((a - b) ** 2 for a, b in zip(lab(one, eye), lab(other, eye), strict=True)) ** 0.5


def scene_of(plan):
    return make_scenes([Panel(simulate(plan, UnitCosts(plan)), plan)])[0]


def fills(scene, rank, kind):
    """The fills of a kind of cell on a rank in the order in which they run, where chunks are of
    whole sequences, with their chunks."""
    bars = [bar for bar in scene.ranks[rank].on("compute") if bar.kind == kind]
    return [
        (bar.chunk, fill(scene.chunks[bar.chunk].colour, kind)) for bar in bars
        if scene.chunks[bar.chunk].sequence is None
    ]  # fmt: skip


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("lens", [(3,) * 23, (9, 1, 2, 3, 1, 4, 4, 2, 2, 4, 3, 11, 4, 4, 4)])
def test_packed_chunks_that_run_one_after_the_other_can_be_told_apart(lens, num_stages, eye):
    plan = plan_chunkflow(lens, ChunkOptions(size=4), stages=(1,) * num_stages)
    scene = scene_of(plan)
    for rank in range(num_stages):
        for kind in ("forward", "backward"):
            run = fills(scene, rank, kind)
            assert len(run) > 4
            for (_, one), (_, other) in pairwise(run):
                assert difference(one, other, eye) > 10


def test_replicas_that_take_chunks_in_turn_have_neighbours_that_differ():
    # with a colour by a chunk's number each of four ranks would have one colour
    chunks = tuple(Chunk((Slice(i, 0, 4),)) for i in range(16))
    actions = tuple(
        tuple(a for i in range(rank, 16, 4) for a in (Forward(i, 0, "all"), Backward(i, 0)))
        for rank in range(4)
    )
    scene = scene_of(ChunkPlan((4,) * 16, chunks, (1,), actions))
    for rank in range(4):
        assert len({colour for _, colour in fills(scene, rank, "backward")}) == 4


def test_layer_first_neighbours_differ_at_the_seam_of_two_stages():
    num_chunks = len(PACKED_COLOURS) + 1  # in turn, the last chunk would look like the first
    chunks = tuple(Chunk((Slice(i, 0, 4),)) for i in range(num_chunks))
    actions = tuple(Forward(i, stage, "all") for stage in (0, 1) for i in range(num_chunks))
    plan = ChunkPlan((4,) * num_chunks, chunks, (1, 1), (actions,))
    run = fills(scene_of(plan), 0, "forward")
    assert all(one != other for (_, one), (_, other) in pairwise(run))


def test_a_cut_sequence_keeps_its_hue_and_goes_from_dark_to_light():
    plan = plan_chunkflow((17, 1, 2, 9, 1), ChunkOptions(size=4), stages=(1,))
    scene = scene_of(plan)
    hues = {}
    for seq_id, group in plan.groups.items():
        hsv = [colorsys.rgb_to_hsv(*parts_of(scene.chunks[chunk].colour)) for chunk in group]
        assert [scene.chunks[chunk].sequence for chunk in group] == [seq_id] * len(group)
        assert [value for _, _, value in hsv] == sorted({value for _, _, value in hsv})
        assert max(hue for hue, _, _ in hsv) - min(hue for hue, _, _ in hsv) < 0.01
        hues[seq_id] = hsv[-1][0]
    assert hues.keys() == {0, 3} and abs(hues[0] - hues[3]) > 0.1


def test_branches_that_are_equally_far_look_alike():
    forks = {0: [(16, 8), (24, 8)]}
    plan = plan_on_device([32], ChunkOptions(size=4), num_layers=1, forks=forks)
    colours = [look.colour for look in scene_of(plan).chunks]
    assert [c.slices[0].start for c in plan.chunks] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert len(set(colours[:4])) == 4 and colours[2:4] == colours[4:6] == colours[6:]


def test_a_sequence_that_another_plan_cuts_has_its_hue_where_it_is_whole():
    panels = []
    for size in (4, 20):
        plan = plan_chunkflow((17, 20, 2), ChunkOptions(size=size), stages=(1,))
        panels.append(Panel(simulate(plan, UnitCosts(plan)), plan))
    cut, whole = make_scenes(panels)
    assert list(cut.cut) == list(whole.cut) == [1, 0]
    assert not panels[1].plan.groups
    last = panels[0].plan.groups[1][-1]
    alone = next(i for i, c in enumerate(panels[1].plan.chunks) if c.slices == (Slice(1, 0, 20),))
    assert cut.chunks[last].colour == whole.chunks[alone].colour
    # but alone in a picture it is one packed chunk of several
    assert make_scenes(panels[1:])[0].chunks[alone].sequence is None


@pytest.mark.parametrize("lens", [(3,) * 64, (9,) * 64, (3,) * 32 + (9,) * 32])
def test_the_legend_of_many_sequences_stays_short(lens):
    scene = scene_of(plan_chunkflow(lens, ChunkOptions(size=4), stages=(1,)))
    _, chunks, _ = legend([scene])
    assert len(chunks) <= MOST_SEQUENCES + 2
    texts = " ".join(entry.text for entry in chunks)
    packed = [
        chunk for chunk in range(len(scene.chunks)) if scene.panel.plan.kind(chunk) == "packed"
    ]
    assert ("whole sequences" in texts) == bool(packed)
    num_cut = sum(seq_len > 4 for seq_len in lens)
    assert (f"{num_cut - MOST_SEQUENCES} shorter ones" in texts) == (num_cut > 0)
    if packed:
        assert chunks[0].chunks == tuple(packed)
        assert {scene.chunks[chunk].colour for chunk in packed} == set(chunks[0].colours)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize(
    "colours", [PACKED_COLOURS, SEQUENCE_COLOURS, list(PART_COLOURS.values())[:9]]
)
def test_any_two_colours_of_a_group_differ_for_every_eye(colours, eye):
    for one, other in combinations(colours, 2):
        assert difference(one, other, eye) > 12
        assert difference(tint(one, 0.5), tint(other, 0.5), eye) > 6


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("colour", [*PACKED_COLOURS, *SEQUENCE_COLOURS])
def test_letters_on_every_fill_can_be_read(colour, kind):
    for shade in (colour, tint(colour, -0.35)):
        face = fill(shade, kind)
        assert abs(lab(face, "any")[0] - lab(ink_on(face), "any")[0]) > 40


def test_shades_of_kinds_differ():
    shades = {fill("#7b8798", kind) for kind in ("forward", "backward", "recompute")}
    assert len(shades) == 3
    assert tint("#204060", 1.0) == "#ffffff" and tint("#204060", -1.0) == "#000000"
    assert tint("#204060", 0.0) == "#204060"
