"""`dataclass`, as in the standard library, but that its methods are compiled when one of them is first called.

The standard decorator compiles six functions for each class while its module is imported, which takes a millisecond a
class. That was nearly half of what it took to import a server, and most classes are not used by most processes. What
the standard library finds out about fields is left to it, and so is the code of the methods. Not offered, as nothing
here needs them: `order`, `unsafe_hash`, `match_args`, `weakref_slot` and `InitVar`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

COMPILED: Final = ("__init__", "__repr__", "__eq__", "__hash__")


def _with_deferred_methods(
    cls: Any,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    slots: bool = False,
    kw_only: bool = False,
) -> Any:
    own = vars(cls)
    hashed = "__hash__" in own and not (own["__hash__"] is None and "__eq__" in own)  # by the class itself
    wanted = dict(zip(COMPILED, (init, repr, eq, eq and frozen and not hashed), strict=True))
    names = [name for name, is_wanted in wanted.items() if is_wanted and (name not in own or name == "__hash__")]
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # or the standard library would inspect the signature
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
    if eq and not frozen and not hashed:
        made.__hash__ = None
    if frozen:
        _freeze(made, slots=slots)

    def compile_methods() -> None:
        compiled: Any = dataclasses.dataclass(frozen=frozen, slots=slots)(_twin(made))
        for name in names:
            setattr(made, name, getattr(compiled, name))

    for name in names:
        setattr(made, name, _deferred_method(made, name, compile_methods))
    return made


def _deferred_method(cls: type, name: str, compile_methods: Callable[[], None]) -> Callable[..., Any]:
    def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
        compile_methods()  # which replaces this one
        return getattr(cls, name)(self, *arguments, **named)

    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return method


def _twin(cls: Any) -> type:
    """A class of the same fields without bases, for the standard library to make methods of."""
    fields = dataclasses.fields(cls)
    known = {each.name for each in fields}
    if unknown := [name for name, each in cls.__dataclass_fields__.items() if "InitVar" in str(each.type)]:
        raise TypeError(f"{cls.__name__}.{unknown[0]}: InitVar is not supported")
    body: dict[str, Any] = {each.name: _same_field(each) for each in fields}
    body |= {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    body["__annotations__"] = {each.name: each.type for each in fields}
    if hasattr(cls, "__post_init__") and "__post_init__" not in known:
        body["__post_init__"] = cls.__post_init__
    return type(cls.__name__, (), body)


def _same_field(known: dataclasses.Field[Any]) -> Any:
    options = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
    return dataclasses.field(**{name: getattr(known, name) for name in options})


def _freeze(cls: Any, *, slots: bool) -> None:
    names = frozenset(each.name for each in dataclasses.fields(cls))

    def refuse_setting(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def refuse_deleting(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = refuse_setting, refuse_deleting
    if slots:  # for pickle and copy, which set attributes
        for name, method in (("__getstate__", _state), ("__setstate__", _set_state)):
            if name not in vars(cls):
                setattr(cls, name, method)


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        if cls is None:
            return lambda cls: _with_deferred_methods(cls, **options)
        return _with_deferred_methods(cls, **options)


__all__ = ["dataclass"]
