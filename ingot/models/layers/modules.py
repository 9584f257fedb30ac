"""Modules that replace those of a loaded model and share their weights: MLX's idiom for changing a model.

`adopt_module` and `extend` make such a module, `restored_module` gives back the original. The linear layers and
embeddings here are computed by the native kernels, on CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ingot.kernels.cpu import native


class _NativeLinear:
    """Multiplies by weights as they are, in the native kernels' order."""

    native: Any

    def __call__(self, x: mx.array) -> mx.array:
        return native.linear(x, self.native)


class PackedLinear(_NativeLinear, nn.QuantizedLinear): ...


NATIVE_MODE = "native"
"""The mode of weights in the native kernels' order, which a family's code cannot take for one of MLX's formats."""


class DenseLinear(_NativeLinear, nn.Linear):
    """In the number format of its weights: float32, or one of 16 bits."""


class PackedEmbedding(nn.QuantizedEmbedding):
    """An embedding with the weights of a `PackedLinear`; as an output head it is one."""

    native: Any

    def __call__(self, ids: mx.array) -> mx.array:
        return native.lookup_rows(ids, self.native)

    def as_linear(self, x: mx.array) -> mx.array:
        return native.linear(x, self.native)


class DenseEmbedding(nn.Embedding):
    """An embedding with the weights of a `DenseLinear`, looked up as float32; as an output head it is one."""

    native: Any

    def __call__(self, ids: mx.array) -> mx.array:
        return self.weight[ids].astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return native.linear(x, self.native)


def native_quantized(module: Any, cls: type) -> Any:
    """A quantised layer as the class `cls`, which the native kernels compute, with its weights in their order."""
    layer = adopt_module(module, cls)
    layer.native = native.packed_weights(
        module.weight, module.scales, module.get("biases"), module.get("bias"), module.group_size, module.bits
    )
    layer.weight, layer.scales, layer.biases = layer.native.arrays[:3]
    layer.mode = NATIVE_MODE
    return layer


def native_dense(module: Any, cls: type) -> Any:
    """A plain layer as the class `cls`, which the native kernels compute."""
    layer = adopt_module(module, cls)
    layer.native = native.plain_weights(module.weight, module.get("bias"))
    layer.weight = layer.native.arrays[0]
    if "bias" in module:
        layer.bias = layer.native.arrays[1]
    return layer


def native_weights_of(module: Any) -> Any:
    """A linear layer's weights as the native kernels take them; None for layers that they do not support."""
    if isinstance(module, PackedLinear | DenseLinear):
        return module.native
    return native.plain_weights(module.weight, module.get("bias")) if type(module) is nn.Linear else None


def named_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Every weight with its path."""
    flat: Any = tree_flatten(model.parameters())
    return list(flat)


def float_dtype(model: nn.Module, widened: Collection[str] = ()) -> mx.Dtype:
    """That of most floating weights. Those at paths that are `widened` as they are multiplied count as float32."""
    sizes: Counter[mx.Dtype] = Counter()
    for path, array in named_parameters(model):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[mx.float32 if path in widened else array.dtype] += array.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=mx.float32)


def adopt_module(module: nn.Module, cls: type) -> Any:
    """A module of class `cls`, a subclass of `module`'s, that owns what `module` owns."""
    assert issubclass(cls, type(module))
    adopted = cls.__new__(cls)
    nn.Module.__init__(adopted)
    dict.update(adopted, module)
    adopted.__dict__.update(vars(module))
    return adopted


def extend(module: nn.Module, ours: type, prefix: str) -> Any:
    """A module that owns what `module` owns, of a subclass of `ours` and its own class."""
    return adopt_module(module, _extended_class(ours, type(module), prefix))


@cache
def _extended_class(ours: type, theirs: type, prefix: str) -> type:
    return type(f"{prefix}{theirs.__name__}", (ours, theirs), {})


class UncompiledModule(nn.Module):
    """Has MLX compile nothing that the module it extends computes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mx.disable_compile()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            mx.enable_compile()


def measured_part(kind: str, module: nn.Module) -> str:
    """What `ingot doctor --measure` calls a module of ours, or the one that it replaces: modules of a class with
    weights of a size."""
    cls, size = own_class(module), sum(array.nbytes for _, array in named_parameters(module))
    return f"{kind} of {cls.__module__.rpartition('.')[2]}.{cls.__name__} ({size / 1e6:.2f} MB)"


def swap_each(model: nn.Module, replacement_for: Callable[[nn.Module], nn.Module | None]) -> int:
    """Swap every module that has a replacement for it; returns how many were swapped."""
    found = [(path, replacement_for(module)) for path, module in model.named_modules()]
    swapped = [(path, replacement) for path, replacement in found if replacement is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def own_class(module: nn.Module) -> type:
    """The class of another project that this module, or the one that it replaces, is of."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("ingot."))


def restored_module(module: nn.Module) -> Any:
    """The module that this one replaces: of its own class, without the attributes that ours added."""
    kind: Any = own_class(module)
    ours = {
        name
        for each in type(module).__mro__
        if each.__module__.startswith("ingot.")
        for name in vars(each).get("__annotations__", ())
    }
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    dict.update(plain, module)
    plain.__dict__.update({name: value for name, value in vars(module).items() if name not in ours})
    return plain


@contextmanager
def temporarily_extended(model: nn.Module, found: Sequence[tuple[str, nn.Module]], ours: type) -> Iterator[None]:
    """While this is open, these modules of a model are of subclasses of `ours` and their own classes."""
    extended = [
        (path, adopt_module(each, type(f"{ours.__name__}{type(each).__name__}", (ours, type(each)), {})))
        for path, each in found
    ]
    model.update_modules(tree_unflatten(extended))
    try:
        yield
    finally:
        model.update_modules(tree_unflatten([*found]))
