import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundry import dialect, phrases
from foundry.chat_lessons import chat_lesson, steps
from foundry.lesson import HELD_OUT, seeded
from foundry.recall import recall_lesson
from foundry.tool_lessons import tool_lesson

seeds = st.integers(0, HELD_OUT - 1)
styles = st.sampled_from(dialect.DIALECTS)
makers = st.sampled_from([chat_lesson, tool_lesson, lambda chance: recall_lesson(chance, 60)])


@given(seeds, styles, makers)
def test_the_template_renders_an_answered_lesson_as_its_prompt_and_its_completion(seed, style, make):
    lesson = make(seeded(seed))
    whole = dialect.prompt(lesson, style) + dialect.completion(lesson, style)
    assert dialect.finished(lesson, style) == whole + "\n"


@given(seeds)
def test_a_lesson_depends_on_its_seed_alone(seed):
    assert tool_lesson(seeded(seed)) == tool_lesson(seeded(seed))


def test_a_held_out_lesson_is_not_the_training_lesson_of_the_same_seed():
    pairs = [(tool_lesson(seeded(seed)), tool_lesson(seeded(seed, held_out=True))) for seed in range(50)]
    assert all(trained != held_out for trained, held_out in pairs)


@pytest.mark.parametrize("seed", [-1, HELD_OUT])
def test_a_seed_cannot_reach_into_the_held_out_ones(seed):
    with pytest.raises(ValueError, match="seed"):
        seeded(seed)


@given(seeds)
def test_an_awkward_string_has_no_white_space_at_its_ends(seed):
    text = phrases.awkward(seeded(seed))
    assert text and text == text.strip()


@given(seeds)
def test_a_quoted_string_is_still_in_the_question(seed):
    chance = seeded(seed)
    text = phrases.awkward(chance)
    quoted = phrases.quoted(text, chance)
    assert text in quoted and quoted != text


@given(seeds)
def test_every_argument_can_be_read_from_the_question(seed):
    lesson = tool_lesson(seeded(seed))
    asked = lesson.messages[-1]["content"]
    for call in lesson.calls:
        for value in call.arguments.values():
            assert (str(value).lower() if isinstance(value, bool) else str(value)) in asked


@given(seeds)
def test_a_json_call_parses_back_to_its_arguments(seed):
    lesson = tool_lesson(seeded(seed))
    text = dialect.completion(lesson, "json")
    bodies = [part.split("\n</tool_call>")[0] for part in text.split("<tool_call>\n")[1:]]
    assert [json.loads(body) for body in bodies] == [
        {"name": call.name, "arguments": call.arguments} for call in lesson.calls
    ]


@given(st.integers(0, 999), st.integers(0, 999))
def test_the_written_method_of_addition_ends_with_the_first_digits(left, right):
    last = steps(left, right, "+").split(" = ")[-1]
    assert str(left + right).startswith(last.split(",")[0].rstrip("."))


@given(st.integers(10, 99), st.integers(2, 9))
def test_the_written_method_of_multiplication_writes_each_digit(left, right):
    said = steps(left, right, "*")
    digits = [part.split(",")[0] for part in said.split("write ")[1:]]
    carry = said.rsplit("carry ", 1)[1].rstrip(".")
    assert int((carry if carry != "0" else "") + "".join(reversed(digits))) == left * right
