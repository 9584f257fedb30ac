"""A tiny Kokoro with random weights, and a mouth that makes the sounds a test tells it to."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from ingot.engine.speech_request import TextToSpeechCard
from ingot.engine.text_to_speech import ServedTextToSpeech
from ingot.media.audio import FloatArray
from ingot.text.speech.phonemizer import Phonemizer

SIGNS = ';:,.!?—…"()“” AIOQWYbdfhijklmnpstuvwzæðŋɐɑɒɔəɛɜɡɪɹɾʃʊʌʒʤʧˈˌːθᵊᵻT'
VOICES = ("af_heart", "am_echo", "bf_emma")
CONFIG: dict[str, Any] = {
    "hidden_dim": 8,
    "style_dim": 4,
    "n_layer": 1,
    "text_encoder_kernel_size": 3,
    "max_dur": 4,
    "n_token": len(SIGNS) + 1,
    "decoder_dim": 8,
    "decoder_text_dim": 2,
    "vocab": {sign: at + 1 for at, sign in enumerate(SIGNS)},
    "plbert": {
        "hidden_size": 8,
        "embedding_size": 4,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 256,
        "num_hidden_layers": 2,
    },
    "istftnet": {
        "upsample_rates": [10, 6],
        "upsample_kernel_sizes": [20, 12],
        "upsample_initial_channel": 8,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
        "gen_istft_n_fft": 20,
        "gen_istft_hop_size": 5,
    },
}


def save_kokoro(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Under the names that PyTorch gives its weights, lengths and directions apart."""
    import mlx.core as mx

    from ingot.models.kokoro import KokoroModel
    from ingot.models.kokoro_acoustic import DoublingConvolution, KokoroConfig, KokoroConvolution, UpsamplingConvolution
    from ingot.models.layers.modules import named_parameters

    (folder / "voices").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = KokoroModel(KokoroConfig.read(folder))
    modules = dict(model.named_modules())
    draw, saved = np.random.default_rng(5), {}
    for name, held in named_parameters(model):
        module = modules.get(name.removesuffix(".weight"))
        numbers = draw.normal(0, 0.3, held.shape).astype(np.float32)
        if "alpha" in name:
            numbers = np.ones(held.shape, np.float32)
        if isinstance(module, KokoroConvolution | UpsamplingConvolution | DoublingConvolution):
            axes = {KokoroConvolution: (2, 1, 0), UpsamplingConvolution: (1, 2, 0)}.get(type(module))
            numbers = numbers.transpose(axes) if axes else numbers.T[:, None]
            saved[f"{name}_v"] = mx.array(np.ascontiguousarray(numbers))
            saved[f"{name}_g"] = mx.array(np.sqrt((numbers**2).sum((1, 2), keepdims=True)))
        else:
            saved[name] = mx.array(numbers[..., None] if name.endswith("conv1x1.weight") else numbers)
    mx.save_safetensors(str(folder / "kokoro-v1_0.safetensors"), saved)
    for voice in (*VOICES, "jf_alpha"):
        styles = mx.array(draw.normal(0, 0.5, (16, 1, 2 * config["style_dim"])).astype(np.float32))
        mx.save_safetensors(str(folder / "voices" / f"{voice}.safetensors"), {"voice": styles})
    return folder


class ScriptedMouth:
    """Each phoneme is ten samples of as many hundredths as it is in its piece."""

    def __init__(self, parts: int = 2) -> None:
        self.parts, self.spoken, self.rested = parts, list[tuple[str, str, float]](), 0
        self.meanwhile: Callable[[], None] = lambda: None

    def speak(self, phonemes: str, voice: str, speed: float) -> Generator[None, None, FloatArray]:
        self.spoken.append((phonemes, voice, speed))
        for _ in range(self.parts):
            self.meanwhile()
            yield
        return np.repeat(np.arange(len(phonemes)) % 100 / 100, 10).astype(np.float32)

    def rest(self) -> None:
        self.rested += 1


def card() -> TextToSpeechCard:
    return TextToSpeechCard("toy-mouth", "a script", VOICES, 24_000, 254, "float32", 0, 1_700_000_000)


def offered(mouth: ScriptedMouth) -> ServedTextToSpeech:
    return ServedTextToSpeech(card(), Phonemizer(frozenset(SIGNS), 254), mouth)
