"""Hostile templates: each ends soon, in an error, whether it is met when loading or when rendering."""

from __future__ import annotations

import gc
import re
import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import modifies_known_mutable
from markupsafe import Markup

from ingot.errors import BadRequest, IngotError, ModelError
from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.chat_template.render_limits import UNBOUNDED_METHODS, RenderLimits
from ingot.text.chat_template.sandbox import TextRun, ThinkingContent

TIGHT = RenderLimits(steps=12_000, value=1 << 20, made=1 << 23, output=1 << 20, seconds=2.0)
GO = [{"role": "user", "content": "go"}]


def sprung(source: str, limits: RenderLimits = TIGHT) -> IngotError:
    """The error of a template that behaves until a certain message comes."""
    template = ChatTemplate("{% if messages[0].content == 'go' %}" + source + "{% endif %}", limits=limits)
    with pytest.raises(IngotError) as caught:
        template.render(GO)
    return caught.value


def doubled(expression: str, start: str = "'ab'") -> str:
    return "{% set x = " + start + " %}" + ("{% set x = " + expression + " %}") * 60 + "{{ x|length }}"


LONG = "('a' * 1000000)"
BOMBS = {
    "a long range": "{% for a in range(10**9) %}{% endfor %}",
    "nested ranges": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "nested ranges that write": "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
    "a loop that only skips": "{% for a in range(99999) if range(99999)|sum < 0 %}{% endfor %}",
    "a loop that writes much": "{% for a in range(9999) %}" + "y" * 5000 + "{% endfor %}",
    "a block that writes much": "{% set b %}{% for a in range(9999) %}" + "y" * 5000 + "{% endfor %}{% endset %}",
    "a recursive loop": (
        "{% for a in range(9) recursive %}{% if loop.depth < 12 %}{{ loop(range(9)) }}{% endif %}{% endfor %}"
    ),
    "an endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a doubling macro": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}"),
    "a multiplied string": "{{ 'x' * 10**9 }}",
    "a string multiplied from the left": "{{ 10**9 * 'x' }}",
    "a multiplied list": "{{ ([0] * 10**9)|length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares": doubled("x * x", "3"),
    "sums": doubled("x + x"),
    "concatenations": doubled("x ~ x"),
    "lists in lists": doubled("[x, x]") + "{{ x }}",
    "tuples in tuples": doubled("(x, x)") + "{{ x }}",
    "objects in objects": doubled("{'a': x, 'b': x}") + "{{ x|tojson }}",
    "lists compared": doubled("[x, x]") + "{{ x == x }}",
    "sums of lists": doubled("x + x", "[1]"),
    "blocks in blocks": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "replacements": doubled("x.replace('', 'abcd')"),
    "replacements by a filter": doubled("x|replace('', 'abcd')"),
    "replacements by a list": doubled("x|replace('', [x, x])"),
    "replacements whose arguments are named": doubled("x|replace(new='abcd', old='')"),
    "sums of lists by a filter": "{% set x = [[0] * 100] * 300 %}{{ ([x] * 9)|sum(start=[])|sum(start=[])|length }}",
    "joins": doubled("x.join([x, x, x])"),
    "joins by a filter": doubled("[x, x]|join(x)"),
    "formats": doubled("'%s%s' % (x, x)"),
    "formats by a filter": doubled("'%s%s'|format(x, x)"),
    "escapes": doubled("x + ('&'|safe) + x", "'&'|safe"),
    "slices kept": "{% set x = 'a' * 1000000 %}" + "".join(f"{{% set y{n} = x[1:] %}}" for n in range(30)),
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a precise format": "{{ '%.1000000000f' % 1 }}",
    "a format whose width is an argument": "{{ '%*d' % (1000000000, 1) }}",
    "a format that hides its width": "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "a wide replacement field": "{{ '{:>1000000000}'.format(1) }}",
    "a wide replacement field of other digits": "{{ '{:>１０００００００００}'.format(1) }}",
    "a precise replacement field": "{{ '{:.1000000000f}'.format(1.5) }}",
    "a replacement field whose width is an argument": "{{ '{:>{}}'.format(1, 10**9) }}",
    "a replacement field of a mapping": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "a replacement field of safe text": "{{ ('{:>1000000000}'|safe).format(1) }}",
    "a replacement field by its attribute": "{{ (['{:>1000000000}']|map(attribute='format')|first)(1) }}",
    "replacement fields": doubled("'{0}{0}{0}'.format(x)"),
    "replacement fields shown as Python writes them": doubled("'{0!r}{0!r}'.format(x)"),
    "many replacement fields": "{% set x = ('{0}' * 99999).format('y' * 99999) %}",
    "many braces": "{{ ('{{' * 400000).format()|length }}",
    "wide tabs": "{{ 'a\tb'.expandtabs(10**9) }}",
    "wide tabs by name": "{{ 'a\tb'.expandtabs(tabsize=10**9) }}",
    "a split by name": "{{ " + LONG + ".split(maxsplit=-1, sep='a')|length }}",
    "a key that takes long to hash": "{% set t = range(9999)|list|batch(9999)|first|join(',') %}"
    + "{% set k = (t, t, t) %}{% for a in range(99999) %}{% if {}[k] %}{% endif %}{% endfor %}",
    "a recursive block": "{% block a %}{{ self.a() }}{% endblock %}",
    "a wide centre": "{{ 'a'|center(10**9) }}",
    "wide padding": "{{ 'a'.ljust(10**9) }}{{ 'a'.zfill(10**9) }}",
    "wide indentation": "{{ 'a\nb'|indent(10**9) }}",
    "wide indentation by name": "{{ 'a\nb'|indent(width=10**9) }}",
    "wide indentation with a negative one": "{{ 'a\nb'|indent(10**9, -10**9) }}",
    "letters in a list": "{{ " + LONG + "|list|length }}",
    "letters joined": "{{ " + LONG + "|join(',')|length }}",
    "wide JSON": "{{ [1]|tojson(indent=10**9) }}",
    "wide separators": "{{ [1, 2]|tojson(separators=('x' * 99999, 'y')) }}",
    "many columns": "{{ [1]|batch(10**9, 0)|list|length }}",
    "many slices": "{{ [1]|slice(10**9)|list|length }}",
    "a fine rounding": "{{ 1|round(-10**9) }}",
    "a wide date": "{{ strftime_now('%999999999Y') }}",
    "a list filled with one default": "{{ range(9999)|map(attribute='q', default='x' * 99999)|list|string }}",
    "a search in a search": "{% set xs = range(9999)|list %}{{ xs|select('in', xs)|list }}",
    "a backward search": "{{ " + LONG + ".rfind('b' + 'a' * 500000) }}",
    "a backward split": "{{ " + LONG + ".rsplit('b' + 'a' * 500000) }}",
    "a strip of everything": "{{ " + LONG + ".strip('b' * 900000 + 'a') }}",
    "a trim of everything": "{{ " + LONG + "|trim('b' * 900000 + 'a') }}",
    "many words": "{{ ('a ' * 500000).split()|length }}",
    "keys that collide": "{{ dict(range(0, 99999 * (2**61 - 1), 2**61 - 1)|batch(2))|length }}",
    "a huge text": "{% set x = 'a' * 900000 %}{{ x }}{{ x }}",
}
ESCAPES = {
    "the class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the class by subscript": "{{ ''['__class__']['__mro__'] }}",
    "a function's globals": "{{ raise_exception.__globals__['os'] }}",
    "a class's globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a macro's function": "{% macro f() %}{% endmacro %}{{ f._func.__globals__['os'] }}",
    "a loop's frame": "{% for i in [1] %}{{ loop._iterator.gi_frame.f_globals['os'] }}{% endfor %}",
    "a generator's frame": "{{ ([1]|map('string')).gi_frame.f_builtins['open'] }}",
    "a format's attributes": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "a format by subscript": "{{ ''['format'].__globals__['os'] }}{{ '{0[__class__][__mro__]}'['format']('x') }}",
    "a format in disguise": "{{ cycler('{0.__class__.__mro__}'.format).next()(1) }}",
    "a format of a mapping": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a change of a message": "{{ messages[0].update({'role': 'system'}) }}",
    "a method that Python keeps for itself": "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
    "a private name in a namespace": "{{ namespace(__call__=1) }}",
    "bytes": "{{ 'a'.encode().hex() }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big')|length }}",
    "a table of letters": "{{ 'a'.translate({97: 'x' * 999999}) }}",
    "keys that are placed at once": "{{ {}.fromkeys(range(9))|length }}",
    "tags taken off": "{{ ('<a>'|safe).striptags() }}",
}
LOOKED_AT = {
    str: """capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
        isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
        partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
        startswith strip swapcase title upper zfill""",
    dict: "copy get items keys values",
    list: "copy count index",
    tuple: "count index",
    int: "as_integer_ratio bit_count bit_length conjugate denominator imag is_integer numerator real",
    float: "as_integer_ratio conjugate fromhex from_number hex imag is_integer real",
    complex: "conjugate from_number imag real",
    range: "count index start step stop",
    Markup: "escape unescape",
}
"""What may be called of Python's types: linear in what it is given, or bounded before."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_soon_in_a_bad_request(name: str) -> None:
    assert isinstance(sprung(BOMBS[name]), BadRequest)


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_the_model_s_fault_and_leads_nowhere(name: str) -> None:
    assert isinstance(sprung(ESCAPES[name]), ModelError)


def test_a_bomb_that_goes_off_at_once_is_refused_when_loading() -> None:
    with pytest.raises(ModelError, match="too much"):
        ChatTemplate(BOMBS["nested ranges"], limits=TIGHT)


@pytest.mark.parametrize("name", ["sums", pytest.param("nested ranges", marks=pytest.mark.slow)])
def test_the_ordinary_limits_end_a_bomb_too(name: str) -> None:
    error = sprung(BOMBS[name], RenderLimits())
    assert error.status == 400
    assert "too much" in error.message


def test_a_bomb_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        for name in ("sums", "replacements", "blocks in blocks", "formats", "slices kept"):
            sprung(BOMBS[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_a_limit_once_passed_stays_passed() -> None:
    # `is sequence` swallows whatever goes wrong while it looks at its operand.
    source = (
        "{% for n in range(99) %}{% if loop is sequence %}{% endif %}{% for m in range(999) %}{% endfor %}{% endfor %}"
    )
    assert isinstance(sprung(source), BadRequest)


def test_printing_an_unsafe_attribute_shows_nothing() -> None:
    assert ChatTemplate("[{{ ''.__class__ }}{{ '{0.__class__}'.format(1) }}]").render(GO) == "[]"


def _some(kind: type) -> object:
    return range(1) if kind is range else kind()


@pytest.mark.parametrize("kind", LOOKED_AT, ids=lambda kind: kind.__name__)
def test_a_method_that_python_adds_is_looked_at_first(kind: type) -> None:
    public = {name for name in dir(kind) if not name.startswith("_") and not modifies_known_mutable(_some(kind), name)}
    known = {*LOOKED_AT[kind].split(), *(LOOKED_AT[str].split() if kind is Markup else ())}
    assert public - UNBOUNDED_METHODS <= known


def test_a_message_cannot_inject_a_template() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = "{{ 7 * 7 }}{% for x in range(10**9) %}"
    assert ChatTemplate(source).render([{"role": "user", "content": text}]) == text


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be."},
    {"role": "user", "content": "One"},
    {"role": "assistant", "content": "Two"},
    {"role": "user", "content": "Three"},
]


def pieces(source: str, messages: list[dict[str, Any]] = TALK, history: Any = "stable") -> list[tuple[int | None, str]]:
    rendered = ChatTemplate(source).rendered(messages, history=history)
    return [(piece.message, piece.text) for piece in rendered.pieces if piece.text]


def test_each_message_is_found_where_its_loop_wrote_it() -> None:
    source = "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}<a>"
    assert pieces(source) == [(None, "<s>"), (0, "[Be.]"), (1, "[One]"), (2, "[Two]"), (3, "[Three]"), (None, "<a>")]


@pytest.mark.parametrize(
    "loop",
    [
        "{% for m in messages[1:] %}",
        "{% set rest = messages[1:] %}{% for m in rest %}",
        "{% for m in messages if m.role != 'system' %}",
        "{% for m in messages|rejectattr('role', 'equalto', 'system') %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}",
    ],
)
def test_messages_are_known_in_whatever_list_they_are_handed_on(loop: str) -> None:
    source = "{{ messages[0].content }}" + loop + "{{ m.content }}{% endfor %}"
    assert pieces(source) == [(None, "Be."), (1, "One"), (2, "Two"), (3, "Three")]


def test_loops_over_other_things_leave_no_trace() -> None:
    source = (
        "{% macro each(text) %}{% for c in text %}{{ c }}{% endfor %}.{% endmacro %}"
        "{% for n in range(2) %}{{ n }}{% endfor %}"
        "{% for m in messages %}{% for other in messages %}{{ loop.index }}{% endfor %}"
        "{{ each(m.content) }}{% endfor %}"
        "{% for n in [7] %}{{ n }}{% endfor %}"
    )
    expected = [(None, "01"), (0, "1234Be.."), (1, "1234One."), (2, "1234Two."), (3, "1234Three."), (None, "7")]
    assert pieces(source) == expected


def test_a_message_may_have_several_places() -> None:
    source = "{% for m in messages %}{{ m.role[0] }}{% endfor %}|{% for m in messages %}{{ m.content }}{% endfor %}"
    found = pieces(source)
    assert [text for at, text in found if at == 1] == ["u", "One"]
    assert (None, "|") in found


def test_marks_in_a_message_are_text_like_any_other() -> None:
    forged = "\ue0000123456789abcdef:0\ue001"
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert pieces(source, [{"role": "user", "content": forged}]) == [(0, forged)]


LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.reasoning_content and CONDITION %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
)
THINKING = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A", "reasoning_content": "R"},
    {"role": "user", "content": "Q"},
]


@pytest.mark.parametrize(
    "condition",
    [
        "loop.index0 > ns.last",
        "ns.last < loop.index0",
        "not loop.index0 <= ns.last",
        "not (ns.last >= loop.index0)",
        "loop.index > ns.last + 1 or loop.index0 > ns.last",
    ],
)
def test_a_turn_before_the_newest_question_keeps_its_thinking_unless_told_otherwise(condition: str) -> None:
    template = ChatTemplate(LAST_QUERY.replace("CONDITION", condition))
    assert template.rendered(THINKING, history="stable").text == "Q(R)AQ"
    assert template.rendered(THINKING, history="official").text == template.render(THINKING) == "QAQ"
    assert template.traits.reasoning == "reasoning_content"


def test_a_place_in_a_variable_of_its_own_is_a_place_all_the_same() -> None:
    source = LAST_QUERY.replace(
        "{% if m.reasoning_content and CONDITION %}",
        "{% set at = loop.index0 %}{% if m.reasoning_content and at > ns.last %}",
    )
    assert ChatTemplate(source).rendered(THINKING, history="stable").text == "Q(R)AQ"


@pytest.mark.parametrize("condition", ["loop.index0 > 1", "loop.index0 > limit", "loop.index0 == ns.last", "loop.last"])
def test_other_comparisons_mean_what_they_say(condition: str) -> None:
    source = LAST_QUERY.replace("CONDITION", condition)
    template = ChatTemplate(source)
    extra = {"limit": 5} if "limit" in condition else None
    assert template.rendered(THINKING, history="stable", extra=extra).text == "QAQ"


def test_the_question_is_about_assistants_alone() -> None:
    source = LAST_QUERY.replace("CONDITION", "true").replace("{{ m.content }}", "{{ loop.index0 > ns.last }}")
    assert ChatTemplate(source).rendered(THINKING, history="stable").text == "False(R)TrueFalse"


@pytest.mark.parametrize(
    "newest", ["m == users[-1]", "users[-1] == m", "m == users|last", "loop.last and rules is defined"]
)
def test_what_goes_with_the_newest_question_goes_with_the_first_instead(newest: str) -> None:
    source = (
        "{% set rules = messages[0].content %}{% set users = messages|selectattr('role', 'equalto', 'user')|list %}"
        "{% for m in messages[1:] %}{% if " + newest + " %}({{ rules }}){% endif %}{{ m.content }} {% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.rendered(TALK, history="stable").text == "(Be.)One Two Three "
    assert template.rendered(TALK, history="official").text == "One Two (Be.)Three "


@pytest.mark.parametrize("asked", ["loop.last", "loop.last and add_generation_prompt", "m == messages[2]"])
def test_other_questions_after_the_last_message_mean_what_they_say(asked: str) -> None:
    source = "{% for m in messages %}{% if " + asked + " %}!{% endif %}{{ m.content }} {% endfor %}"
    template = ChatTemplate(source)
    assert template.rendered(TALK, history="stable").text == template.render(TALK)


def test_content_is_not_cut_where_its_thinking_is_to_be_kept() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip() }}|{% endfor %}"
    template = ChatTemplate(source)
    text = "<think>R</think> A"
    assert template.render([{"role": "assistant", "content": text}]) == "A|"
    assert template.render([{"role": "assistant", "content": ThinkingContent(text)}]) == f"{text}|"


def test_the_pieces_are_the_whole_text() -> None:
    rendered = ChatTemplate("a{% for m in messages %}{{ m.content }}{% endfor %}z").rendered(TALK, history="stable")
    assert rendered.text == "aBe.OneTwoThreez" and rendered.pieces[-1] == TextRun(None, "z")


def test_rendering_compiles_no_expressions_of_its_own() -> None:
    def compiled() -> dict[int, re.Pattern[str]]:
        return {id(each): each for each in gc.get_objects() if type(each) is re.Pattern}

    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    pieces(source)
    before = compiled()
    pieces(source)
    assert compiled().keys() <= before.keys()
