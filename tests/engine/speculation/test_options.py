from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.speculation.options import KNOWN_WORDS, MODEL_PROPOSERS, PROPOSERS, SpeculationOptions
from ingot.errors import ConfigError

MODELS = st.from_regex(r"[\w./~-]{1,20}(:[\w.]{1,8})?", fullmatch=True)


@st.composite
def chosen(draw: st.DrawFn) -> tuple[tuple[str, ...], dict[str, str]]:
    names = tuple(draw(st.lists(st.sampled_from(PROPOSERS), min_size=1, unique=True)))
    return names, {name: draw(MODELS) for name in names if name in MODEL_PROPOSERS}


def test_auto_is_whatever_there_is_and_off_is_nobody() -> None:
    assert SpeculationOptions.parse("auto") == SpeculationOptions() == SpeculationOptions(None, {}, None)
    assert SpeculationOptions.parse("off", 3) == SpeculationOptions((), {}, 3)


@given(chosen(), st.booleans())
def test_proposers_come_in_the_order_given_with_their_models(
    asked: tuple[tuple[str, ...], dict[str, str]], spaced: bool
) -> None:
    names, models = asked
    words = [f"{name}:{models[name]}" if name in models else name for name in names]
    assert SpeculationOptions.parse((" , " if spaced else ",").join(words), 5) == SpeculationOptions(names, models, 5)


@given(st.text(max_size=30))
def test_any_other_text_is_refused_in_words(text: str) -> None:
    try:
        made = SpeculationOptions.parse(text)
    except ConfigError as error:
        assert error.message
    else:
        assert made.names is None or set(made.names) <= set(PROPOSERS)
        assert set(made.models) == set(made.names or ()) & MODEL_PROPOSERS


@pytest.mark.parametrize("text", ["", "ngram", "mtp,", "draft model"])
def test_an_unknown_word_is_answered_with_those_that_exist(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(", ".join(KNOWN_WORDS))):
        SpeculationOptions.parse(text)


def test_a_misspelt_word_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean lookup"):
        SpeculationOptions.parse("mtp,lokup")


@pytest.mark.parametrize("text", ["off,mtp", "lookup,auto", "auto,off"])
def test_auto_and_off_stand_alone(text: str) -> None:
    with pytest.raises(ConfigError, match="stands alone"):
        SpeculationOptions.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("draft", "needs a model"),
        ("eagle:", "needs a model"),
        ("mtp:org/name", "takes no model"),
        ("lookup:", "takes no model"),
        ("mtp,lookup,mtp", "twice"),
        ("draft:a,draft:b", "twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SpeculationOptions.parse(text)


def test_asking_for_what_the_model_lacks_is_an_error_that_says_what_it_has() -> None:
    SpeculationOptions.parse("auto").refuse_missing(())
    SpeculationOptions.parse("off").refuse_missing(())
    SpeculationOptions.parse("lookup").refuse_missing(("forced", "lookup"))
    with pytest.raises(ConfigError, match="has no mtp; what can be asked for: auto, off, forced, lookup"):
        SpeculationOptions.parse("lookup,mtp").refuse_missing(("forced", "lookup"))
