"""The soak: what it takes for growth and for trouble, and a short one against a real server."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import pytest

from bench.soak.__main__ import GROWTH, allowed, main
from bench.soak.acts import ACTS
from bench.soak.further_acts import FURTHER, acts_with, hum
from bench.soak.tables import write_lora, write_tables
from bench.soak.trend import WARM, trend
from bench.soak.watch import complaints, figures
from ingot.config import load_config, memory_bytes, model_entries
from ingot.models.lora.weights import read_lora
from ingot.protocol.ingot_api.metrics import generating_model_metrics, render_metrics
from tests.http.scripted import ScriptedEngine

FOLDERS = Path(__file__).parents[2] / "foundry" / "models"


def test_what_fills_up_first_and_stays_is_no_growth() -> None:
    values = [100.0, 200.0, 300.0, 400.0, *[400.0, 404.0, 399.0] * 5]
    assert abs(trend([float(at) for at in range(len(values))], values).share) < 0.01


def test_what_grows_a_little_at_each_look_is_growth_whatever_peaks_there_are() -> None:
    values = [1000 + 3.0 * at + (5000 if at == 20 else 0) for at in range(60)]
    found = trend([float(at) for at in range(60)], values)
    assert found.growth == pytest.approx(3.0 * 59 * (1 - WARM), rel=0.02)


def test_lines_that_no_healthy_server_writes_are_found_in_its_log() -> None:
    log = "2026 INFO ingot: ready\n2026 ERROR ingot.engine: it failed\nTraceback (most recent call last):\n  x\n"
    assert complaints(log) == ["2026 ERROR ingot.engine: it failed", "Traceback (most recent call last):"]
    assert complaints("2026 WARNING ingot.http: settings were read again; changed: nothing\n") == []


def test_figures_are_found_by_the_names_that_the_soak_asks_for() -> None:
    engine = ScriptedEngine()
    told = figures(
        render_metrics(
            [generating_model_metrics(engine.card, engine.health(), engine.figures, engine.speculation)], {200: 1}
        )
    )
    assert told["vllm:kv_cache_usage_perc"] == [0.25]
    assert {'ingot_memory_bytes{part="active"}', 'ingot_memory_bytes{part="states_held"}'} <= told.keys()
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting"} <= told.keys()


def test_a_short_soak_may_grow_by_more_than_one_of_half_an_hour() -> None:
    assert allowed(60) == allowed(30) == GROWTH
    assert allowed(3) == pytest.approx(10 * GROWTH)


def test_only_models_that_are_there_are_asked() -> None:
    assert {act.__name__ for act in acts_with(["stays", "rerank"])} - {act.__name__ for act in ACTS} == {
        *("adapted", "reranked")
    }
    assert len(acts_with(["stays", "hybrid", "rerank", "vectors", "ears"])) == len(ACTS) + len(FURTHER)


def test_tables_of_a_soak_are_settings_of_a_server_and_two_of_their_models_exclude_each_other(tmp_path: Path) -> None:
    file = write_tables(FOLDERS / "dense", tmp_path)
    settings = load_config({}, {}, file).settings
    entries = {entry.name: memory_bytes(entry.settings.memory or "0", 1 << 40) for entry in model_entries(settings)}
    room = memory_bytes(settings.memory or "0", 1 << 40)
    assert room < sum(entries.values()) <= room + entries["window"]


def test_the_adapter_of_a_soak_is_one_for_its_model(tmp_path: Path) -> None:
    weights = read_lora(write_lora(FOLDERS / "dense", tmp_path / "tuned"))
    assert weights.rank == 8 and all(path.endswith(("q_proj", "v_proj")) for path in weights.pairs)


def test_a_hum_is_as_long_as_it_should_be() -> None:
    with wave.open(io.BytesIO(hum(0.5))) as sound:
        assert sound.getnframes() == sound.getframerate() // 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "hybrid", "window"])
def test_a_server_that_was_kept_busy_fails_at_nothing_and_holds_nothing_at_the_end(model: str) -> None:
    assert main(["--minutes", "4", "--model", str(FOLDERS / model)]) == 0
