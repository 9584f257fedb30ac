"""A fleet over real engines of tiny models: their memory comes and goes, and answers go on beside a load."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench.random_models import write_tokenizer
from ingot.config import Settings, model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader, showing_progress
from ingot.engine.request import Ended, Request, Stop
from ingot.errors import Unavailable
from ingot.kernels.device import active_memory
from tests import tiny
from tests.memory import settled

KINDS = ("llama", "hybrid")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        weights = dict(tree_flatten(tiny.build(kind).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        (folder / "config.json").write_text(json.dumps(tiny.CONFIGS[kind]))
        write_tokenizer(folder, tiny.VOCAB)
    return {kind: {"path": str(folder)} for kind, folder in folders.items()}


@pytest.fixture
def garage() -> Iterator[ModelLoader]:
    made = ModelLoader(Settings())
    yield made
    made.close()


def fleet_of(tables: dict[str, dict[str, str]], garage: ModelLoader, memory: int | None = None) -> Fleet:
    return Fleet(model_entries(Settings(models=tables, lazy=True)), garage, memory or garage.memory)


async def answer(fleet: Fleet, name: str, tokens: int = 4, prompt: tuple[int, ...] = (3, 4, 5)) -> int:
    """How many tokens came."""
    asked = Request(id=f"{name}-{tokens}", prompts=(prompt,), max_tokens=tokens, stop=Stop(ignore_eos=True))
    async with fleet.lease(name) as engine:
        batches = [batch async for batch in await engine.open(asked)]
        last = batches[-1][-1]
        assert isinstance(last, Ended)
        return last.usage.completion_tokens


@pytest.mark.anyio
async def test_models_by_turns_leave_nothing_behind_and_the_c_library_is_asked_for_what_it_keeps(
    tables: dict[str, dict[str, str]], garage: ModelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(
        "ingot.engine.loading.fleet_models.find_malloc_trim", lambda: lambda: held.append(active_memory())
    )
    fleet = fleet_of(tables, garage)
    before = settled()
    for kind in (*KINDS, *KINDS):
        held.clear()
        await answer(fleet, kind)
        assert len(held) == 1, "what loading left goes as well"
        await fleet.unload(kind)
        assert active_memory() - before < 1000
        assert len(held) == 2 and held[1] - before < 1000, "once everything is free"


@pytest.mark.anyio
async def test_a_model_is_loaded_beside_an_answer_of_another(
    tables: dict[str, dict[str, str]], garage: ModelLoader
) -> None:
    fleet = fleet_of(tables, garage)
    await answer(fleet, "llama")
    assert await asyncio.gather(answer(fleet, "llama", tokens=200), answer(fleet, "hybrid")) == [200, 4]
    assert {stands.state for stands in fleet.statuses()} == {"loaded"}


@pytest.mark.anyio
async def test_two_models_with_room_for_one_answer_by_turns(
    tables: dict[str, dict[str, str]], garage: ModelLoader
) -> None:
    claims = [await garage.measure(entry) for entry in model_entries(Settings(models=tables))]
    fleet = fleet_of(tables, garage, memory=max(claims))
    await asyncio.gather(*(answer(fleet, kind, tokens) for kind in KINDS for tokens in (4, 5, 6)))
    assert sorted(stands.state for stands in fleet.statuses()) == ["loaded", "unloaded"]


@pytest.mark.anyio
async def test_files_that_are_not_there_fail_their_requests_in_words(garage: ModelLoader, tmp_path: Path) -> None:
    fleet = fleet_of({"gone": {"path": str(tmp_path / "gone")}}, garage)
    with pytest.raises(Unavailable, match="gone could not be loaded: there is no file or folder"):
        await answer(fleet, "gone")


@pytest.mark.anyio
async def test_a_models_events_are_told_at_its_own_endpoint_each_time_that_it_is_loaded(
    tables: dict[str, dict[str, str]], garage: ModelLoader, tmp_path: Path
) -> None:
    zmq = pytest.importorskip("zmq")
    endpoint = f"ipc://{tmp_path / 'events'}"
    own = {"kv_events": endpoint, "kv_events_topic": "kv@here@llama"}
    fleet = fleet_of({**tables, "llama": {**tables["llama"], **own}}, garage)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe("")
        subscriber.connect(endpoint)
        for number in range(3, tiny.VOCAB):  # what is told before somebody listens is told to nobody
            await answer(fleet, "llama", prompt=(number,) * 130)
            if subscriber.poll(100):
                break
        topic, *_ = subscriber.recv_multipart(zmq.NOBLOCK)
    assert topic == b"kv@here@llama"
    await fleet.unload("llama")
    assert await answer(fleet, "llama") == 4, "the endpoint was not free again"


def test_without_a_terminal_progress_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ingot.fleet"), showing_progress() as progress:
        progress("fetching org/name", 1_000_000, 3_000_000)
        progress("fetching org/name", 2_000_000, 3_000_000)
        progress("unloading other")
    assert caplog.messages == ["fetching org/name: 1.0 MB of 3.0 MB (33 %)", "unloading other"]


def test_products_are_not_rounded_to_tf32_where_answers_must_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    ModelLoader(Settings(deterministic=True)).close()
    assert os.environ["MLX_ENABLE_TF32"] == "0"
