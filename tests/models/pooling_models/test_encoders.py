"""Encoders of random weights: what must hold whatever the weights are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench import random_models
from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.models.pooling_models import bert
from ingot.models.pooling_models import encoder as attention
from ingot.models.pooling_models.encoder import PoolingEncoder
from ingot.models.pooling_models.loading import load_embedder, load_reranker
from ingot.models.pooling_models.sentence_transformers import NormalizeStep, PoolingRecipe
from ingot.upstream import load_model
from tests.encoders import write_encoder
from tests.memory import freed_at_once, settled
from tests.models.pooling_models.running import finished

FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert", "mpnet")
LOCAL = {"local_attention": 8}
MEAN = PoolingRecipe(("mean",), (NormalizeStep(),))
ROWS = [[2, *range(4, 4 + length), 3] for length in (20, 3, 11, 1)]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("head", [False, True], ids=["vectors", "scores"])
def test_a_text_gives_the_same_alone_and_in_a_padded_batch(family: str, head: bool, tmp_path: Path) -> None:
    write_encoder(tmp_path, family, head=head, **LOCAL)
    encoder = load_reranker(tmp_path, current_device()) if head else load_embedder(tmp_path, current_device(), MEAN)
    together = finished(encoder, ROWS)
    assert together.shape == (len(ROWS), 1 if head else 16)
    for row, found in zip(ROWS, together, strict=True):
        assert finished(encoder, [row])[0] == pytest.approx(found, abs=1e-5)


def test_attention_in_small_tiles_is_attention(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_embedder(write_encoder(tmp_path, family, **LOCAL), current_device(), MEAN)
    whole = finished(encoder, ROWS)
    monkeypatch.setattr(attention, "TILE_BYTES", 4 * len(ROWS) * 2 * 22 * 3)
    assert finished(encoder, ROWS) == pytest.approx(whole, abs=1e-5)


def test_mpnets_buckets_are_single_tokens_nearby_and_ever_wider_far_away() -> None:
    found = bert.distance_buckets(200)
    before, after = found[199::-1], found[199:]
    assert list(before[:9]) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert list(after[1:9]) == [17, 18, 19, 20, 21, 22, 23, 24]
    assert all(before[distance] == bucket for distance, bucket in ((15, 9), (16, 10), (64, 14), (127, 15), (199, 15)))
    assert (after[1:] - before[1:] == 16).all()


@pytest.mark.parametrize("head", [False, True])
def test_mpnet_is_read_by_its_published_names(head: bool, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "mpnet", head=head)

    def load() -> PoolingEncoder:
        return load_reranker(folder, current_device()) if head else load_embedder(folder, current_device(), MEAN)

    before = finished(load(), ROWS)
    names = {
        ".attention.self.query.": ".attention.attn.q.",
        ".attention.self.key.": ".attention.attn.k.",
        ".attention.self.value.": ".attention.attn.v.",
        ".attention.output.dense.": ".attention.attn.o.",
        ".attention.output.LayerNorm.": ".attention.LayerNorm.",
    }
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    for ours, published in names.items():
        tensors = {name.replace(ours, published): tensor for name, tensor in tensors.items()}
    assert not any(".self." in name for name in tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    assert finished(load(), ROWS) == pytest.approx(before)


def test_mpnet_with_another_number_of_buckets_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "mpnet")
    config = json.loads((folder / "config.json").read_text()) | {"relative_attention_num_buckets": 64}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="64 buckets of distances; MPNet has 32"):
        load_embedder(folder, current_device(), MEAN)


def test_layers_that_see_what_is_near_do_not_see_what_is_far() -> None:
    x = mx.random.normal((1, 2, 20, 4))
    changed = mx.concatenate([x[:, :, :-1], x[:, :, -1:] + 5], axis=2)
    one, two = (np.array(attention.attend_bidirectional(q, q, q, seen=None, reach=4)) for q in (x, changed))
    assert np.abs(one[:, :, :15] - two[:, :, :15]).max() == 0
    assert np.abs(one[:, :, 15:] - two[:, :, 15:]).max() > 0.01


def test_a_checkpoint_with_a_training_head_and_a_prefix_gives_the_same_vectors(tmp_path: Path) -> None:
    plain = write_encoder(tmp_path / "plain", "bert")
    more = {"bert.pooler.dense.weight": mx.zeros((16, 16)), "cls.predictions.bias": mx.zeros((32,))}

    def as_trained(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
        return {f"bert.{name}": tensor for name, tensor in old.items()} | more

    headed = changed(write_encoder(tmp_path / "headed", "bert"), as_trained)
    expected = finished(load_embedder(plain, current_device(), MEAN), ROWS)
    assert finished(load_embedder(headed, current_device(), MEAN), ROWS) == pytest.approx(expected)


def changed(folder: Path, change: Any) -> Path:
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), change(dict(tensors)))
    return folder


def without(name: str) -> Any:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("embeddings.LayerNorm.bias"), r"missing: embeddings\.LayerNorm\.bias"),
        (lambda tensors: tensors | {"encoder.extra": mx.zeros(3)}, r"unknown: encoder\.extra"),
        (
            lambda tensors: tensors | {"embeddings.LayerNorm.bias": mx.zeros(17)},
            r"wrong shape: embeddings\.LayerNorm\.bias \(17,\) instead of \(16,\)",
        ),
    ],
    ids=["missing", "unknown", "wrong shape"],
)
def test_tensors_that_do_not_fit_are_named(change: Any, words: str, tmp_path: Path) -> None:
    folder = changed(write_encoder(tmp_path, "bert"), change)
    with pytest.raises(ModelError, match=words):
        load_embedder(folder, current_device(), MEAN)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "mystery"}, "mystery"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"quantization": {"bits": 4}}, "quantised"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"architectures": ["BertForSequenceClassification"]}, "--rerank-model"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        load_embedder(folder, current_device(), MEAN)


@pytest.mark.parametrize("family", ["deberta-v2", "albert", None])
def test_a_family_that_is_not_known_is_refused_with_those_that_are(family: str | None, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": family}))
    for load in (
        lambda: load_embedder(folder, current_device(), MEAN),
        lambda: load_reranker(folder, current_device()),
    ):
        with pytest.raises(ModelError, match=r"Supported are bert, roberta"):
            load()


def test_a_reranker_needs_a_head_and_a_single_label(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no head that scores"):
        load_reranker(write_encoder(tmp_path / "a", "bert"), current_device())
    folder = write_encoder(tmp_path / "b", "bert", head=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "no", "1": "yes"}}))
    with pytest.raises(ModelError, match="2 classes"):
        load_reranker(folder, current_device())


def test_the_longest_input_is_what_positions_and_files_allow(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "x", "xlm-roberta", pad_token_id=1)
    assert load_embedder(folder, current_device(), MEAN).traits.length == 62
    folder = write_encoder(tmp_path / "b", "bert")
    assert load_embedder(folder, current_device(), PoolingRecipe(("mean",), (), length=10)).traits.length == 10
    traits = load_embedder(folder, current_device(), PoolingRecipe(("mean",), (), length=512)).traits
    assert traits.length == 64 and "positions for 64" in traits.notes[-1]


@freed_at_once
def test_what_a_batch_was_predicted_to_take_covers_what_it_took(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", hidden_size=64, intermediate_size=256, max_position_embeddings=512)
    encoder = load_embedder(folder, current_device(), MEAN)
    rows = [[5] * 300] * 12
    finished(encoder, rows)
    before = settled()
    finished(encoder, rows)
    assert mx.get_peak_memory() - before <= encoder.batch_bytes(12 * 300, 300)


# Decoders

QWEN = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}


def write_decoder(folder: Path, *, tied: bool, drop: str = "", **changes: Any) -> Path:
    from mlx.utils import tree_flatten

    config = {**QWEN, "tie_word_embeddings": tied}
    model = random_models.build(config, spread=0.2)
    weights = {name.removeprefix(drop): x for name, x in dict(tree_flatten(model.parameters())).items()}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


LAST = PoolingRecipe(("lasttoken",), (NormalizeStep(),))
LONG = [[7] * 1300, [7] * 600 + [9], [4, 5, 6]]


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoders_vector_is_the_last_state_whatever_it_is_batched_with(tied: bool, tmp_path: Path) -> None:
    encoder = load_embedder(write_decoder(tmp_path, tied=tied), current_device(), LAST)
    together = finished(encoder, LONG)
    assert together.shape == (3, 32) and np.linalg.norm(together, axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
    for row, vector in zip(LONG, together, strict=True):
        assert finished(encoder, [row])[0] == pytest.approx(vector, abs=1e-4)


def test_a_decoder_saved_without_its_head_gives_the_same_vectors(tmp_path: Path) -> None:
    whole = load_embedder(write_decoder(tmp_path / "whole", tied=True), current_device(), LAST)
    bare = write_decoder(tmp_path / "bare", tied=True, drop="model.", **{"tie_word_embeddings": False})
    assert finished(load_embedder(bare, current_device(), LAST), LONG) == pytest.approx(finished(whole, LONG), abs=1e-5)


def test_a_judging_decoder_weighs_yes_against_no(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path, tied=True)
    encoder = load_reranker(folder, current_device(), yes=40, no=50)
    model, _ = load_model(folder)
    for row, score in zip(LONG, finished(encoder, LONG), strict=True):
        logits = model(mx.array([row]))[0, -1].astype(mx.float32)
        assert score[0] == pytest.approx((logits[40] - logits[50]).item(), abs=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"architectures": ["Qwen3ForSequenceClassification"]},
    ],
)
def test_a_decoder_that_is_none_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_embedder(write_decoder(tmp_path, tied=True, **changes), current_device(), LAST)


@freed_at_once
def test_a_decoders_batch_was_predicted_to_take_at_least_what_it_took(tmp_path: Path) -> None:
    encoder = load_embedder(write_decoder(tmp_path, tied=True), current_device(), LAST)
    rows = [[7] * 1024] * 4
    finished(encoder, rows)
    before = settled()
    finished(encoder, rows)
    assert mx.get_peak_memory() - before <= encoder.batch_bytes(4096, 1024)
