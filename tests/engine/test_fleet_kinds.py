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
from ingot.config import ModelEntry, Settings, model_entries, single_model_entries
from ingot.engine.engine import Engine, PoolingEngine, SpeechToTextEngine
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.engine.request import PoolingRequest, Request, Stop
from ingot.engine.speech_request import TranscriptionEnded, TranscriptionRequest
from ingot.errors import ModelError, Unavailable
from ingot.kernels.device import active_memory
from ingot.media.audio import AudioFile
from ingot.models.files.locate import model_kind
from ingot.models.files.progress import no_progress
from ingot.protocol.model_listings import list_models
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
    made = ModelLoader(Settings())
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
        if isinstance(engine, SpeechToTextEngine):
            stream = engine.transcribe(TranscriptionRequest(name, AudioFile(wav(tone(0.5)))))
            return len([event async for event in stream if isinstance(event, TranscriptionEnded)])
        assert isinstance(engine, PoolingEngine)
        inputs = (EncoderInput((2, 4, 5, 3), (0, 0, 0, 0)),)
        return len((await engine.encode(PoolingRequest(name, engine.model.card.role, inputs))).rows[0])


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
    for stands in fleet.statuses():
        assert stands.state == "loaded" and stands.claimed > 0
        await fleet.unload(stands.name)
    assert active_memory() - before < 1000


@pytest.mark.anyio
async def test_what_is_claimed_covers_the_weights(tables: Tables, garage: ModelLoader) -> None:
    fleet = fleet_of(tables, garage)
    for stands in fleet.statuses():
        async with fleet.lease(stands.name) as engine:
            [now] = [each for each in fleet.statuses() if each.name == stands.name]
            assert now.claimed > engine.card.weight_bytes


@pytest.mark.anyio
async def test_an_encoder_is_measured_without_what_loads_decoders(
    tables: Tables, garage: ModelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []  # mlx-lm has no such classes, and imports transformers before it says so
    monkeypatch.setattr("ingot.models.memory_needs.memory_needs", lambda folder, device: asked.append(folder))
    entries = model_entries(Settings(models=tables, lazy=True), model_kind)
    assert min([await garage.measure(entry) for entry in entries if entry.kind != "chat"]) > 0
    assert asked == []


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


def alone(tables: Tables, **changes: object) -> tuple[ModelLoader, tuple[ModelEntry, ...]]:
    talk, vectors, ears = (str(tables[name]["path"]) for name in ("talk", "vectors", "ears"))
    models = {"model": talk, "embedding_model": vectors, "audio_model": ears}
    settings = Settings(**{"memory": "2GB", **models, **changes})  # type: ignore[arg-type]
    entries = single_model_entries(settings)
    return ModelLoader(settings, entries), entries


@pytest.mark.anyio
async def test_models_alongside_are_loaded_by_themselves_and_share_the_main_models_budget(tables: Tables) -> None:
    garage, entries = alone(tables, lazy=True)
    try:
        fleet = Fleet(entries, garage, garage.memory)
        assert await use(fleet, "vectors") == 16
        assert [one.state for one in fleet.statuses()] == ["unloaded", "loaded", "unloaded"]
        assert await use(fleet, "talk") > 0 and await use(fleet, "ears") == 1
        assert [one.state for one in fleet.statuses()] == ["loaded"] * 3, "there is room for all of them"
        assert garage.loop._workloads[0].name == "generation", "others get what it leaves of the latency target"
        assert sum(one.claimed for one in fleet.statuses()) == garage.memory
        for engine in fleet.engines:
            if isinstance(engine, Engine):
                assert engine.card.memory_budget == fleet.statuses()[0].claimed
    finally:
        garage.close()


def test_models_that_stay_are_loaded_before_the_server(tables: Tables) -> None:
    garage, _ = alone(tables)
    try:
        models = garage.load_resident(no_progress)
        assert [(entry.name, entry.kind) for entry, _ in models] == [
            ("talk", "chat"),
            ("vectors", "embedding"),
            ("ears", "audio"),
        ]
        fleet = Fleet.of_resident(models)
        assert fleet.is_resident and {one.state for one in fleet.statuses()} == {"loaded"}
    finally:
        garage.close()


def test_a_budget_that_models_alongside_use_up_is_refused_in_words(tables: Tables) -> None:
    garage, _ = alone(tables, memory="100MB")
    try:
        with pytest.raises(ModelError, match=r"models alongside take \d+ MB, and the memory budget is 100 MB"):
            garage.load_resident(no_progress)
    finally:
        garage.close()


def test_what_a_model_takes_is_known_before_it_is_loaded(garage: ModelLoader) -> None:
    vision = Path(__file__).parents[2] / "foundry/models/vision"
    fleet = fleet_of({"eyes": {"path": str(vision)}, "words": {"path": str(vision), "text_only": True}}, garage)
    eyes, words = (status.stated for status in fleet.statuses())
    assert eyes is not None and words is not None
    assert (eyes.context, eyes.media, words.media) == (1024, ("image", "video"), ())
    assert [body.input_modalities for body in list_models((one, None) for one in fleet.statuses()).data] == [
        ["text", "image", "video"],
        ["text"],
    ]
