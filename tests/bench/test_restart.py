from __future__ import annotations

import json
from pathlib import Path

from bench.restart import HYBRID, longer, streamed
from tests import engines


def test_a_conversation_may_be_longer_than_a_model_was_made_for(tmp_path: Path) -> None:
    made = longer(HYBRID, tmp_path, 16_000)
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (made, HYBRID))
    assert config["text_config"].pop("max_position_embeddings") > 16_000
    assert before["text_config"].pop("max_position_embeddings") < 16_000
    assert config == before
    assert (made / "model.safetensors").samefile(HYBRID / "model.safetensors")
    assert longer(HYBRID, tmp_path, 1000) == HYBRID


def test_a_stream_is_timed_to_its_end_while_prompts_are_computed_beside_it() -> None:
    engine = engines.start("llama")
    prompts = [[token % 90 for token in range(first, first + 40)] for first in (0, 7)]
    rate, longest = streamed(engine, "one", prompts)
    engine.close()
    assert rate > 0 and 0 < longest < 400 / rate
