import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundry import vocabulary
from foundry.lesson import HELD_OUT
from foundry.vision import pictures
from foundry.vision.layouts import LAYOUTS, QUESTIONS, examples, rows
from foundry.vision.prompts import CELL, IMAGE, VIDEO, positions
from foundry.vision.scenes import seeded

seeds = st.integers(0, HELD_OUT - 1)
layouts = st.sampled_from(sorted(LAYOUTS))


@given(seeds, layouts)
def test_a_sight_fills_its_layout_and_has_questions_enough(seed, name):
    layout = LAYOUTS[name]
    sight = layout.sight(seeded(seed))
    assert sight.frames.shape == (layout.count, layout.height, layout.width, 3)
    assert sight.frames.dtype == np.uint8
    assert len(sight.questions) >= QUESTIONS


@given(seeds, layouts)
def test_a_question_has_one_answer(seed, name):
    answers: dict[str, str] = {}
    for question in LAYOUTS[name].sight(seeded(seed)).questions:
        assert answers.setdefault(question.asked, question.answer) == question.answer


@given(seeds, layouts)
def test_a_scene_depends_on_its_seed_alone(seed, name):
    once, again = (LAYOUTS[name].sight(seeded(seed)) for _ in range(2))
    assert (once.frames == again.frames).all() and once.questions == again.questions


@pytest.mark.parametrize("seed", [-1, HELD_OUT])
def test_a_seed_cannot_reach_into_the_held_out_ones(seed):
    with pytest.raises(ValueError, match="seed"):
        seeded(seed)


def test_a_held_out_scene_is_not_the_training_scene_of_the_same_seed():
    layout = LAYOUTS["square"]
    assert all(
        (layout.sight(seeded(n)).frames != layout.sight(seeded(n, held_out=True)).frames).any() for n in range(9)
    )


@given(seeds, layouts)
def test_a_prompt_has_a_place_for_each_part_of_what_is_seen(seed, name):
    layout = LAYOUTS[name]
    for _, read in examples(layout, seed % 1000)[1]:
        tokens = read.prompt + read.answer
        assert len(tokens) <= layout.length
        assert len(read.seen) == layout.cells
        assert {tokens[place] for place in read.seen} == {*vocabulary.encoded(VIDEO if layout.clip else IMAGE)}
        assert read.positions.shape == (3, len(tokens))


def test_text_goes_on_after_the_longer_side_of_a_picture():
    pads = np.array([False, *[True] * 6, False, False])
    time, row, column = positions(pads, 2, 3)
    assert time.tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 5]
    assert row.tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert column.tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5]


def test_rows_count_the_answer_and_nothing_else():
    made = rows(LAYOUTS["clip4"], [1, 2])
    end = vocabulary.encoded("<|im_end|>")[0]
    assert made.frames.shape == (2, 2, 2, 64, 64, 3)
    assert made.tokens.shape[1:] == (QUESTIONS, LAYOUTS["clip4"].length)
    last = made.weights & ~np.roll(made.weights, -1, axis=-1)
    assert (made.tokens[last] == end).all() and last.sum() == 2 * QUESTIONS


@pytest.mark.parametrize("shape", pictures.SHAPES)
def test_a_figure_is_painted_inside_its_radius_alone(shape):
    canvas = pictures.blank(CELL * 2, CELL * 2, (0, 0, 0))
    pictures.draw(canvas, pictures.Figure(shape, "white", 30.0, 34.0, 12.0), (255, 255, 255))
    painted = np.argwhere(canvas[..., 0] > 0)
    assert 60 < len(painted) < 500
    assert (abs(painted - [34, 30]) <= 13).all()


def test_each_digit_looks_different():
    assert len(set(pictures.GLYPHS.values())) == 10
