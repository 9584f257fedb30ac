"""Our `dataclass` is the standard one, but that nothing is compiled until a method is called."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from ingot.dataclass import COMPILED, dataclass

T = TypeVar("T")
OPTIONS = (
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "kw_only": True},
    {"eq": False, "slots": True},
    {"frozen": True, "eq": False},
    {"repr": False, "eq": False, "frozen": True, "slots": True},
)


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0
    names: tuple[str, ...] = ()


def described(decorate: Callable[..., Any], options: dict[str, Any]) -> list[Any]:
    """What can be seen of a class with all kinds of fields, and of its objects."""

    @decorate(**options)
    class Plain(Generic[T]):
        kind: ClassVar[str] = "plain"
        a: int
        b: list[int] = field(default_factory=list)
        c: str = field(default="c", repr=False)
        d: float = field(default=1.0, compare=False, kw_only=True)
        e: int = field(default=5, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "c", self.c * 2)

    @decorate(**options)
    class Derived(Plain[int]):
        f: int = 3

    def tried(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (TypeError, AttributeError) as error:
            return type(error).__name__, str(error)

    found: list[Any] = []
    for made in (Plain, Derived):
        one, other = made(a=1), made(a=1, c="x")
        found += [[each.name for each in dataclasses.fields(made)], made.__match_args__, one.a, one.b, one.c, one.e]
        found += [one == made(a=1), one == other, made(a=1, d=2.0) == one, one == 1, dataclasses.asdict(one)]
        found += [tried(lambda one=one: setattr(one, "a", 2)), tried(lambda made=made: delattr(made(a=1), "b"))]
        if not (options.get("frozen") and options.get("slots")):  # where the standard message is a strange one
            found.append(tried(lambda one=one: setattr(one, "unknown", 2)))
        found.append(tried(lambda made=made: made(1, 2, 3, 4, 5, 6)))
        found += [tried(made), dataclasses.replace(one, a=7).a, made.__hash__ is None, hasattr(one, "__dict__")]
        found += [tried(lambda one=one: hash(dataclasses.replace(one, b=()))), copy.copy(one).c]
        found += [repr(one) if options.get("repr", True) else "", isinstance(Derived(a=1), Plain)]
    found.append(Plain(a=1, c="c") == Derived(a=1, c="c"))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_behave_as_those_of_the_standard_library(options: dict[str, Any]) -> None:
    ours, standard = described(dataclass, options), described(dataclasses.dataclass, options)
    if options.get("eq", True) is False:  # by identity
        ours, standard = [[each for each in found if not isinstance(each, int)] for found in (ours, standard)]
    assert ours == standard


def test_nothing_is_compiled_before_a_method_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    ours = dataclasses._create_fn  # type: ignore[attr-defined]

    def counted(name: str, *arguments: Any, **named: Any) -> Any:
        compiled.append(name)
        return ours(name, *arguments, **named)

    monkeypatch.setattr(dataclasses, "_create_fn", counted)

    @dataclass(frozen=True, slots=True)
    class Late:
        a: int = 1

    assert compiled == []
    assert Late() == Late(1)
    assert {*COMPILED} <= {*compiled}
    before = len(compiled)
    assert hash(Late(2)) == hash(Late(2)) and repr(Late()).endswith("Late(a=1)")
    assert len(compiled) == before


def test_methods_of_the_class_itself_stay() -> None:
    @dataclass(frozen=True)
    class Own:
        a: int

        def __init__(self) -> None:
            object.__setattr__(self, "a", 4)

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 9

        @cached_property
        def double(self) -> int:
            return 2 * self.a

    assert (repr(Own()), Own() == 3, hash(Own()), Own().double) == ("own", True, 9, 8)


def test_frozen_values_with_slots_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Point(1, names=("a",)))) == Point(1, 0, ("a",))
    assert copy.deepcopy(Point(2)) == Point(2)


def test_fields_for_initialisation_alone_are_refused() -> None:
    @dataclass
    class Strange:
        a: dataclasses.InitVar[int]

    with pytest.raises(TypeError, match=r"Strange\.a: InitVar is not supported"):
        Strange(1)
