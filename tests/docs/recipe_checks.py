"""What the recipes of CONTRIBUTING.md add, used. Runs in a process whose package has followed them."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def check_tool_format() -> None:
    from ingot.text.parser.events import PastCall
    from ingot.text.tool_formats.registry import find_format
    from ingot.text.tool_formats.rendering import render_calls
    from tests.text.parser.answers import cut, parsed, summary

    format = find_format("{{ tools }} <|call|>", "unheard_of").format
    assert format.name == "novel"
    text = '<|call|>{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}<|end_call|>'
    for split in range(len(text)):
        assert summary(parsed(format, cut(text, [split]))) == [("calls", "get_weather", {"city": "Bern", "days": 2})]
    assert render_calls(format, [PastCall("get_weather", {"city": "Bern", "days": 2})]) == text


def check_codec() -> None:
    import mlx.core as mx

    from ingot.cache.codecs.names import CodecName
    from ingot.cache.codecs.pair import RecordCodec
    from ingot.config import Settings

    codec = RecordCodec(CodecName.parse(Settings(cache_codec="half").cache_codec))
    keys = mx.random.normal((1, 2, 8, 64))
    decoded = codec.decode(codec.encode(keys, -keys), mx.float32)
    for before, after in zip((keys, -keys), decoded, strict=True):
        assert float(mx.abs(before - after).max()) < 0.01


def check_proposer() -> None:
    from ingot.config import Settings
    from ingot.engine.loading.draft_models import choose_proposers
    from ingot.engine.request import Request, Sampling, Stop
    from ingot.engine.speculation.options import SpeculationOptions
    from tests import engines

    options = SpeculationOptions.parse(Settings(speculate="repeat").speculate)
    without_head: Any = SimpleNamespace(head=None)
    chosen = choose_proposers(options, Path("/nowhere"), without_head, {}, dtype=None)
    assert chosen.names == ("repeat",)
    engine = engines.start("llama", proposers=chosen.begin(None), fixed_draft_tokens=1)
    greedy: dict[str, Any] = {"max_tokens": 8, "sampling": Sampling(temperature=0.0), "stop": Stop(ignore_eos=True)}
    plain = engines.text_of(engines.answer(engine, Request("plain", ((1, 2, 3),), speculate=(), **greedy)))
    assert engine.speculation.drafts == 0
    assert engines.text_of(engines.answer(engine, Request("drafted", ((1, 2, 3),), **greedy))) == plain
    assert engine.speculation.drafts > 0
    engine.close()


def check_metric() -> None:
    from ingot.protocol.ingot_api.metrics import generating_model_metrics, render_metrics
    from tests.http.scripted import ScriptedEngine

    engine = ScriptedEngine()
    assert getattr(engine.figures, "empty_answers") == 0  # noqa: B009  (it is not there outside of the copy)
    model = generating_model_metrics(engine.card, engine.health(), engine.figures, engine.speculation)
    lines = render_metrics([model], {}).splitlines()
    assert [line[-2:] for line in lines if line.startswith("ingot_empty_answers_total{")] == [" 0"]


def check_setting() -> None:
    from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments

    parser = CommandParser("serve", "")
    add_settings(parser)

    def greeting(*arguments: str) -> Any:
        return getattr(settings_from_arguments(parser.parse(arguments)).settings, "greeting")  # noqa: B009

    assert greeting() == "hello"
    os.environ["INGOT_GREETING"] = "salut"
    assert greeting() == "salut"
    assert greeting("--greeting", "hola") == "hola"


CHECKS = {
    "tool_format": check_tool_format,
    "codec": check_codec,
    "proposer": check_proposer,
    "metric": check_metric,
    "setting": check_setting,
}


def failure(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({name: failure(check) for name, check in CHECKS.items()}))
