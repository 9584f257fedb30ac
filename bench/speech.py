"""Text-to-speech: its speed relative to real time, alone and alongside a chat stream.

python -m bench.speech                                   a model of Kokoro-82M's shape, with random weights
python -m bench.speech --speech-model FOLDER             a real one
python -m bench.speech --model FOLDER --text "..."

Alongside a stream, times are milliseconds between two of its tokens, before and during synthesis. The target is that of
--target-itl-ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench.pictures import Gaps, Reader, asked, gaps
from ingot.config import DEFAULT_MODEL, Settings, single_model_entries
from ingot.engine.engine import Engine, TextToSpeechEngine
from ingot.engine.loading.model_loader import ModelLoader
from ingot.engine.speech_request import SpeechEnded, SpeechRequest
from ingot.models.files.progress import no_progress

TEXT = (
    "The harbour was quiet that morning, and the boats lay still. An old man sat on the wall, mending a net that he "
    "had mended many times before. When the bell rang, he looked up, counted the gulls, and went on with his work."
)
SIGNS = ';:,.!?—…"()“” AIOQWYabdefhijklmnpstuvwzæðŋɐɑɒɔəɛɜɡɪɹɾʃʊʌʒʤʧˈˌːθᵊᵻT'
SHAPE: dict[str, Any] = {
    "hidden_dim": 512,
    "style_dim": 128,
    "n_layer": 3,
    "text_encoder_kernel_size": 5,
    "max_dur": 50,
    "n_token": 178,
    "vocab": {sign: at + 1 for at, sign in enumerate(SIGNS)},
    "plbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
    },
    "istftnet": {
        "upsample_rates": [10, 6],
        "upsample_kernel_sizes": [20, 12],
        "upsample_initial_channel": 512,
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "gen_istft_n_fft": 20,
        "gen_istft_hop_size": 5,
    },
}
FRAMES_A_PHONEME = -2.75
"""Of each of fifty places the chance, as a logit, that a phoneme lasts so long: three frames, about as people speak."""
VOICE = "af_heart"


@dataclass(frozen=True)
class Said:
    seconds: float  # of sound
    took: float
    first: float  # until the first piece was told

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s in {self.took:.1f} s: {self.seconds / self.took:.2f}x; first {self.first:.2f} s"


def said(engine: TextToSpeechEngine, text: str, voice: str, name: str) -> Said:
    return asyncio.run(_said(engine, text, voice, name))


async def _said(engine: TextToSpeechEngine, text: str, voice: str, name: str) -> Said:
    offered = engine.model
    pieces = offered.pronouncer.pieces(text, voice)
    began, first = time.monotonic(), 0.0
    async for event in engine.speak(SpeechRequest(name, pieces, voice)):
        first = first or time.monotonic() - began
        last = event
    assert isinstance(last, SpeechEnded)
    return Said(last.samples / offered.card.rate, time.monotonic() - began, first)


def beside(
    engine: Engine, speaker: TextToSpeechEngine, text: str, voice: str, alone_s: float
) -> tuple[Gaps, Gaps, Said]:
    """The gaps of a stream alone, and while a text is spoken."""
    reader = Reader(engine, asked("stream", [5, 6, 7]))
    reader.wait()
    began = time.monotonic()
    time.sleep(alone_s)
    middle = time.monotonic()
    found = said(speaker, text, voice, "beside")
    end = time.monotonic()
    reader.close(engine)
    return gaps([reader], began, middle), gaps([reader], middle, end), found


def random_folder(folder: Path) -> Path:
    """A model that nobody would listen to, and that takes as long as a real one."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from ingot.models.kokoro import KokoroModel
    from ingot.models.kokoro_acoustic import DoublingConvolution, KokoroConfig, KokoroConvolution, UpsamplingConvolution

    (folder / "voices").mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    model = KokoroModel(KokoroConfig.read(folder))
    modules = dict(model.named_modules())
    weights: dict[str, mx.array] = {}
    for name, held in tree_flatten(model.parameters()):
        numbers = mx.ones(held.shape) if "alpha" in name else mx.random.normal(held.shape) * 0.02
        match modules.get(name.removesuffix(".weight")):
            case KokoroConvolution():
                numbers = numbers.transpose(2, 1, 0)
            case UpsamplingConvolution():
                numbers = numbers.transpose(1, 2, 0)
            case DoublingConvolution():
                numbers = numbers.transpose(1, 0)[:, None]
        weights[name] = numbers[..., None] if name.endswith("conv1x1.weight") else numbers
    weights["predictor.duration_proj.bias"] = mx.full((SHAPE["max_dur"],), FRAMES_A_PHONEME)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    styles = mx.random.normal((510, 1, 2 * SHAPE["style_dim"])) * 0.1
    mx.save_safetensors(str(folder / "voices" / f"{VOICE}.safetensors"), {"voice": styles})
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--speech-model")
    parser.add_argument("--voice", default=VOICE)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--alone", type=float, default=3.0, help="seconds for which the stream is measured alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        named = arguments.speech_model
        mouth = named or str(random_folder(Path(folder)))
        settings = Settings(memory="4GB", context=8192, model=arguments.model, speech_model=mouth)
        loader = ModelLoader(settings, single_model_entries(settings))
        engine, speaker = (engine for _, engine in loader.load_resident(no_progress))
        assert isinstance(engine, Engine) and isinstance(speaker, TextToSpeechEngine)
        try:
            said(speaker, "Hello there.", arguments.voice, "warm-up")
            print(f"alone   {said(speaker, arguments.text, arguments.voice, 'alone')}")
            before, during, found = beside(engine, speaker, arguments.text, arguments.voice, arguments.alone)
            print(f"beside  {found}\nstream alone   {before}\nstream beside  {during}")
        finally:
            loader.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
