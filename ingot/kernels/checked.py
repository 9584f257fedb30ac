"""A device's kernels, each kind compared once with plain MLX operations before it is used: paged attention and RoPE
here, recurrent mixers, packed and dense products, experts and mixtures in their own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ingot.kernels.dense_matmul.kernels import CheckedDense
from ingot.kernels.device import Device
from ingot.kernels.measured import NOTHING_SLOWER, ROPE, SlowerParts, attention_part, prompt_attention_part
from ingot.kernels.moe.kernels import CheckedMoe
from ingot.kernels.packed_matmul.selfcheck import CheckedExperts, CheckedPacked
from ingot.kernels.paged_attention.kernels import PagedAttention, paged_attention
from ingot.kernels.paged_attention.rope import (
    HeadRmsNorm,
    LatentRopeKernel,
    LatentRopeShape,
    RopeKernel,
    RopeShape,
    latent_rope_kernel,
    rope_kernel,
)
from ingot.kernels.paged_attention.selfcheck import (
    CodedSample,
    check_coded,
    check_latent_rope,
    check_paged_attention,
    check_rope,
    slab_counts,
)
from ingot.kernels.paged_attention.shapes import AttentionShape, AttentionTuning, CodedShape, tuning_choices
from ingot.kernels.recurrent.selfcheck import CheckedRecurrences
from ingot.kernels.selfcheck import Verdicts, first_wrong

AttentionKey = tuple[str, AttentionShape, mx.Dtype, float, float | None, bool, int | None]
CodedAttentionKey = tuple[CodedShape, AttentionShape, mx.Dtype, float, float | None]


class CheckedKernels(Verdicts[AttentionKey, AttentionTuning]):
    """All kernels of a device; its own verdicts are those of attention."""

    def __init__(self, device: Device, slower: SlowerParts = NOTHING_SLOWER) -> None:
        super().__init__(device, slower)
        self.wrong_rope: dict[tuple[RopeShape | LatentRopeShape, mx.Dtype], str | None] = {}
        """Why the RoPE kernel is not used for such layers; None where it is right."""
        self.wrong_coded: dict[CodedAttentionKey, str | None] = {}
        """Why such attention does not read such coded pages; None where it is right."""
        self.wrong_unpacked: dict[CodedAttentionKey, str | None] = {}
        """Why it does not decode them for prompts."""
        self.recurrent = CheckedRecurrences(device, slower)
        self.packed = CheckedPacked(device, slower)
        self.experts = CheckedExperts(device, slower)
        self.dense = CheckedDense(device, slower)
        self.moe = CheckedMoe(device, slower)

    def attention(
        self,
        shape: AttentionShape,
        dtype: mx.Dtype,
        *,
        scale: float = 1.0,
        cap: float | None = None,
        sinks: mx.array | None = None,
        window: int | None = None,
    ) -> PagedAttention | None:
        """None where there is no right kernel for such layers. If only the prompt kernels are wrong or slower, MLX
        computes prompts; if those with matrix units are wrong, others are used."""
        size, latent = shape.key_size, shape.latent
        if self._slower_parts.leave_out(attention_part(size, latent=latent)):
            return None
        key = (self._device.kind, shape, dtype, scale, cap, sinks is not None, window)
        options: dict[str, Any] = {"scale": scale, "cap": cap, "sinks": sinks, "window": window}

        def check(tuning: AttentionTuning) -> str | None:
            return first_wrong(
                check_paged_attention(self._device, shape, dtype, slabs=slabs, tuning=tuning, **options)
                for slabs in slab_counts(self._device)
            )

        choices = tuning_choices(self._device.kind)
        if self._slower_parts.leave_out(prompt_attention_part(size, latent=latent)):
            choices = tuple(choice for choice in choices if not choice.prompts)
        tuning = self._first_right(key, choices, check)
        return None if tuning is None else paged_attention(self._device, shape, dtype, tuning=tuning, **options)

    def check_coded(self, attention: PagedAttention, sample: CodedSample, *, scale: float, cap: float | None) -> None:
        """Compare an attention over such coded pages, where it has kernels for them."""
        key = (sample.shape, attention.shape, attention.dtype, scale, cap)
        if key in self.wrong_coded or not sample.suits(attention) or not attention.reads(sample.shape):
            return
        self.wrong_coded[key] = check_coded(self._device, attention, sample, scale=scale, cap=cap)
        if attention.unpacks(sample.shape):
            self.wrong_unpacked[key] = check_coded(self._device, attention, sample, prompts=True, scale=scale, cap=cap)

    def reads(self, coded: CodedShape) -> bool:
        """Whether kernels read such coded pages: all attention that was compared over them was right."""
        return _all_right(self.wrong_coded, coded)

    def unpacks(self, coded: CodedShape) -> bool:
        """Whether kernels decode them for prompts, likewise."""
        return _all_right(self.wrong_unpacked, coded)

    def turning(self, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm]) -> RopeKernel | None:
        """None where there is no right kernel for such layers."""
        if not self._is_rope_right(shape, dtype, partial(check_rope, self._device, shape, dtype, norms)):
            return None
        return rope_kernel(self._device, shape, dtype, norms)

    def turning_latents(self, shape: LatentRopeShape, dtype: mx.Dtype, norm: HeadRmsNorm) -> LatentRopeKernel | None:
        """Likewise, of latents."""
        if not self._is_rope_right(shape, dtype, partial(check_latent_rope, self._device, shape, dtype, norm)):
            return None
        return latent_rope_kernel(self._device, shape, dtype, norm)

    def _is_rope_right(
        self, shape: RopeShape | LatentRopeShape, dtype: mx.Dtype, check: Callable[[int], str | None]
    ) -> bool:
        if self._slower_parts.leave_out(ROPE):
            return False
        if (shape, dtype) not in self.wrong_rope:
            self.wrong_rope[shape, dtype] = first_wrong(map(check, slab_counts(self._device)))
        return self.wrong_rope[shape, dtype] is None


def _all_right(compared: dict[CodedAttentionKey, str | None], coded: CodedShape) -> bool:
    reasons = [reason for (shape, *_), reason in compared.items() if shape == coded]
    return bool(reasons) and not any(reasons)
