"""Models that only mlx-vlm has, and those that no library has."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.models import vlm_language
from ingot.models.adapter import load_model_adapter
from ingot.models.vlm_language import language_classes_of
from tests.models.layers import family_configs


def test_the_language_part_is_loaded_without_the_weights_of_other_parts(tmp_path: Path) -> None:
    stored = dict(tree_flatten(family_configs.build("step3p7").parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored | {"vision_model.anything": mx.zeros(4)})
    (tmp_path / "config.json").write_text(json.dumps(family_configs.config("step3p7")))
    adapter = load_model_adapter(tmp_path, current_device())
    assert adapter.mixed and adapter.family == "step3p7" and not adapter.notes


def test_a_type_that_no_library_has_is_refused_with_what_to_try() -> None:
    with pytest.raises(ModelError) as refused:
        language_classes_of({"model_type": "qwen9", "transformers_version": "5.9.0"})
    assert "type qwen9 are not known to mlx-lm" in refused.value.message and "mlx-vlm" in refused.value.message
    assert "transformers 5.9.0" in refused.value.message and "qwen3_5" in refused.value.message


def test_without_the_extra_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm_language, "missing_packages", lambda extra: ["mlx-vlm>=0.7.10"])
    with pytest.raises(ModelError, match=r"mlx-vlm may have it: run .*install.*mlx-vlm"):
        language_classes_of({"model_type": "step3p7"})
