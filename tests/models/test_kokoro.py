"""A tiny Kokoro with random weights: what it is given, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ingot.errors import BadRequest, ModelError
from ingot.kernels.cpu import native
from ingot.media.audio import FloatArray
from ingot.models import kokoro as kokoro_module
from ingot.models import kokoro_acoustic as config_module
from ingot.models.kokoro import Kokoro, load_kokoro
from ingot.models.kokoro_acoustic import (
    BidirectionalLstm,
    DoublingConvolution,
    KokoroConvolution,
    UpsamplingConvolution,
)
from ingot.models.kokoro_vocoder import ShortTimeFourier, SnakeBlock
from ingot.models.layers.modules import named_parameters
from tests.memory import REAL_GPU, settled
from tests.speaking import CONFIG, VOICES, save_kokoro

PHONEMES = "həlˈO wˈɜɹld."
WIDE = {
    **CONFIG,
    **{"hidden_dim": 32, "style_dim": 32},
    "plbert": {**CONFIG["plbert"], "hidden_size": 32, "intermediate_size": 32},
    "istftnet": {**CONFIG["istftnet"], "upsample_initial_channel": 64},
}
PUBLISHED_NAMES = {
    "bert.embedding_projection.": "bert.encoder.embedding_hidden_mapping_in.",
    "bert.layer.": "bert.encoder.albert_layer_groups.0.albert_layers.0.",
    ".duration_proj.": ".duration_proj.linear_layer.",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kokoro(tmp_path_factory.mktemp("kokoro") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Kokoro:
    return load_kokoro(folder)


def finished(work):  # type: ignore[no-untyped-def]
    parts = 0
    while True:
        try:
            next(work)
            parts += 1
        except StopIteration as end:
            return end.value, parts


def spoken(model: Kokoro, phonemes: str = PHONEMES, voice: str = "af_heart", speed: float = 1.0) -> FloatArray:
    samples: FloatArray = finished(model.speak(phonemes, voice, speed))[0]
    return samples


def test_speech_is_whole_frames_and_the_same_each_time(model: Kokoro) -> None:
    samples = spoken(model)
    assert samples.dtype == np.float32 and len(samples) % model.config.frame == 0 and np.isfinite(samples).all()
    assert np.abs(samples).max() <= 1.0 and np.std(samples) > 0
    assert np.array_equal(spoken(model), samples)


def test_voices_and_speeds_are_heard(model: Kokoro) -> None:
    assert set(VOICES) < set(model.voices)
    assert not np.array_equal(spoken(model, voice="bf_emma")[:600], spoken(model)[:600])
    assert len(spoken(model, speed=4.0)) < len(spoken(model)) < len(spoken(model, speed=0.25))


def test_a_piece_is_done_in_parts_that_change_nothing(model: Kokoro, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, few = finished(model.speak(PHONEMES, "af_heart", 1.0))
    monkeypatch.setattr("ingot.models.kokoro_acoustic.KOKORO_PART_FLOPS", 1.0)
    parts, many = finished(model.speak(PHONEMES, "af_heart", 1.0))
    assert many > few > 10
    np.testing.assert_allclose(parts, whole, atol=1e-3 if REAL_GPU else 1e-4)  # which rounds products to TF32


def test_what_is_shorter_than_a_part_is_one_and_not_a_part_of_what_follows() -> None:
    _, steps = finished(BidirectionalLstm(4, 4).run(mx.ones((3, 4))))
    _, lengthened = finished(UpsamplingConvolution(4, 4, 4, 2).run(mx.ones((3, 4))))
    assert (steps, lengthened) == (1, 2), "an LSTM's few steps; a product, and the sum of what overlaps"


def test_convolutions_that_follow_one_another_are_not_done_at_once() -> None:
    block = SnakeBlock(4, 3, (1, 3, 5), 4)
    _, parts = finished(block.run(mx.ones((8, 4)), mx.ones((4,))))
    assert parts == 3 * (2 + 2 + 1), "of three pairs, each a norm and a product twice, and the sum"


def test_speech_that_would_be_too_long_is_refused(model: Kokoro, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kokoro_module, "MOST_FRAMES", 10)
    with pytest.raises(BadRequest, match="shorter sentences"):
        spoken(model)


def test_weights_as_mlx_audio_writes_them_speak_the_same(folder: Path, model: Kokoro, tmp_path: Path) -> None:
    other = save_kokoro(tmp_path / "other")
    file = other / "kokoro-v1_0.safetensors"
    directions = {"_l0_reverse": "_backward", "_l0": "_forward"}
    saved = {}
    for name, tensor in mx.load(str(file)).items():  # type: ignore[union-attr]
        for end, now in directions.items():
            if name.endswith(end):
                name = name.removesuffix(end) + now
                name = name.replace("weight_ih", "Wx").replace("weight_hh", "Wh")
        for ours, published in PUBLISHED_NAMES.items():
            name = name.replace(ours, published)
        saved[name] = tensor.swapaxes(1, 2) if name.endswith("weight_v") else tensor
    file.unlink()
    mx.save_safetensors(str(other / "model.safetensors"), saved)
    assert sum(any(each in name for each in PUBLISHED_NAMES.values()) for name in saved) > 10
    assert np.array_equal(spoken(load_kokoro(other)), spoken(model))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_few_bits_are_unpacked(tmp_path: Path, bits: int) -> None:
    quantized = {**WIDE, "quantization": {"group_size": 32, "bits": bits}}
    packed, plain = (save_kokoro(tmp_path / name, config) for name, config in (("packed", quantized), ("plain", WIDE)))
    saved, near = {}, {}
    for name, tensor in mx.load(str(plain / "kokoro-v1_0.safetensors")).items():  # type: ignore[union-attr]
        saved[name] = near[name] = tensor
        if tensor.ndim == 2 and name.endswith(".weight") and tensor.shape[1] % 32 == 0:
            saved[name], saved[f"{name[:-7]}.scales"], saved[f"{name[:-7]}.biases"] = mx.quantize(tensor, 32, bits)
            near[name] = mx.dequantize(*mx.quantize(tensor, 32, bits), 32, bits)
    assert len(saved) > len(near) + 10
    mx.save_safetensors(str(packed / "kokoro-v1_0.safetensors"), saved)
    mx.save_safetensors(str(plain / "kokoro-v1_0.safetensors"), near)
    ours, theirs = (dict(named_parameters(load_kokoro(folder)._model)) for folder in (packed, plain))
    assert ours.keys() == theirs.keys() and all(mx.array_equal(ours[name], theirs[name]) for name in ours)
    (packed / "config.json").write_text(json.dumps({**quantized, "quantization": {"group_size": 32, "bits": 7}}))
    with pytest.raises(ModelError, match="MLX does not support"):
        load_kokoro(packed)


def test_the_longest_piece_takes_the_memory_that_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_kokoro(save_kokoro(tmp_path / "wide", WIDE))
    before = settled()
    frames = len(spoken(model)) // model.config.frame
    used = mx.get_peak_memory() - before
    monkeypatch.setattr(config_module, "MOST_FRAMES", frames)
    assert 0.2 * model.config.piece_bytes < used <= model.config.piece_bytes


def test_a_folder_that_lacks_something_is_refused_by_name(tmp_path: Path) -> None:
    broken = save_kokoro(tmp_path / "broken")
    for voice in (broken / "voices").iterdir():
        voice.unlink()
    with pytest.raises(ModelError, match="no voices"):
        load_kokoro(broken)
    (broken / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="no Kokoro model"):
        load_kokoro(broken)


def test_samples_are_found_again_in_their_transforms() -> None:
    samples = mx.array(np.random.default_rng(1).normal(size=200).astype(np.float32))
    fourier = ShortTimeFourier(20, 5)
    magnitude, phase = mx.split(fourier.polar(samples), 2, axis=-1)
    np.testing.assert_allclose(np.array(fourier.samples(magnitude, phase)), np.array(samples), atol=1e-4)
    spectrum = np.fft.rfft(np.array(samples)[40:60] * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(20) / 20)))
    np.testing.assert_allclose(np.array(magnitude)[10], np.abs(spectrum), atol=1e-4)
    np.testing.assert_allclose(np.array(phase)[10], np.angle(spectrum), atol=1e-3)


def test_frames_that_no_samples_have_are_met_halfway() -> None:
    """As torch.istft does: by least squares. The model's ONNX export takes a short cut, which makes the lowest and the
    highest band half as loud again, and the others a quarter less loud."""
    fourier, draw = ShortTimeFourier(20, 5), np.random.default_rng(2)
    magnitude, phase = draw.uniform(0, 1, (30, 11)), draw.uniform(-3, 3, (30, 11))
    phase[:, [0, 10]] = 0.0
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(20) / 20)
    total, weights = np.zeros(29 * 5 + 20), np.zeros(29 * 5 + 20)
    for at, frame in enumerate(np.fft.irfft(magnitude * np.exp(1j * phase), axis=-1)):
        total[5 * at : 5 * at + 20] += window * frame
        weights[5 * at : 5 * at + 20] += window**2
    found = fourier.samples(mx.array(magnitude.astype(np.float32)), mx.array(phase.astype(np.float32)))
    np.testing.assert_allclose(np.array(found), (total / np.maximum(weights, 1e-9))[10:-10], atol=1e-5)


@pytest.fixture(params=["native", "mlx"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "mlx":
        monkeypatch.setattr(native, "can_convolve", lambda: False)
    elif not native.can_convolve():
        pytest.skip(f"{native.advice() or 'an older build'}")


def test_native_kernels_speak_the_same(model: Kokoro, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.can_convolve():
        pytest.skip(f"{native.advice() or 'an older build'}")
    ours = spoken(model)
    monkeypatch.setattr(native, "can_convolve", lambda: False)
    np.testing.assert_allclose(ours, spoken(model), atol=1e-3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (1, 3), (2, 1)])
def test_convolutions_are_those_of_mlx(stride: int, dilation: int) -> None:
    layer = KokoroConvolution(3, 4, 5, stride=stride, dilation=dilation)
    x, weight = mx.random.normal((21, 3), key=mx.random.key(1)), mx.random.normal((4, 3, 5), key=mx.random.key(2))
    layer.weight = layer.from_checkpoint(weight)
    wanted = mx.conv1d(x[None], weight.transpose(0, 2, 1), stride, 2 * dilation, dilation)[0]
    np.testing.assert_allclose(np.array(finished(layer.run(x))[0]), np.array(wanted), atol=1e-4)


def test_lengthening_is_a_transposed_convolution() -> None:
    x, weight = mx.random.normal((9, 3), key=mx.random.key(1)), mx.random.normal((3, 4, 12), key=mx.random.key(2))
    layer = UpsamplingConvolution(3, 4, 12, 6)
    layer.weight = layer.from_checkpoint(weight)
    wanted = mx.conv_transpose1d(x[None], weight.transpose(1, 2, 0), 6, 3)[0]
    np.testing.assert_allclose(np.array(finished(layer.run(x))[0]), np.array(wanted), atol=1e-4)
    single, doubling = mx.random.normal((3, 1, 3), key=mx.random.key(3)), DoublingConvolution(3)
    doubling.weight = doubling.from_checkpoint(single)
    each = [
        mx.conv_transpose1d(x[None, :, at : at + 1], single[at : at + 1].transpose(1, 2, 0), 2, 1, output_padding=1)
        for at in range(3)
    ]
    np.testing.assert_allclose(np.array(doubling(x)), np.array(mx.concatenate(each, axis=-1)[0]), atol=1e-4)


def test_an_lstm_reads_in_both_directions() -> None:
    layer, x = BidirectionalLstm(3, 4), mx.random.normal((70, 3), key=mx.random.key(1))
    for at, name in enumerate(layer):
        layer[name] = mx.random.normal(layer[name].shape, key=mx.random.key(at)) * 0.5
    found = np.array(finished(layer.run(x))[0])

    def plain(way: str, rows: FloatArray) -> FloatArray:
        inner, recurrent = np.array(layer[f"weight_ih_l0{way}"]), np.array(layer[f"weight_hh_l0{way}"])
        bias = np.array(layer[f"bias_ih_l0{way}"] + layer[f"bias_hh_l0{way}"])
        hidden = cell = np.zeros(2, np.float32)
        done = []
        for row in rows:
            enters, forgets, new, leaves = np.split(inner @ row + recurrent @ hidden + bias, 4)
            cell = cell / (1 + np.exp(-forgets)) + np.tanh(new) / (1 + np.exp(-enters))
            hidden = np.tanh(cell) / (1 + np.exp(-leaves))
            done.append(hidden)
        return np.array(done)

    rows = np.array(x)
    np.testing.assert_allclose(found, np.hstack([plain("", rows), plain("_reverse", rows[::-1])[::-1]]), atol=1e-4)
