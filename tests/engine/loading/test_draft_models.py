"""One smaller model for who guesses ahead and for who scores prompts; and what is refused at start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import random_models
from foundry.package import MODELS
from ingot.config import Settings
from ingot.engine.loaded import Loaded
from ingot.engine.loading import language_model
from ingot.engine.speculation.draft_model import Draft
from ingot.errors import ConfigError
from ingot.text.tokenizer.tokenizer import Tokenizer

DENSE, DRAFT = MODELS / "dense", MODELS / "draft"


def loaded(models: dict[str, Path], **said: Any) -> Loaded:
    settings = Settings(memory="1GB", max_sequences=4, **said)
    return language_model.load(settings, DENSE, Tokenizer.load(DENSE), {}, models, name="dense", source="foundry")


def test_one_draft_guesses_and_scores() -> None:
    made = loaded({"draft": DRAFT}, specprefill=True, speculate=f"draft:{DRAFT}", specprefill_threshold=512)
    assert made.sparse is not None and made.card.scorer == "draft"
    assert (made.sparse.threshold, made.sparse.keep) == (512, 0.3)
    [draft] = made.proposers
    assert isinstance(draft, Draft) and draft.model is made.sparse.scorer._model  # type: ignore[attr-defined]


def test_a_draft_that_only_scores_guesses_nothing() -> None:
    made = loaded({"scorer": DRAFT}, specprefill=True, specprefill_draft_model=str(DRAFT))
    assert made.sparse is not None and "draft" not in made.card.proposers


def test_without_being_asked_for_nobody_scores() -> None:
    assert loaded({"draft": DRAFT}, speculate=f"draft:{DRAFT}").sparse is None


def test_a_missing_draft_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match="specprefill_draft_model"):
        loaded({}, specprefill=True)


def test_two_drafts_are_one_too_many(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DRAFT, other)
    with pytest.raises(ConfigError, match="two models"):
        loaded({"draft": DRAFT, "scorer": other}, specprefill=True, specprefill_draft_model=str(other))


def test_a_draft_of_another_tokenizer_cannot_guess(tmp_path: Path) -> None:
    random_models.write(tmp_path / "small", "dispatch")
    with pytest.raises(ConfigError, match="tokenizers differ"):
        loaded({"draft": tmp_path / "small"}, specprefill=True, speculate=f"draft:{tmp_path / 'small'}")


def test_a_draft_of_another_tokenizer_is_told_prompts_in_its_own(tmp_path: Path) -> None:
    random_models.write(tmp_path / "small", "dispatch")
    made = loaded({"scorer": tmp_path / "small"}, specprefill=True, specprefill_draft_model="small")
    assert made.sparse is not None and made.sparse.translate is not None
    told, ours = made.sparse.translate(tuple(made.tokenizer.encode("once upon", add_special=False))), made.tokenizer
    theirs = Tokenizer.load(tmp_path / "small")
    assert theirs.decode(told.tokens) == ours.decode(ours.encode("once upon", add_special=False))


def test_statistics_need_no_model() -> None:
    made = loaded({}, specprefill=True, specprefill_scorer="statistics")
    assert made.sparse is not None and made.card.scorer == "statistics"


def test_a_draft_that_statistics_do_not_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        Settings(specprefill=True, specprefill_scorer="statistics", specprefill_draft_model="a/b")


OFF: dict[str, Any] = {
    "specprefill_scorer": "statistics",
    "specprefill_draft_model": "a/b",
    "specprefill_threshold": 100,
    "specprefill_keep_pct": 0.1,
}


@pytest.mark.parametrize("name", OFF)
def test_settings_of_what_is_off_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is about specprefill"):
        Settings(**{name: OFF[name]})
