from typing import Any

import pytest

from ingot.models.files.model_config import FILE_TYPE, MOVED, moved_weights, weight_format


@pytest.mark.parametrize(
    ("config", "called"),
    [
        ({FILE_TYPE: "Q4_K_M", "quantization": {"bits": 4, "group_size": 32, "mode": "affine"}}, "Q4_K_M"),
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
    told = {MOVED: {"IQ4_XS": {"bits": 6, "percent": 1.5}}}
    (note,) = moved_weights(told)
    assert note.startswith("IQ4_XS weights are held in 6 bits, which moves them by 1.5 % at most")
    assert all(not moved_weights({MOVED: given}) for given in (None, 7, [], {"x": 1}, {"x": {"bits": 1}}))
