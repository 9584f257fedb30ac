"""Sets up our attention in the place of mlx-lm's modules, as the descriptions of their families say, and says of a
model how its attention was set up."""

from __future__ import annotations

import inspect
from operator import attrgetter

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import EqualHeads, KVLayout, SplitKeys
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu import native
from ingot.kernels.device import current_device
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from ingot.kernels.paged_attention.rope import HeadRmsNorm
from ingot.kernels.paged_attention.selfcheck import CodedSample
from ingot.models.families.description import AttentionSpec
from ingot.models.families.registry import attention_spec_of, rope_spec_of
from ingot.models.layers.attention import QUERY_TILE, CallNames, MixedAttention
from ingot.models.layers.attention_backends import (
    NativeRotations,
    PagedKernelAttention,
    RaggedAttention,
    native_head_norm,
)
from ingot.models.layers.decoder import MixedDecoder
from ingot.models.layers.gpu_linear import JoinedLinear, join_linears
from ingot.models.layers.indexer import has_indexer, indexer_of
from ingot.models.layers.latent_attention import LatentAttention
from ingot.models.layers.modules import extend
from ingot.models.layers.norms import PlainNorm, is_rms_norm, norm_factor
from ingot.models.layers.rope import (
    KernelLatentRope,
    KernelRope,
    KernelRopes,
    PeriodsRope,
    SharedRopes,
    positioned_rope,
)


def mixed_attention_of(
    module: nn.Module,
    ropes: SharedRopes | None,
    ragged: NativeRotations | None,
    kernels: CheckedKernels | None,
    kernel_ropes: KernelRopes | None = None,
) -> MixedAttention | None:
    """The same attention for mixed batches too; None where its class is not known.

    `ropes` are the model's where MLX fuses neither attention nor RoPE; `ragged` are its rotations where attention is
    computed natively; `kernels` and `kernel_ropes` are those of a GPU.
    """
    spec = attention_spec_of(module)
    if spec is None:
        return None
    if _stores_latents(spec) and ragged is None and kernels is None:
        return None  # mlx-lm's way with long prompts is the better one without kernels
    ours = MixedAttention if spec.latent is None else LatentAttention
    replacement: MixedAttention = extend(module, ours, "MixedBatch")
    _describe(replacement, module, spec)
    rope = _rope_of(module, spec)
    vars(replacement)["_rope"] = rope  # no further part of the module: it has it already, or it owns no weights
    replacement._shared_rope = None if ropes is None else ropes.rope_for(rope)
    replacement._tile = None if ropes is None else QUERY_TILE
    replacement._ragged = replacement._prepared_ragged = None
    replacement.kv_layout = None if ragged is None else kv_layout_of(module, spec)
    if ragged is not None:
        replacement._ragged = _make_ragged_attention(replacement, ragged)
        replacement._prepared_ragged = _make_ragged_attention(replacement, ragged, prepares=False)
    replacement.paged_attention = None if kernels is None else _make_paged_attention(replacement, kernels)
    replacement.kernel_rope = None if kernel_ropes is None else _make_kernel_rope(replacement, kernel_ropes)
    replacement.joined_qkv = replacement.joined_out = replacement.joined_gate = None
    if kernel_ropes is not None and spec.gate is not None and spec.gate in module:
        replacement.joined_gate = join_linears(module[spec.gate], names=[spec.gate], apart=True)
    if replacement.kernel_rope is not None:
        replacement.joined_qkv = _joint_projection(replacement)
        replacement.joined_out = join_linears(module[spec.out], names=[spec.out])
    if isinstance(replacement, LatentAttention):
        replacement.latent_rope = None if kernel_ropes is None else _make_latent_rope(replacement, kernel_ropes)
        replacement.joined_latents = replacement.joined_queries = replacement.head_products = None
        if replacement.latent_rope is not None:
            replacement.joined_latents = _joint_latents(replacement)
            replacement.joined_out = join_linears(module[spec.out], names=[spec.out])
            up = replacement._latent_spec.query_latent[2]
            if up in module:
                replacement.joined_queries = join_linears(module[up], names=[up])
    return replacement


def is_known_here(module: nn.Module) -> bool:
    """Whether our attention will compute what this module computes, on the current device."""
    spec = attention_spec_of(module)
    if spec is None or not _stores_latents(spec):
        return spec is not None
    device = current_device()
    return native.available() if device.kind == "cpu" else has_paged_kernels(device)


def _stores_latents(spec: AttentionSpec) -> bool:
    return spec.latent is not None and spec.latent.unpacked is None


def _describe(replacement: MixedAttention, module: nn.Module, spec: AttentionSpec) -> None:
    """Set what does not depend on the device."""
    names = tuple(inspect.signature(type(module).__call__).parameters)[1:]
    replacement._spec = spec
    replacement._call = CallNames(names, next(name for name in names if "mask" in name))
    replacement._heads = attrgetter(spec.heads)(module)
    replacement._kv_heads = spec.kv_heads if isinstance(spec.kv_heads, int) else attrgetter(spec.kv_heads)(module)
    replacement._scale = _head_size(replacement) ** -0.5 if spec.scale is None else attrgetter(spec.scale)(module)
    if spec.query_scale is not None and not isinstance(factor := attrgetter(spec.query_scale)(module), mx.array):
        replacement._scale *= factor
    replacement._plain_norm = None
    if spec.norm_eps is not None and (spec.normed is None or attrgetter(spec.normed)(module)):
        eps = spec.norm_eps if isinstance(spec.norm_eps, float) else attrgetter(spec.norm_eps)(module)
        replacement._plain_norm = PlainNorm(eps)
    replacement._cap = None if spec.cap is None else attrgetter(spec.cap)(module) or None
    replacement.reads_stored_kv = reads_stored_kv(module, spec)
    replacement.token_indexer = indexer_of(module, spec.indexer, replacement._heads, replacement._kv_heads)


def _rope_of(module: nn.Module, spec: AttentionSpec) -> nn.Module | None:
    """The RoPE that the module uses."""
    if spec.rope_periods is not None:
        return positioned_rope(PeriodsRope(attrgetter(spec.rope_periods)(module)))
    said_by = (spec.rotates,) if isinstance(spec.rotates, str) else spec.rotates
    used = spec.rope in module and (not said_by or any(attrgetter(name)(module) for name in said_by))
    own = rope_spec_of(module[spec.rope]) if used else None
    return module[spec.rope] if used and (own is None or own.dims is not None) else None


def reads_stored_kv(module: nn.Module, spec: AttentionSpec) -> bool:
    """Whether it attends to keys and values that an earlier layer has stored."""
    shared = spec.shared_kv
    if shared is None or shared.projected:
        return False
    return spec.projections[1] not in module if shared.reads is None else bool(attrgetter(shared.reads)(module))


def kv_layout_of(module: nn.Module, spec: AttentionSpec) -> EqualHeads | None:
    """How the native kernels read what it stores; None: as the model writes it."""
    if spec.latent is not None:
        rank, unrotated = attrgetter(spec.latent.rank, spec.latent.unrotated)(module)
        if spec.latent.unpacked is None:
            return EqualHeads(rank, latent=True)
        rotated = module[spec.latent.latent].weight.shape[0] - rank
        values = module[spec.latent.unpacked].weight.shape[0] // attrgetter(spec.heads)(module) - unrotated
        return None if values == unrotated + rotated else EqualHeads(values)
    layers = [module[name] for name in spec.projections[1:] if name in module]
    if spec.joint is not None or len({layer.weight.shape[0] for layer in layers}) <= 1:
        return None
    heads = spec.kv_heads if isinstance(spec.kv_heads, int) else attrgetter(spec.kv_heads)(module)
    return EqualHeads(layers[1].weight.shape[0] // heads)


def _head_size(module: MixedAttention) -> int:
    """Numbers of a head of queries."""
    spec = module._spec
    if spec.joint is not None:
        return int(module[spec.joint].weight.shape[0] // (module._heads + 2 * module._kv_heads))
    return int(module[spec.projections[0]].weight.shape[0] // (module._heads * (2 if spec.gated else 1)))


def _prepares_plainly(module: MixedAttention) -> bool:
    """Whether queries and keys are normed and then rotated, and nothing else is done to them."""
    spec = module._spec
    scaled = spec.query_scale is not None and isinstance(attrgetter(spec.query_scale)(module), mx.array)
    late = spec.norms_behind_rope and (module._plain_norm is not None or bool(_norms_of(module)))
    packed = spec.latent is not None or module.kv_layout is not None
    return not (scaled or late or packed or spec.tiled_heads)


def _norms_of(module: MixedAttention) -> list[nn.Module]:
    return [module[name] for name in module._spec.norms or () if name in module]


def _make_kernel_rope(module: MixedAttention, kernel_ropes: KernelRopes) -> KernelRope | None:
    spec, reads_only = module._spec, module.reads_stored_kv
    norms = [] if spec.joint_head_norms else _norms_of(module)  # those that span all heads come before the kernel
    value_norm = None if spec.value_norm is None or reads_only else module[spec.value_norm]
    if spec.norm_weights is not None or not _prepares_plainly(module) or not all(map(is_rms_norm, norms)):
        return None
    if value_norm is not None and "weight" in value_norm:
        return None
    factors: list[HeadRmsNorm] = [(norm_factor(norm), float(norm.eps)) for norm in norms]
    if module._plain_norm is not None:
        factors = [(None, module._plain_norm.eps)] * 2
    return kernel_ropes.rope_for(
        heads=module._heads,
        kv_heads=module._kv_heads,
        rope=module._rope,
        norms=factors * 2 if len(factors) == 1 else factors,
        value_norm=None if value_norm is None else (None, float(value_norm.eps)),
        gated=spec.gated,
        keys_as_values=module.keys_as_values,
        queries_only=reads_only,
    )


def _make_latent_rope(module: LatentAttention, kernel_ropes: KernelRopes) -> KernelLatentRope | None:
    spec, norm = module._latent_spec, module[module._latent_spec.latent_norm]
    angles = kernel_ropes.angles_for(module._rope)
    if angles is None or spec.unpacked is not None or spec.latent_scale is not None or not is_rms_norm(norm):
        return None
    rank, unrotated = attrgetter(spec.rank, spec.unrotated)(module)
    sizes = rank, module[spec.latent].weight.shape[0] - rank
    factor: HeadRmsNorm = norm_factor(norm), float(norm.eps)
    return KernelLatentRope(kernel_ropes.kernels, module._heads, unrotated, sizes, factor, angles)


def _joint_latents(module: LatentAttention) -> JoinedLinear | None:
    """The projection of queries, or of what they are made from, and of latents as one."""
    spec = module._latent_spec
    if spec.query in module and spec.query_scale is not None:
        return None
    names = spec.query if spec.query in module else spec.query_latent[0], spec.latent
    return join_linears(*(module[name] for name in names), names=names)


def _joint_projection(module: MixedAttention) -> JoinedLinear | None:
    """The projections of queries, keys and values, of those that there are, as one, where heads of keys and values are
    of one size."""
    spec = module._spec
    if spec.joint is not None:
        return (
            None
            if spec.joint_by_group or spec.conv is not None
            else join_linears(module[spec.joint], names=[spec.joint])
        )
    if spec.shared_kv is not None and spec.shared_kv.projected:
        return None
    wanted = spec.projections[:1] if module.reads_stored_kv else spec.projections
    names = tuple(name for name in wanted if name in module)
    layers = [module[name] for name in names]
    sizes = {layer.weight.shape[0] for layer in layers[1:]}
    return join_linears(*layers, names=names) if len(sizes) <= 1 else None


def _make_paged_attention(module: MixedAttention, kernels: CheckedKernels) -> PagedKernelAttention:
    return PagedKernelAttention(
        kernels,
        heads=module._heads,
        kv_heads=module._kv_heads,
        scale=module._scale,
        cap=module._cap,
        sinks=module._sinks,
        latent=_stores_latents(module._spec),
    )


def _make_ragged_attention(
    module: MixedAttention, rotations: NativeRotations, *, prepares: bool = True
) -> RaggedAttention:
    spec, norms = module._spec, _norms_of(module)
    if module._plain_norm is None:
        native_norms: list[native.HeadNorm | None] = [
            native_head_norm(norm, whole=spec.joint_head_norms) for norm in norms
        ]
    else:
        weights = [module[name].reshape(-1) for name in spec.norm_weights or ()] or [mx.ones(_head_size(module))] * 2
        native_norms = [(weight, module._plain_norm.eps, False, False) for weight in weights]
    # Factors of tokens are applied before the rotation, which does not change what they do, but norms would.
    scales_first = (spec.token_scale is None and spec.position_scale is None) or not native_norms
    hands_on = spec.shared_kv is not None and not spec.shared_kv.projected  # prepared keys, to later layers
    return RaggedAttention(
        heads=module._heads,
        kv_heads=module._kv_heads,
        scale=module._scale,
        cap=module._cap,
        sinks=module._sinks,
        norms=native_norms,
        rope=module._rope,
        rotations=rotations,
        gated=spec.gated,
        prepares=prepares and scales_first and not hands_on and _prepares_plainly(module),
    )


def layer_numbers(path: str) -> list[int]:
    """The numbers in a module's path, by which modules are in order."""
    return [int(part) for part in path.split(".") if part.isdigit()]


def layouts_of(module: nn.Module, spec: AttentionSpec, *, is_native: bool) -> list[KVLayout | None]:
    """How what a layer stores lies in its pages, and behind it what its indexer stores."""
    own: list[KVLayout | None] = [kv_layout_of(module, spec) if is_native else None]
    return [*own, SplitKeys()] if has_indexer(module, spec.indexer) else own


def kv_layouts(model: nn.Module) -> list[KVLayout | None]:
    """The same of all layers with our attention, in order."""
    mixed = [
        (layer_numbers(path), module)
        for path, module in model.named_modules()
        if isinstance(module, MixedAttention) and not module.reads_stored_kv
    ]
    ordered = [module for _, module in sorted(mixed, key=lambda each: each[0])]
    return [own for each in ordered for own in layouts_of(each, each._spec, is_native=each.native)]


def gathers_pages(model: nn.Module, layers: int) -> tuple[bool, bool]:
    """Whether pages are gathered for some of so many attention layers, in mixed batches of few tokens a row, and of
    more."""
    mixed = [module for _, module in model.named_modules() if isinstance(module, MixedAttention)]
    kernels = [module.paged_attention for module in mixed if not module.native]
    each = [(True, True) if paged is None else paged.gathers for paged in kernels]
    if len(mixed) < layers or any(isinstance(module, MixedDecoder) and module.has_chunks for module in model.modules()):
        each.append((True, True))
    return any(few for few, _ in each), any(many for _, many in each)


def check_coded_attention(model: nn.Module, sample: CodedSample) -> None:
    """Check all attention by kernels of a GPU that reads pages in fewer bits like these."""
    for _, module in model.named_modules():
        if isinstance(module, MixedAttention) and module.paged_attention is not None:
            module.paged_attention.check_coded(sample)
