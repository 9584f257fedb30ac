"""What a model's records look like: all of its layers, and those of a head beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from foundry import mtp_acceptance
from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import Part
from ingot.cache.packing import described, fitted, loosened, packed, unpacked
from ingot.cache.records import take
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import CacheReport, Ended, Request, Sampling, Stop
from ingot.kernels.device import Device, current
from ingot.models.adapter import Adapter, load
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import load_head
from ingot.models.form import form_of
from tests import engines
from tests.engines import GPU

HYBRID = Path(mtp_acceptance.__file__).parent / "models" / "hybrid"


def with_head(device: Device) -> Adapter:
    adapter = load(HYBRID, device)
    source = find_head(HYBRID, adapter.config)
    assert source is not None
    return replace(adapter, head=load_head(source, adapter))


@pytest.mark.parametrize("device", [None, GPU], ids=["cpu", "gpu"])
def test_a_heads_layers_have_storage_and_a_place_in_records(device: Device | None) -> None:
    adapter = with_head(device or current())
    rows = adapter.new_rows()
    form = form_of(adapter, rows)
    assert all(state.storage is not None for state in rows.states if isinstance(state, AppendState))
    assert rows.count == 0 and len(form.sample.deltas) == len(rows.states)
    row = rows.new()
    mx.eval(adapter.run(rows, mx.array([1, 2, 3], dtype=mx.uint32), [Part((row,), 3)], [2]), rows.pending())
    loose = loosened(rows, take(rows, row, 0))
    back = fitted(unpacked(described(loose, (1, 2, 3), landmark=False), packed(loose)), form)
    assert len(back.deltas) == len(rows.states)


def ask(engine: Engine, name: str, tokens: list[int]) -> tuple[str, CacheReport]:
    greedy, endless = Sampling(temperature=0.0), Stop(ignore_eos=True)
    events = engines.answer(engine, Request(name, (tuple(tokens),), max_tokens=12, sampling=greedy, stop=endless))
    assert isinstance(events[-1], Ended)
    return engines.text_of(events), events[-1].cache[0]


def test_a_model_that_guesses_with_a_head_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = Settings(
        cache_dir=tmp_path / "kept",
        archive_key_file=tmp_path / "key",
        cache_disk_free_gb=0.0,
        speculate="mtp",
        deterministic=True,
    )
    rng = random.Random(1)
    prompt = [rng.randrange(4000) for _ in range(300)]
    told = []
    for _ in range(2):
        engine = start_engine(settings, HYBRID, name="hybrid", source="the foundry")
        told.append(ask(engine, "a", prompt))
        engine.check()
        engine.close()
    assert told[0][0] == told[1][0]
    assert (told[0][1].tier, told[1][1].tier) == (None, "disk")
