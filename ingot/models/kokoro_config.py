"""What a Kokoro folder says of its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import ModelError
from ingot.models.encoders.config import EncoderConfig
from ingot.models.kokoro_convolutions import PART_FLOPS
from ingot.models.pooling_models.loading import read_config

RATE = 24_000
"""Samples a second, as every Kokoro model is trained with."""
HARMONICS = 9
"""Of a voice's pitch, itself among them."""
MOST_FRAMES = 1000
"""Of one piece of text: 25 seconds."""
MOST_TAPS = 11
"""Of a convolution of the last stage."""
HELD = 13
"""Arrays as long as the last stage's that are held at once."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Of the ALBERT that reads phonemes."""

    vocab: int
    width: int
    embedding: int
    layers: int
    heads: int
    inner: int
    positions: int


@dataclass(frozen=True, slots=True)
class VocoderConfig:
    """Of what makes sound from frames; each of the lists has an item for a stage or for a kernel."""

    rates: tuple[int, ...]  # by which stages lengthen
    kernels: tuple[int, ...]  # that they lengthen with
    channels: int  # before the first
    block_kernels: tuple[int, ...]
    block_dilations: tuple[tuple[int, ...], ...]
    fft: int
    hop: int


@dataclass(frozen=True, slots=True)
class KokoroConfig:
    width: int
    style: int
    layers: int
    kernel: int  # of the text encoder
    longest: int  # frames of a phoneme, before its speed is chosen
    inner: int  # channels of the decoder
    seen: int  # channels of the text that its later blocks see again
    phonemes: dict[str, int]
    bert: BertConfig
    vocoder: VocoderConfig
    packing: dict[str, Any]  # bits and groups of packed weights

    @property
    def frame(self) -> int:
        """Samples of a frame; pitch and loudness are told twice in it."""
        product = 2 * self.vocoder.hop
        for rate in self.vocoder.rates:
            product *= rate
        return product

    @property
    def piece_bytes(self) -> int:
        """Most memory that a piece takes while it is spoken."""
        channels = self.vocoder.channels // 2 ** len(self.vocoder.rates)
        samples = MOST_FRAMES * self.frame
        # What a convolution sees of its part at once, each of its neighbours by itself.
        seen = min(PART_FLOPS / 2 / channels, MOST_TAPS * channels * samples / self.vocoder.hop)
        return 4 * (samples * (HELD * channels // self.vocoder.hop + 4 * HARMONICS) + int(seen))

    @classmethod
    def read(cls, folder: Path) -> KokoroConfig:
        """Raises ModelError for a folder that holds another kind of model."""
        config = read_config(folder)
        if not all(isinstance(config.get(part), dict) for part in ("istftnet", "plbert", "vocab")):
            raise ModelError(
                f"{folder.name} is no Kokoro model, which is what speaks here: config.json has no istftnet"
            )
        own, bert = EncoderConfig(config), EncoderConfig(config["plbert"])
        read = cls(
            width=own.number("hidden_dim"),
            style=own.number("style_dim"),
            layers=own.number("n_layer"),
            kernel=own.number("text_encoder_kernel_size"),
            longest=own.number("max_dur"),
            inner=own.number("decoder_dim", 1024),
            seen=own.number("decoder_text_dim", 64),
            phonemes=_phonemes(config["vocab"], own.number("n_token"), folder),
            bert=BertConfig(
                vocab=own.number("n_token"),
                width=bert.number("hidden_size"),
                embedding=bert.number("embedding_size", 128),
                layers=bert.number("num_hidden_layers"),
                heads=bert.number("num_attention_heads"),
                inner=bert.number("intermediate_size"),
                positions=bert.number("max_position_embeddings"),
            ),
            vocoder=_vocoder(config["istftnet"]),
            packing=own.packing(),
        )
        vocoder = read.vocoder
        if any(
            kernel % rate or (kernel - rate) % 2 for rate, kernel in zip(vocoder.rates, vocoder.kernels, strict=True)
        ):
            raise ModelError(
                f"{folder.name} lengthens by {vocoder.rates} with kernels of {vocoder.kernels}: unknown here"
            )
        return read


def _phonemes(vocab: dict[str, Any], count: int, folder: Path) -> dict[str, int]:
    if not all(type(token) is int and 0 <= token < count and len(sign) == 1 for sign, token in vocab.items()):
        raise ModelError(f"vocab of {folder.name} does not give each sign a token below n_token")
    return vocab


def _vocoder(config: dict[str, Any]) -> VocoderConfig:
    number = EncoderConfig(config).number
    try:
        rates, kernels, blocks = (
            tuple(int(each) for each in config[name])
            for name in ("upsample_rates", "upsample_kernel_sizes", "resblock_kernel_sizes")
        )
        dilations = tuple(tuple(int(each) for each in block) for block in config["resblock_dilation_sizes"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"istftnet in the model's config.json cannot be read: {error}") from error
    if len(rates) != len(kernels) or len(blocks) != len(dilations) or not rates or not blocks:
        raise ModelError("istftnet in the model's config.json states lists of unlike lengths")
    channels = number("upsample_initial_channel")
    return VocoderConfig(
        rates, kernels, channels, blocks, dilations, number("gen_istft_n_fft"), number("gen_istft_hop_size")
    )
