from __future__ import annotations

from typing import Any

import pytest

from ingot.models.files.model_config import (
    FILE_TYPE_KEY,
    MOVED_KEY,
    moved_weight_notes,
    older_config_names,
    weight_format,
)

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}


def test_a_config_with_the_older_names_gets_nothing_added() -> None:
    assert older_config_names({"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": {"type": "linear"}}) == {}


def test_plain_rope_parameters_are_given_by_themselves() -> None:
    parameters = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}
    assert older_config_names({"rope_parameters": parameters}) == {"rope_theta": 7.0, "partial_rotary_factor": 0.5}


def test_what_scales_the_positions_is_given_under_both_spellings_of_its_kind() -> None:
    added = older_config_names({"rope_parameters": LLAMA3, "rope_scaling": None})
    assert added["rope_theta"] == 500000.0
    assert added["rope_scaling"] == {**LLAMA3, "type": "llama3"}


def test_parameters_of_each_kind_of_layer_are_told_apart() -> None:
    nested = {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "default", "rope_theta": 3.0}}
    added = older_config_names({"rope_parameters": nested, "_sliding_window_pattern": 6})
    assert added["rope_theta"] == 500000.0
    assert added["rope_local_base_freq"] == 3.0
    assert added["sliding_window_pattern"] == 6


def test_what_a_config_states_stands() -> None:
    assert older_config_names({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}, "num_local_experts": 8}) == {
        "num_experts": 8
    }


def test_the_part_for_text_is_read_the_same_way_and_keeps_all_it_has() -> None:
    config = {"text_config": {"hidden_size": 4, "rope_parameters": {"rope_theta": 2.0}}}
    assert older_config_names(config) == {"text_config": {**config["text_config"], "rope_theta": 2.0}}


def test_a_part_for_text_that_was_saved_alone_is_of_the_whole_model_s_family() -> None:
    assert older_config_names({"model_type": "qwen3_5_text"}) == {"model_type": "qwen3_5"}


@pytest.mark.parametrize(
    ("config", "called"),
    [
        ({FILE_TYPE_KEY: "Q4_K_M", "quantization": {"bits": 4, "group_size": 32, "mode": "affine"}}, "Q4_K_M"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}, "dtype": "bfloat16"}, "mxfp4"),
        ({"torch_dtype": "bfloat16"}, "BF16"),
        ({"dtype": "float16", "quantization": None}, "F16"),
        ({}, "F32"),
        ({"dtype": "float8"}, "float8"),
    ],
)
def test_weights_are_called_what_people_call_them(config: dict[str, Any], called: str) -> None:
    assert weight_format(config, "float32") == called


def test_weights_that_moved_are_told_and_nonsense_is_not() -> None:
    config = {MOVED_KEY: {"IQ4_XS": {"bits": 6, "percent": 1.5}}}
    (note,) = moved_weight_notes(config)
    assert note.startswith("IQ4_XS weights are held in 6 bits, which moves them by 1.5 % at most")
    assert all(not moved_weight_notes({MOVED_KEY: given}) for given in (None, 7, [], {"x": 1}, {"x": {"bits": 1}}))
