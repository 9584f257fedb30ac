"""The table of short names: its form, and which of its models a machine has room for."""

from __future__ import annotations

import importlib.util
import re

import pytest

from ingot.config import KINDS
from ingot.models.files.hub import is_hub_id
from ingot.models.files.packaged import find_packaged_model
from ingot.models.files.short_names import (
    NAMED_MODELS,
    TASKS,
    NamedModel,
    find_named_model,
    fitting_models,
    full_model_name,
)
from ingot.models.pooling_models.loading import ENCODER_FAMILIES

OWN_FAMILIES = {*ENCODER_FAMILIES, "whisper", "kokoro"}
GB = 10**9


@pytest.mark.parametrize("model", NAMED_MODELS, ids=lambda model: model.name)
def test_a_line_of_the_table_is_well_formed(model: NamedModel) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", model.name)
    assert find_packaged_model(model.name) is None
    assert is_hub_id(model.hub_id)
    assert model.tasks and set(model.tasks) <= set(TASKS) and model.kind in KINDS
    assert model.family in OWN_FAMILIES or importlib.util.find_spec(f"mlx_lm.models.{model.family}")
    bits = model.size * 8 / (model.parameters * 1e9)
    assert (4 <= bits <= 7) if model.kind == "chat" else (15 <= bits <= 36), f"{bits:.1f} bits a parameter"
    assert 0 < model.active <= model.parameters
    assert bool(model.kv_per_token) == (model.kind == "chat")


def test_no_two_models_share_a_name_or_an_id() -> None:
    assert len({model.name for model in NAMED_MODELS}) == len({model.hub_id for model in NAMED_MODELS})
    assert len({model.name for model in NAMED_MODELS}) == len(NAMED_MODELS)


def test_a_short_name_is_known_in_any_case_and_other_names_stay_as_they_are() -> None:
    assert full_model_name("GPT-OSS-20B") == "mlx-community/gpt-oss-20b-MXFP4-Q8"
    assert full_model_name("org/name") == "org/name" and find_named_model("org/name") is None


def test_every_task_has_a_model_that_fits_a_machine_of_ordinary_size() -> None:
    for task in TASKS:
        assert fitting_models(task, 12 * GB, "metal", aside=0.3, least_context=8192), task


@pytest.mark.parametrize("budget", [2 * GB, 6 * GB, 24 * GB, 100 * GB])
def test_what_is_recommended_fits_with_its_context(budget: int) -> None:
    for model, context in fitting_models("chat", budget, "metal", aside=0.25, least_context=8192):
        needed = model.weight_bytes("metal") + (model.kv_fixed + context * model.kv_per_token) / 0.75
        assert needed <= budget and 8192 <= context <= model.context


def test_more_memory_recommends_no_less() -> None:
    small, large = (fitting_models("chat", size * GB, "metal", aside=0.3, least_context=8192) for size in (8, 64))
    assert {model for model, _ in small} < {model for model, _ in large}


def test_on_a_cpu_no_token_takes_long_and_floats_of_4_bits_take_a_byte() -> None:
    oss = find_named_model("gpt-oss-20b")
    assert oss is not None and oss.weight_bytes("cpu") > 2 * oss.weight_bytes("metal")
    assert all(model.active <= 4 for model, _ in fitting_models("chat", 500 * GB, "cpu", aside=0.3, least_context=8192))
