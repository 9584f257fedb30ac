"""Whoever follows has been told all that passes depend on, whatever is asked of a server: see `echo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foundry.package import MODELS
from ingot.config import Settings
from ingot.engine import prefix_cache
from ingot.engine.engine import Engine
from ingot.engine.loading import draft_models
from ingot.engine.request import Ended, Request, SpecPrefillRequest
from ingot.models.files.locate import ModelFolder
from ingot.text.grammar.grammars import Grammars
from tests import tiny
from tests.distributed import groups, keeping, playing
from tests.distributed.echo import leading
from tests.engines import answer, text_of
from tests.memory import pretended
from tests.models.draft_heads import test_eagle as eagles

ASKED = {"tensor_parallel_size": 2, "max_sequences": playing.SEATS, "memory": "1GB", "deterministic": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny.CONFIGS["llama"],
    "hybrid": {**tiny.CONFIGS["hybrid"], "model_type": "qwen3_5"},
}


def answered(engine: Engine, length: int = 12) -> list[str]:
    """Two answers, the second to a prompt that begins with the first one's."""
    first, second = playing.prompt(1, 100), (*playing.prompt(1, 100), *playing.prompt(2, 9))
    return [
        text_of(answer(engine, Request(id, (tokens,), length, sampling=playing.GREEDY, stop=playing.ON)))
        for id, tokens in (("first", first), ("second", second))
    ]


@pytest.mark.parametrize("kind", CONFIGS)
def test_who_follows_gives_what_rank_0_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.write_model(tmp_path, CONFIGS[kind])
    settings = Settings(**ASKED, speculate="lookup", speculate_tokens=3)
    with leading(tmp_path, settings, monkeypatch) as (engine, echo):
        grammars = Grammars(engine.tokenizer, engine.card.vocab)
        played = playing.play(engine, grammars, crowd=True)
        grammars.close()
    echo.check()
    assert played.drafted and played.preemptions and all(played.matched[:1])


def test_pages_in_fewer_bits_are_the_same_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.write_model(tmp_path, {**CONFIGS["llama"], "head_dim": 32})
    settings = Settings(**ASKED, kv_codec="affine8", speculate="lookup", speculate_tokens=3)
    whole = playing.prompt(1, 1400)
    from_inside_a_page = (*whole[:1000], *playing.prompt(2, 300))
    with leading(tmp_path, settings, monkeypatch) as (engine, echo):
        for number, tokens in enumerate((whole, from_inside_a_page, whole)):
            request = Request(f"{number}", (tokens,), 4, sampling=playing.GREEDY, stop=playing.ON)
            ended = answer(engine, request)[-1]
    assert isinstance(ended, Ended) and ended.cache[0].codec == "affine8"
    echo.check()


@pytest.mark.parametrize(("kind", "room"), [("wide", "1MB"), pytest.param("hybrid", "110KB", marks=pretended)])
def test_records_in_fewer_bits_are_the_same_ones(
    kind: str, room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.write_model(tmp_path, {**CONFIGS["llama"], "head_dim": 32} if kind == "wide" else CONFIGS[kind])
    for name, value in keeping.ENCOURAGED.items():
        monkeypatch.setattr(prefix_cache, name, value)
    settings = Settings(**ASKED, cache_codec="affine8", cache_memory=room, speculate="off")
    with leading(tmp_path, settings, monkeypatch) as (engine, echo):
        kept = keeping.play(engine)
        assert engine.kept.status("").used_bytes <= engine.kept.status("").limit_bytes
    echo.check()
    assert any(codec == "affine8" and matched for codec, matched, _ in kept.taken)


def test_a_draft_beside_rank_0_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = ModelFolder(MODELS / "draft", "draft", "foundry")
    settings = Settings(**ASKED, speculate=f"draft:{draft.path}", speculate_tokens=3)
    with leading(MODELS / "dense", settings, monkeypatch, further={"draft": draft}) as (engine, echo):
        answered(engine)
        assert engine.speculation.draft_tokens
    echo.check()


def test_a_head_beside_rank_0_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**ASKED, speculate="mtp", speculate_tokens=3)
    with leading(MODELS / "hybrid", settings, monkeypatch) as (engine, echo):
        answered(engine)
        assert engine.speculation.draft_tokens
    echo.check()


def test_a_head_that_reads_what_layers_give_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.write_model(tmp_path, CONFIGS["llama"])
    draft = eagles.written(tmp_path / "eagle", eagles.random_tensors(embeds=False))
    monkeypatch.setattr(draft_models, "check_draft_head", lambda head, adapter: 1.0)  # what is random is seldom right
    settings = Settings(**ASKED, speculate=f"eagle:{draft}", speculate_tokens=3)
    eagle = ModelFolder(draft, "eagle", "random")
    with leading(tmp_path, settings, monkeypatch, further={"eagle": eagle}) as (engine, echo):
        answered(engine)
        assert engine.speculation.draft_tokens
    echo.check()


def test_prompts_of_which_some_tokens_are_left_out_are_computed_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.write_model(tmp_path, CONFIGS["llama"])
    settings = Settings(**ASKED, specprefill=True, specprefill_scorer="statistics", specprefill_threshold=512)
    wanted = Request(
        "a",
        (playing.prompt(1, 1500),),
        4,
        sampling=playing.GREEDY,
        stop=playing.ON,
        specprefill=SpecPrefillRequest(keep=0.3),
    )
    with leading(tmp_path, settings, monkeypatch) as (engine, echo):
        ended = answer(engine, wanted)[-1]
    assert isinstance(ended, Ended) and 0 < ended.specprefill[0].kept < 1500
    echo.check()
