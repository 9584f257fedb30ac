"""The vision model in PyTorch: transformers' own, and a forward pass for batches in which all rows see alike much.

transformers walks through the pictures of a batch one by one; here they are one more axis. Both compute the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm, apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from foundry.vision.feed import Batch
from foundry.vision.prompts import MERGE, PATCH, TEMPORAL
from foundry.vision.shape import config


class Seer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = Qwen3VLForConditionalGeneration._from_config(
            Qwen3VLConfig(**config()), attn_implementation="sdpa", dtype=torch.float32
        )
        _swap_norms(self.lm)
        self._grids: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def hidden(self, batch: Batch) -> torch.Tensor:
        """The last hidden states, normed."""
        text = self.lm.model.language_model
        states = text.embed_tokens(batch.tokens)
        deeper: list[torch.Tensor] = []
        places = batch.seen[..., None].expand(*batch.seen.shape, states.shape[-1]) if batch.frames.numel() else None
        if places is not None:
            shown, deeper = self._seen(batch.frames)
            states = states.scatter(1, places, shown.to(states.dtype))
        angles = text.rotary_emb(states, batch.positions)
        for number, layer in enumerate(text.layers):
            states = layer(states, attention_mask=None, position_embeddings=angles)
            if number < len(deeper) and places is not None:
                states = states.scatter_add(1, places, deeper[number].to(states.dtype))
        return text.norm(states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm.lm_head(hidden)

    def _seen(self, frames: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What stands for (rows, groups, frames of a group, height, width, 3): (rows, tokens, width), and deeper."""
        tower = self.lm.model.visual
        rows, height, width = frames.shape[0], frames.shape[3], frames.shape[4]
        weights, indices, cos, sin = self._grid(height // PATCH, width // PATCH)
        kernel = tower.patch_embed.proj
        states = F.linear(patches(frames), kernel.weight.flatten(1), kernel.bias)
        states = states + (tower.pos_embed(indices) * weights[:, :, None]).sum(1)
        deeper = []
        for number, block in enumerate(tower.blocks):
            states = states + _attended(block.attn, block.norm1(states), cos, sin)
            states = states + block.mlp(block.norm2(states))
            if number in tower.deepstack_visual_indexes:
                merge = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(number)]
                deeper.append(merge(states.reshape(-1, states.shape[-1])).view(rows, -1, merge.linear_fc2.out_features))
        shown = tower.merger(states.reshape(-1, states.shape[-1]))
        return shown.view(rows, -1, shown.shape[-1]), deeper

    def _grid(self, height: int, width: int) -> tuple[torch.Tensor, ...]:
        if (height, width) not in self._grids:
            tower = self.lm.model.visual
            device = tower.pos_embed.weight.device
            grid = torch.tensor([[1, height, width]], device=device)
            indices, weights = get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=MERGE,
                kwargs={},
            )
            places = get_vision_position_ids(grid, MERGE, kwargs={})
            cos, sin = tower.rotary_pos_emb(tower.pos_embed.weight, places)
            self._grids[height, width] = (weights.float(), indices, cos, sin)
        return self._grids[height, width]


class SwiftNorm(nn.Module):
    """The same as the text model's norm, in one launch."""

    def __init__(self, plain: Qwen3VLTextRMSNorm) -> None:
        super().__init__()
        self.weight, self._epsilon = plain.weight, plain.variance_epsilon

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states.float(), self.weight.shape, self.weight, self._epsilon).to(states.dtype)


def _swap_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen3VLTextRMSNorm):
                setattr(module, name, SwiftNorm(child))


def patches(frames: torch.Tensor) -> torch.Tensor:
    """Pixels from -1 to 1, patch by patch in the order of the merged cells: (pictures, patches, values)."""
    rows, groups, _, height, width, _ = frames.shape
    frames = frames.expand(-1, -1, TEMPORAL, -1, -1, -1).flatten(0, 1)
    cut = frames.view(
        rows * groups, TEMPORAL, height // PATCH // MERGE, MERGE, PATCH, width // PATCH // MERGE, MERGE, PATCH, 3
    )
    ordered = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(rows * groups, height // PATCH * (width // PATCH), -1).float() / 127.5 - 1


def _attended(attention: nn.Module, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pictures, count, width = states.shape
    joint = attention.qkv(states).view(pictures, count, 3, attention.num_heads, -1)
    queries, keys, values = joint.unbind(2)
    queries, keys = apply_rotary_pos_emb_vision(queries, keys, cos, sin)
    # Written out, in float32 where it matters: pictures have few patches, so that costs little. The one run with a
    # fused kernel, which also had a higher rate, ended in NaN.
    queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
    shares = (queries @ keys.transpose(2, 3) * attention.scaling).float().softmax(dim=-1).to(values.dtype)
    return attention.proj((shares @ values).transpose(1, 2).reshape(pictures, count, width))
