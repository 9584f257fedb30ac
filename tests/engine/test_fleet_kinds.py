"""A fleet of real models for several things, tiny ones: found, measured, loaded and given back by what they are for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench.random_models import write_tokenizer
from ingot.config import Settings, model_entries
from ingot.engine.engine import Engine
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.engine.request import PoolingRequest, PoolingTask, Request, Stop
from ingot.engine.speech_request import TranscriptionEnded, TranscriptionRequest
from ingot.errors import Unavailable
from ingot.kernels.device import active_memory
from ingot.media.audio import AudioFile
from ingot.models.files.locate import model_kind
from ingot.text.tokenizer.encoder_inputs import EncoderInput
from tests import tiny
from tests.encoders import write_encoder
from tests.hearing import save_ears, tone, wav
from tests.memory import settled

Tables = dict[str, dict[str, object]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """No table says what its model is for: the files do."""
    folder = tmp_path_factory.mktemp("models")
    write_encoder(folder / "vectors", "bert", architectures=["BertModel"])
    write_encoder(folder / "judge", "bert", head=True)
    save_ears(folder / "ears")
    _write_talk(folder / "talk")
    return {name: {"path": str(folder / name)} for name in ("talk", "vectors", "judge", "ears")}


def _write_talk(folder: Path) -> None:
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny.build("llama").parameters())))
    (folder / "config.json").write_text(json.dumps(tiny.CONFIGS["llama"]))
    write_tokenizer(folder, tiny.VOCAB)


@pytest.fixture
def garage() -> Iterator[ModelLoader]:
    made = ModelLoader(Settings(), alone=False)
    yield made
    made.close()


def fleet_of(tables: Tables, garage: ModelLoader, memory: int | None = None) -> Fleet:
    entries = model_entries(Settings(models=tables, lazy=True), model_kind)
    return Fleet(entries, garage, memory or garage.memory)


async def use(fleet: Fleet, name: str) -> int:
    """How many numbers, tokens or windows came."""
    async with fleet.lease(name) as engine:
        if isinstance(engine, Engine):
            asked = Request(id=name, prompts=((3, 4, 5),), max_tokens=4, stop=Stop(ignore_eos=True))
            return len([batch async for batch in await engine.open(asked)])
        if engine.hearing is not None:
            stream = engine.transcribe(TranscriptionRequest(name, AudioFile(wav(tone(0.5)))))
            return len([event async for event in stream if isinstance(event, TranscriptionEnded)])
        role: PoolingTask = "embedding" if "embedding" in engine.encoders else "rerank"
        inputs = (EncoderInput((2, 4, 5, 3), (0, 0, 0, 0)),)
        return len((await engine.encode(PoolingRequest(name, role, inputs))).rows[0])


def test_the_files_say_what_a_model_is_for(tables: Tables) -> None:
    entries = model_entries(Settings(models=tables), model_kind)
    assert [entry.kind for entry in entries] == ["chat", "embedding", "rerank", "audio"]


@pytest.mark.alone
@pytest.mark.anyio
async def test_models_of_all_kinds_work_beside_each_other_and_leave_nothing_behind(
    tables: Tables, garage: ModelLoader
) -> None:
    fleet = fleet_of(tables, garage)
    before = settled()
    used = dict(zip(tables, await asyncio.gather(*(use(fleet, name) for name in tables)), strict=True))
    assert used["talk"] > 0 and (used["vectors"], used["judge"], used["ears"]) == (16, 1, 1)
    assert active_memory() > before
    for stands in fleet.standings():
        assert stands.state == "loaded" and stands.claimed > 0
        await fleet.unload(stands.name)
    assert active_memory() - before < 1000


@pytest.mark.anyio
async def test_what_is_claimed_covers_the_weights(tables: Tables, garage: ModelLoader) -> None:
    fleet = fleet_of(tables, garage)
    for stands in fleet.standings():
        async with fleet.lease(stands.name) as engine:
            [now] = [each for each in fleet.standings() if each.name == stands.name]
            assert now.claimed > engine.card.weight_bytes


@pytest.mark.anyio
async def test_a_table_that_says_chat_of_an_encoder_is_told_what_to_say(tables: Tables, garage: ModelLoader) -> None:
    fleet = fleet_of({"vectors": {**tables["vectors"], "kind": "chat"}}, garage)
    with pytest.raises(Unavailable, match='say kind = "embedding" in its table'):
        await use(fleet, "vectors")


@pytest.mark.anyio
async def test_a_model_that_hears_gets_the_memory_that_its_table_states(tables: Tables, garage: ModelLoader) -> None:
    fleet = fleet_of({"ears": {**tables["ears"], "memory": "1KB"}}, garage)
    with pytest.raises(Unavailable, match="memory budget are left for it"):
        await use(fleet, "ears")
