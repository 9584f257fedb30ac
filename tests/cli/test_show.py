"""`ingot show MODEL`, and `ingot models --recommend`."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Kind

from ingot.cli import models
from ingot.cli.show import count_parameters
from ingot.config import Settings
from ingot.models.files.short_names import find_named_model
from ingot.text.input_files import read_json_object
from tests.cli.conftest import Done
from tests.models.gguf.making import tiny_model

FOUNDRY = Path(__file__).parents[2] / "foundry" / "models"


def test_a_folder_is_shown_with_what_its_files_tell(run_here: Callable[..., Done]) -> None:
    shown = json.loads(run_here("show", FOUNDRY / "hybrid", "--json").stdout)
    assert (shown["kind"], shown["family"], shown["context"]) == ("chat", "qwen3_5", 4352)
    assert shown["chat_template"] == ["system messages", "tools", "tool results"]
    assert (shown["tool_format"], shown["thinks"], shown["takes"]) == ("qwen3-coder", "yes", ["text"])
    assert shown["memory"].keys() == {"weights", "a token", "whole context"}


def test_sampling_defaults_that_are_ours_are_shown_as_such(run_here: Callable[..., Done], tmp_path: Path) -> None:
    for file in (FOUNDRY / "dense").iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    shown = json.loads(run_here("show", tmp_path, "--json").stdout)
    assert shown["sampling"] == {"temperature": 0.7, "top_p": 0.95}
    assert "makers state none" in shown["sampling_from"]
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    shown = json.loads(run_here("show", tmp_path, "--json").stdout)
    assert shown["sampling"] == {"temperature": 0.5} and "sampling_from" not in shown


def test_quantised_weights_count_as_many_parameters_as_they_had(tmp_path: Path) -> None:
    import mlx.core as mx

    weight, scales, biases = mx.quantize(mx.zeros((64, 128)), group_size=32, bits=4)
    tensors = {"a.weight": weight, "a.scales": scales, "a.biases": biases, "norm.weight": mx.zeros(128)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    assert count_parameters(tmp_path, {"quantization": {"bits": 4, "group_size": 32}}) == 64 * 128 + 128


def test_plain_weights_count_as_they_are() -> None:
    folder = FOUNDRY / "dense"
    counted = count_parameters(folder, read_json_object(folder / "config.json"))
    assert counted is not None and counted > 10**6


def test_a_gguf_file_is_shown_without_importing_it(tmp_path: Path, run_here: Callable[..., Done]) -> None:
    shown = json.loads(
        run_here("show", tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "tiny.gguf"), "--json").stdout
    )
    assert shown["kind"] == "chat" and shown["weights"] and shown["memory"]
    assert not (tmp_path / ".cache/ingot/models").exists()


def test_what_is_not_here_is_shown_by_what_is_known_of_it(run_here: Callable[..., Done]) -> None:
    text = run_here("show", "qwen3.5-9b").stdout
    assert "mlx-community/Qwen3.5-9B-4bit" in text and "`ingot pull qwen3.5-9b` fetches it" in text
    assert "`ingot pull whisper-tiny.en` fetches it" in run_here("show", "whisper-tiny.en").stdout


def test_an_unknown_model_is_not_looked_for_on_the_hub(run_here: Callable[..., Done]) -> None:
    done = run_here("show", "no-such-model")
    assert done.returncode == 1 and "there is no model 'no-such-model'" in done.stderr
    done = run_here("show", "org/nobody")
    assert done.returncode == 1 and "not in the hub's cache" in done.stderr


@pytest.mark.parametrize("memory", ["3GB", "6GB", "9000GB"])
def test_models_are_recommended_that_fit_the_memory_budget(memory: str, run_here: Callable[..., Done]) -> None:
    """Also more than this machine has: somebody may ask for another."""
    found = json.loads(run_here("models", "--json", "--memory", memory).stdout)
    assert found["memory_budget"] == int(memory.removesuffix("GB")) * 10**9
    assert {"chat", "embedding", "audio", "speech"} <= {model["task"] for model in found["models"]}
    for model in found["models"]:
        assert model["weight_bytes"] < found["memory_budget"] and find_named_model(model["name"]) is not None
        assert model["command"].endswith(f" {model['name']}")


@pytest.mark.parametrize(("reached", "offline"), [(True, False), (False, False), (True, True)])
def test_models_are_offered_where_the_hub_can_be_reached(
    reached: bool, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "hub_answers", lambda: reached)
    offer = models.offer_models(Settings(offline=offline), 12 * 10**9, "metal")
    assert (offer is not None) is (reached and not offline)
    if offer is not None:
        assert offer.startswith("tip: smollm2-135m is small") and "`ingot serve qwen3.5-9b` (6.0 GB to fetch)" in offer


def test_the_hub_answers_where_its_port_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert models.hub_answers()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not models.hub_answers()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not models.hub_answers()


def test_without_the_extra_models_that_see_are_recommended_for_text_alone(
    run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    text = run_here("models", "--recommend", "--memory", "6GB").stdout
    assert "images (after `" in text and "extras add vision`)" in text and "speech to text\n" in text
    chat, _, rest = text.partition("images (after")
    assert "ingot serve qwen3-4b " in chat and "ingot serve qwen3.5-2b  " in rest
    monkeypatch.setattr(models, "hub_answers", lambda: True)
    offer = models.offer_models(Settings(), 12 * 10**9, "metal")
    assert offer is not None and "`ingot serve qwen3.5-9b --text-only`" in offer


def test_a_task_without_a_model_that_fits_says_so(run_here: Callable[..., Done]) -> None:
    text = run_here("models", "--recommend", "--memory", "2GB").stdout
    assert "code: nothing that is known by a short name fits" in text and "ingot serve lfm2.5-1.2b" in text
