"""Whether two models mean the same by a token's number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import mlx.core as mx
import pytest

from bench import random_models
from foundry.package import MODELS
from ingot.config import Settings
from ingot.distributed.leader import LeaderAdapter
from ingot.engine.core import LoadedModel
from ingot.engine.loading import draft_models, language_model
from ingot.engine.loading.draft_models import choose_proposers, refuse_different_tokenizers, with_drafter_role
from ingot.engine.speculation.draft_model import DraftModelProposer
from ingot.engine.speculation.options import SpeculationOptions
from ingot.errors import ConfigError, ModelError
from ingot.models.files.locate import ModelFolder
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import tiny
from tests.models.draft_heads import test_block
from tests.models.draft_heads.making import write


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with the draft's tokenizer, to be changed."""
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_text((MODELS / "draft" / file).read_text())
    return tmp_path


def change(folder: Path, changed: Any) -> None:
    description = json.loads((folder / "tokenizer.json").read_text())
    changed(description)
    (folder / "tokenizer.json").write_text(json.dumps(description))


def test_models_of_the_same_tokenizer_go_together(other: Path) -> None:
    refuse_different_tokenizers(MODELS / "dense", MODELS / "draft")
    refuse_different_tokenizers(MODELS / "dense", other)


def test_a_token_of_another_text_is_named(other: Path) -> None:
    def swap(description: dict[str, Any]) -> None:
        names = {id: name for name, id in description["model"]["vocab"].items()}
        description["model"]["vocab"][names[100]], description["model"]["vocab"][names[101]] = 101, 100

    change(other, swap)
    with pytest.raises(ConfigError, match=r"token 100 is .*, the draft's is .* Choose a draft of the same family"):
        refuse_different_tokenizers(MODELS / "dense", other)


def test_more_tokens_are_named(other: Path) -> None:
    def add(description: dict[str, Any]) -> None:
        last = description["added_tokens"][-1]
        description["added_tokens"].append({**last, "id": 4096, "content": "<|another|>"})

    change(other, add)
    with pytest.raises(ConfigError, match="4096 tokens, the draft's has 4097"):
        refuse_different_tokenizers(MODELS / "dense", other)


DENSE, DRAFT = MODELS / "dense", MODELS / "draft"


def loaded(models: dict[str, Path], **said: Any) -> LoadedModel:
    settings = Settings(memory="1GB", max_sequences=4, **said)
    further = {role: ModelFolder(path, role, "foundry") for role, path in models.items()}
    return language_model.load_language_model(
        settings, ModelFolder(DENSE, "dense", "foundry"), lambda: Tokenizer.load(DENSE), further
    )


def test_one_draft_guesses_and_scores() -> None:
    made = loaded({"draft": DRAFT}, specprefill=True, speculate=f"draft:{DRAFT}", specprefill_threshold=512)
    assert made.specprefill is not None and made.card.scorer == "draft"
    assert (made.specprefill.threshold, made.specprefill.keep) == (512, 0.3)
    [draft] = made.proposers
    assert isinstance(draft, DraftModelProposer) and draft.model is made.specprefill.scorer._model  # type: ignore[attr-defined]


def test_a_draft_that_only_scores_guesses_nothing() -> None:
    made = loaded({"scorer": DRAFT}, specprefill=True, specprefill_draft_model=str(DRAFT))
    assert made.specprefill is not None and "draft" not in made.card.proposers


def test_without_being_asked_for_nobody_scores() -> None:
    assert loaded({"draft": DRAFT}, speculate=f"draft:{DRAFT}").specprefill is None


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
    assert made.specprefill is not None and made.specprefill.translate is not None
    told, ours = (
        made.specprefill.translate(tuple(made.tokenizer.encode("once upon", add_special=False))),
        made.tokenizer,
    )
    theirs = Tokenizer.load(tmp_path / "small")
    assert theirs.decode(told.tokens) == ours.decode(ours.encode("once upon", add_special=False))


def test_statistics_need_no_model() -> None:
    made = loaded({}, specprefill=True, specprefill_scorer="statistics")
    assert made.specprefill is not None and made.card.scorer == "statistics"


def test_a_draft_that_statistics_do_not_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        Settings(specprefill=True, specprefill_scorer="statistics", specprefill_draft_model="a/b")


def test_a_policy_and_a_quality_reach_the_model() -> None:
    policy = {"specprefill": "auto", "specprefill_draft_model": str(DRAFT), "specprefill_quality": 0.99}
    made = loaded({"scorer": DRAFT}, **policy, specprefill_threshold=512)
    assert made.card.specprefill_from == 512
    assert made.specprefill is not None and made.specprefill.quality == 0.99
    assert 0 < made.specprefill.expected_cost < 10
    assert loaded({"scorer": DRAFT}, **policy | {"specprefill": "on"}).card.specprefill_from is None


@pytest.mark.parametrize(
    "other", [{"specprefill_keep_pct": 0.2}, {"specprefill_scorer": "statistics"}], ids=lambda value: next(iter(value))
)
def test_a_quality_and_what_it_replaces_or_cannot_ask_are_refused_together(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="choose one"):
        Settings(specprefill="auto", specprefill_quality=0.99, **other)


OFF: dict[str, Any] = {
    "specprefill_scorer": "statistics",
    "specprefill_draft_model": "a/b",
    "specprefill_threshold": 100,
    "specprefill_keep_pct": 0.1,
    "specprefill_quality": 0.9,
}


@pytest.mark.parametrize("name", OFF)
def test_settings_of_what_is_off_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is about specprefill"):
        Settings(**{name: OFF[name]})


def test_a_head_that_is_not_known_is_named_by_a_note_and_to_who_asks_for_it_by_an_error(tmp_path: Path) -> None:
    adapter = tiny.adapter("llama")
    folder = write(tmp_path / "m", {}, files={"model.safetensors": {"model.mtp.layers.0.eh_proj.weight": mx.ones(4)}})
    offered = choose_proposers(SpeculationOptions.parse("auto"), folder, adapter, {}, dtype=None)
    [note] = offered.notes
    assert offered.names == ("forced", "lookup") and "eh_proj" in note and "llama" in note
    with pytest.raises(ModelError, match=r"eh_proj.* llama"):
        choose_proposers(SpeculationOptions.parse("mtp"), folder, adapter, {}, dtype=None)


def test_a_drafter_goes_by_what_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_models, "check_draft_head", lambda head, adapter: None)
    folder = test_block.written(tmp_path / "model" / "mtp", "dflash").parent
    own = choose_proposers(SpeculationOptions.parse("auto"), folder, test_block.adapted(), {}, dtype=None)
    assert own.names == ("forced", "lookup", "mtp") and not own.notes
    models = with_drafter_role({"draft": folder / "mtp", "scorer": DRAFT})
    assert models == {"drafter": folder / "mtp", "scorer": DRAFT}
    choice = SpeculationOptions.parse(f"draft:{folder / 'mtp'}")
    asked = choose_proposers(choice, DENSE, test_block.adapted(), models, dtype=None)
    assert asked.names == ("draft",) and asked.adapter.head.name == "draft"
    assert with_drafter_role({"draft": DRAFT}) == {"draft": DRAFT}


def test_a_drafter_excludes_other_heads_and_ranks(tmp_path: Path) -> None:
    folder = test_block.written(tmp_path / "mtp", "dflash")
    for others, models in (("mtp", {}), (f"eagle:{folder}", {"eagle": folder})):
        choice = SpeculationOptions.parse(f"{others},draft:{folder}")
        with pytest.raises(ConfigError, match="exclude each other: one head can read"):
            choose_proposers(choice, DENSE, test_block.adapted(), {"drafter": folder, **models}, dtype=None)
    leading = create_autospec(LeaderAdapter, instance=True)
    with pytest.raises(ModelError, match="ranks take a whole model"):
        choose_proposers(SpeculationOptions.parse("mtp"), tmp_path, leading, {}, dtype=None)
