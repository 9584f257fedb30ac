"""The Grafana dashboard asks for metrics that the server has, and shows those that people look for first."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ingot.protocol.ingot_api.metrics import generating_model_metrics, render_metrics
from tests.http.scripted import ScriptedEngine

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy/grafana/ingot.json").read_text())


def told() -> set[str]:
    engine = ScriptedEngine()
    engine.speculation.add(proposed=1, accepted=1)
    text = render_metrics(
        [generating_model_metrics(engine.card, engine.health(), engine.figures, engine.speculation)], {200: 1}
    )
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_every_panel_asks_for_what_the_server_tells() -> None:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"\b(?:vllm:|ingot_)\w+", expression)}
    assert names <= told()
    assert {"vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"} <= names


def test_panels_do_not_cover_each_other() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
