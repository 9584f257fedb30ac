"""The vision tower of Gemma 3n: MobileNet V5, whose blocks are convolutions, each a slice of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.media.images import BILINEAR
from ingot.media.layout import Grid, Layout
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.layers.modules import swap_each
from ingot.models.layers.norms import swap_norms
from ingot.models.vision.tiles import PixelNormalization, TiledVisionTower
from ingot.models.vision.tower import LanguagePart
from ingot.models.vision.vit import VisionWork, VitRotation, WorkSlicing

GEMMA3N_PARTS: Final = ("vision_tower", "embed_vision")
GEMMA3N_LANGUAGE: Final = LanguagePart(
    "gemma3n",
    (
        ("model.language_model.", "model.language_model."),
        ("language_model.model.", "model.language_model."),
        ("language_model.", "model.language_model."),
    ),
    None,
)
GEMMA3N_FUSED: Final = (3, 4)
"""The groups of blocks whose states become features."""


def gemma3n_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """The last feature is the token behind an image, which has an embedding of the vision part's own. Raises ModelError
    where an image's states cannot be pooled to as many features as the config states."""
    vision, embed, stated = model.vision_tower.timm_model, model.embed_vision, model.config.vision_config
    swap_each(vision, _norm_of_last_axis)
    if device.kind == "cpu" and native.available():
        swap_norms(vision)
    hidden, patch = int(model.config.text_config.hidden_size), int(stated.patch_size)
    along = round(model.config.vision_soft_tokens_per_image**0.5)
    if along**2 != model.config.vision_soft_tokens_per_image:
        raise ModelError("vision_soft_tokens_per_image that is no square is not supported.")
    end = int(config.get("eoi_token_id") or embed.vocab_offset)

    def project(rows: mx.array) -> mx.array:
        # The language model multiplies its input embeddings by the root of its size.
        embedded: mx.array = embed(inputs_embeds=rows * stated.hidden_size**0.5)
        return embedded * hidden**-0.5

    def with_end(features: mx.array, layout: Layout) -> mx.array:
        behind = embed(input_ids=mx.array([end])) * hidden**-0.5
        return mx.concatenate([features, behind.astype(features.dtype)])

    return TiledVisionTower(
        MobileNet(vision, patch, along, stated.hidden_size, WorkSlicing.on(device)),
        (model.vision_tower, embed),
        patch,
        hidden,
        PixelNormalization.stated(files.image_config, resample=BILINEAR),
        gather=lambda states, grid: states,
        project=project,
        finish=with_end,
        stand_in=0,
    )


def _norm_of_last_axis(module: Any) -> nn.Module | None:
    """For mlx-vlm's norm of channels and what follows it, which puts channels first for that and last again."""
    if type(module).__name__ != "RMSNormAct2d":
        return None
    norm = nn.RMSNorm(1, module.eps)
    norm.weight = module.weight
    return nn.Sequential(norm, module.act)


@dataclass(frozen=True, slots=True)
class MobileNet:
    """States of the last two groups of blocks, one beside the other, pooled to a square."""

    net: Any  # mlx-vlm's module
    patch: int
    along: int  # states along each side of the square
    width: int
    slicing: WorkSlicing

    def held(self, grids: Sequence[Grid], numbers: int) -> int:
        """See `Encoder`. On CPUs, what a convolution takes is unfolded at each of its places."""
        side, most, fused = grids[0].h * self.patch, 0, 0
        for number, group in enumerate([[self.net.conv_stem], *self.net.blocks]):
            for block in group:
                attends = "attn" in block
                for stride, outputs, unfolded in _convolutions(block):
                    taken, side = side, side if attends else side // stride
                    most = max(most, HELD * side**2 * outputs + taken**2 * unfolded)
                if attends:
                    most = max(
                        most, side**2 * (HELD * block.layer_scale.gamma.size + 2 * block.attn.num_heads * side**2)
                    )
            fused = side if number == GEMMA3N_FUSED[0] else fused
        fusion = sum(HELD * outputs + unfolded for _, outputs, unfolded in _convolutions(self.net.msfa.ffn))
        return max(most, fused**2 * fusion) + 2 * grids[0].patches * numbers

    def states(
        self, pixels: mx.array, grid: Grid, angles: VitRotation | None = None, learned: mx.array | None = None
    ) -> VisionWork:
        """See `Encoder`."""
        tiles, patch = pixels.shape[0], self.patch
        x = pixels.reshape(tiles, grid.h, grid.w, patch, patch, 3).swapaxes(2, 3)
        x = self.net.conv_stem(x.reshape(tiles, grid.h * patch, grid.w * patch, 3))
        yield [x]
        kept = []
        for number, group in enumerate(self.net.blocks, start=1):
            for block in group:
                x = block(x)
                yield [x]
            if number in GEMMA3N_FUSED:
                kept.append(x)
        rows, columns = kept[0].shape[1:3]
        enlarged = (mx.repeat(mx.repeat(x, rows // x.shape[1], 1), columns // x.shape[2], 2) for x in kept)
        x = self.net.msfa.ffn(mx.concatenate(list(enlarged), axis=-1))
        yield [x]
        if (rows, columns) != (self.along, self.along):
            blocks = x.reshape(tiles, self.along, rows // self.along, self.along, columns // self.along, -1)
            x = self.net.msfa.norm(blocks.mean(axis=(2, 4)))
        return x.reshape(tiles, self.along**2, -1)


HELD: Final = 6
"""As many arrays of a convolution's size are there at a time: its input, its own, and what norms and GELUs make."""


def _convolutions(block: Any) -> Iterator[tuple[int, int, int]]:
    """The stride, outputs and unfolded numbers of each convolution, in order."""
    for _, module in reversed(block.named_modules()):
        if isinstance(module, nn.Conv2d):
            outputs, *kernel = module.weight.shape
            yield module.stride[0], outputs, kernel[0] * kernel[1] * kernel[2]
