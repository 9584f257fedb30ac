"""Encoders that transformers saved, run by ingot, against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.kernels.device import current_device
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.models.pooling_models.encoder import PoolingEncoder
from ingot.models.pooling_models.loading import load_embedder, load_reranker
from ingot.models.pooling_models.sentence_transformers import NormalizeStep, PoolingRecipe, read_pooling_recipe

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

CLOSE = 2e-5
VOCAB = 96
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "num_labels": 1,
    "pad_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 160, "pad_token_id": 0},
    "bert, approximate gelu": {"max_position_embeddings": 160, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "roberta": {"max_position_embeddings": 162},
    "xlm-roberta": {"max_position_embeddings": 162, "type_vocab_size": 1},
    "mpnet": {"max_position_embeddings": 162, "bos_token_id": 0, "eos_token_id": 2},
    "modernbert": {"max_position_embeddings": 160, "local_attention": 16, "bos_token_id": 2, "eos_token_id": 3},
    "modernbert, mean": {
        "max_position_embeddings": 160,
        "local_attention": 12,
        "classifier_pooling": "mean",
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "classifier_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
}
LENGTHS = (150, 3, 61, 1)


def rows(seed: int = 1) -> list[list[int]]:
    torch.manual_seed(seed)
    return [torch.randint(5, VOCAB, (length,)).tolist() for length in LENGTHS]


def finished(encoder: PoolingEncoder, tokens: list[list[int]], types: list[list[int]] | None = None) -> np.ndarray:
    work = encoder.run(tokens, types or [[]] * len(tokens))
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return np.array(ended.value)


def configured(name: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(name.partition(",")[0], **{**SHARED, **MODELS[name]})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_vectors_of_a_padded_batch_are_those_of_transformers(name: str, pooling: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    torch.manual_seed(0)
    oracle = AutoModel.from_config(configured(name)).eval().float()
    oracle.save_pretrained(tmp_path)
    encoder = load_embedder(tmp_path, current_device(), PoolingRecipe((pooling,), ()))
    found = finished(encoder, rows())
    for row, vector in zip(rows(), found, strict=True):
        with torch.no_grad():
            states = oracle(torch.tensor([row])).last_hidden_state[0]
        numbers = torch.arange(1, len(row) + 1)[:, None]
        right = {
            "mean": states.mean(0),
            "cls": states[0],
            "lasttoken": states[-1],
            "max": states.max(0).values,
            "mean_sqrt_len_tokens": states.sum(0) / len(row) ** 0.5,
            "weightedmean": (states * numbers).sum(0) / numbers.sum(),
        }[pooling]
        assert np.abs(vector - right.numpy()).max() < CLOSE * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_pairs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    oracle = AutoModelForSequenceClassification.from_config(configured(name)).eval().float()
    oracle.save_pretrained(tmp_path)
    types = [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in rows()]
    segmented = name.startswith("bert")
    found = finished(load_reranker(tmp_path, current_device()), rows(), types if segmented else None)
    for row, kinds, score in zip(rows(), types, found, strict=True):
        given = {"token_type_ids": torch.tensor([kinds])} if segmented else {}
        with torch.no_grad():
            right = oracle(torch.tensor([row]), **given).logits[0]
        assert np.abs(score - right.numpy()).max() < 1e-4


@pytest.mark.parametrize("prefixed", [True, False], ids=["whole", "without its head"])
def test_vectors_of_a_decoder_are_the_last_hidden_states_of_transformers(prefixed: bool, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if prefixed else AutoModel
    described = {**SHARED, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": prefixed}
    torch.manual_seed(0)
    oracle = kind.from_config(AutoConfig.for_model("qwen3", **described)).eval().float()
    oracle.save_pretrained(tmp_path)
    trunk = oracle.model if prefixed else oracle
    encoder = load_embedder(tmp_path, current_device(), PoolingRecipe(("lasttoken",), (NormalizeStep(),)))
    long = [*rows(), *[row * 9 for row in rows()]]
    for row, vector in zip(long, finished(encoder, long), strict=True):
        with torch.no_grad():
            right = trunk(torch.tensor([row])).last_hidden_state[0, -1]
        assert np.abs(vector - (right / right.norm()).numpy()).max() < 1e-4


def test_scores_of_a_decoder_weigh_yes_against_no_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    described = {**SHARED, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **described)).eval().float()
    oracle.save_pretrained(tmp_path)
    long = [*rows(), *[row * 9 for row in rows()]]
    found = finished(load_reranker(tmp_path, current_device(), yes=40, no=50), long)
    for row, score in zip(long, found, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([row])).logits[0, -1]
        likely = torch.softmax(logits[[50, 40]], 0)[1].item()
        assert 1 / (1 + np.exp(-score[0])) == pytest.approx(likely, abs=1e-4)


def test_a_dense_layer_behind_the_pooling_is_computed(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModel

    torch.manual_seed(0)
    oracle = AutoModel.from_config(configured("bert")).eval().float()
    oracle.save_pretrained(tmp_path)
    modules = ["Transformer", "Pooling", "Dense", "Normalize"]
    listed = [
        {"path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(modules)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (tmp_path / "2_Dense").mkdir()
    dense = {"in_features": 64, "out_features": 8, "bias": True}
    act = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense | act))
    weight, bias = torch.randn(8, 64), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, str(tmp_path / "2_Dense" / "model.safetensors"))
    recipe = read_pooling_recipe(tmp_path, usual="mean")
    assert recipe.pooling == ("cls", "mean")
    found = finished(load_embedder(tmp_path, current_device(), recipe), rows())
    for row, vector in zip(rows(), found, strict=True):
        with torch.no_grad():
            states = oracle(torch.tensor([row])).last_hidden_state[0]
            right = torch.tanh(torch.cat([states[0], states.mean(0)]) @ weight.T + bias)
        assert np.abs(vector - (right / right.norm()).numpy()).max() < 1e-4


def test_the_packaged_model_makes_the_vectors_that_transformers_makes() -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = ensure_packaged_model("all-minilm-l6-v2", Settings(), no_progress)
    texts = ["A cat sleeps on the sofa.", "Quarterly earnings rose.", "Ein kurzer Satz auf Deutsch, mit Umlauten: äöü."]
    reader, oracle = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    tokens = [reader(text)["input_ids"] for text in texts]
    found = finished(load_embedder(folder, current_device(), read_pooling_recipe(folder, usual="mean")), tokens)
    for row, vector in zip(tokens, found, strict=True):
        with torch.no_grad():
            mean = oracle(torch.tensor([row])).last_hidden_state[0].mean(0)
        assert np.abs(vector - (mean / mean.norm()).numpy()).max() < 1e-6
