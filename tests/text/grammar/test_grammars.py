"""Grammars as clients send them: what they allow, what is refused, and that nothing that they say can do harm."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ingot.errors import BadRequest, IngotError
from ingot.text.grammar import limits
from ingot.text.grammar.calls import StructuralTag
from ingot.text.grammar.compiled import LlguidanceGrammar
from ingot.text.grammar.grammars import CompilerProcesses, Grammars
from ingot.text.grammar.matcher import CompiledGrammar, GrammarTooComplex, GrammarViolated
from tests.text.grammar.walks import END, Walker, allowed, byte_tokenizer

TOKENIZER = byte_tokenizer("<|mark|>")


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, TOKENIZER.vocab_size + 40)
    yield made
    made.close()


def answers(grammar: CompiledGrammar, count: int = 20) -> list[str]:
    walker = Walker(TOKENIZER, random.Random(7))
    return [TOKENIZER.decode(walker.answer(grammar)) for _ in range(count)]


def takes(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the whole text is an answer by the plan, token by token, and complete."""
    matcher = grammar.begin()
    for token in TOKENIZER.encode(text, add_special=False):
        mask = matcher.mask()
        assert mask is not None
        if token not in allowed(mask, TOKENIZER.vocab_size):
            return False
        matcher.accept(token)
    last = matcher.mask()
    assert last is not None
    return matcher.done or bool(TOKENIZER.eos_ids & set(allowed(last, TOKENIZER.vocab_size)))


def test_a_schema_gives_values_of_it_and_nothing_else(grammars: Grammars) -> None:
    properties = {"n": {"type": "integer", "minimum": 3, "maximum": 12}, "w": {"enum": ["a", "b"]}}
    grammar = grammars.json_schema({"type": "object", "properties": properties, "required": ["n"]})
    for answer in answers(grammar):
        value = json.loads(answer)
        assert 3 <= value["n"] <= 12 and value.get("w", "a") in ("a", "b")
    assert takes(grammar, '{"n": 5, "w": "b"}')
    assert takes(grammar, '{\n  "n": 5\n}')
    assert not takes(grammar, '{"n": 13}')
    assert not takes(grammar, '{"n": 5')
    assert not takes(grammar, '{"n": 5} and more')


def test_json_object_gives_objects(grammars: Grammars) -> None:
    assert all(isinstance(json.loads(answer), dict) for answer in answers(grammars.json_schema({"type": "object"})))


def test_white_space_cannot_go_on_for_ever(grammars: Grammars) -> None:
    assert not takes(grammars.json_schema({"type": "object"}), '{"a":' + " " * 3 + "1}")
    assert not takes(grammars.json_schema({"type": "object"}), '{"a":' + "\n" * 3 + "1}")


def test_a_regular_expression_must_match_all_of_the_answer(grammars: Grammars) -> None:
    grammar = grammars.regex("[a-c]{2,4}(-[0-9]+)?")
    assert all(re.fullmatch("[a-c]{2,4}(-[0-9]+)?", answer) for answer in answers(grammar))
    assert not takes(grammar, "abcabc")


def test_a_choice_is_one_of_its_options(grammars: Grammars) -> None:
    options = ["yes", "no", 'a "quoted\\ one\n', "naïve ☃", "no way"]
    grammar = grammars.choice(options)
    assert set(answers(grammar, 60)) == set(options)


def test_a_lark_grammar_is_followed(grammars: Grammars) -> None:
    grammar = grammars.lark('start: "(" start ")" | NAME\nNAME: /[a-z]+/')
    for answer in answers(grammar):
        assert re.fullmatch(r"\(*[a-z]+\)*", answer) and answer.count("(") == answer.count(")")


def test_text_is_free_up_to_a_trigger_and_what_that_begins_is_one_of_its_tags(grammars: Grammars) -> None:
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tags = [StructuralTag("<f=a>", number, "</f>"), StructuralTag("<f=b>", {"type": "array"}, "</f>")]
    grammar = grammars.structural_tags(
        [*tags, StructuralTag("<|mark|>x", {"const": 1}, "!")], ["<f=", "<|mark|>", "<f=a"]
    )
    for answer in answers(grammar):
        for begun in answer.split("<f=")[1:]:
            name, _, rest = begun.partition(">")
            value = json.loads(rest.partition("</f>")[0])
            assert isinstance(value["n"], int) if name == "a" else isinstance(value, list)
    assert takes(grammar, 'I see <f> and <f=a>{"n": 3}</f>, then <f=b>[1, "x"]</f> and <|mark|>x1!.')
    assert takes(grammar, "Only text, 3 < 4.") and takes(grammar, "<f=b>[]</f>")
    assert (
        not takes(grammar, '<f=a>{"n": "three"}</f>') and not takes(grammar, "<f=c>") and not takes(grammar, "<f=b>[1]")
    )


def test_lark_may_name_special_tokens(grammars: Grammars) -> None:
    grammar = grammars.lark('start: <|mark|> "a"')
    assert takes(grammar, "<|mark|>a")


def test_the_name_of_a_special_token_in_a_text_is_not_that_token(grammars: Grammars) -> None:
    tokens = Walker(TOKENIZER, random.Random(0)).answer(grammars.choice(["<|mark|>"]))
    assert len(tokens) > 1 and not TOKENIZER.special_ids & set(tokens)


def test_a_token_that_ends_answers_never_comes_before_the_end(grammars: Grammars) -> None:
    matcher = grammars.json_schema({"type": "string", "maxLength": 3}).begin()
    matcher.accept(TOKENIZER.encode('"', add_special=False)[0])
    mask = matcher.mask()
    assert mask is not None and not TOKENIZER.eos_ids & set(allowed(mask, TOKENIZER.vocab_size))


def test_rows_of_the_model_that_are_no_tokens_are_never_allowed(grammars: Grammars) -> None:
    mask = grammars.lark("start: /(?s:.*)/").begin().mask()
    assert mask is not None and len(mask) * 32 >= TOKENIZER.vocab_size + 40
    assert max(allowed(mask, len(mask) * 32)) < TOKENIZER.vocab_size


def test_a_finished_grammar_allows_stop_tokens_alone_and_says_that_it_is_done(grammars: Grammars) -> None:
    matcher = grammars.choice(["a"]).begin()
    assert not matcher.done
    matcher.accept(TOKENIZER.encode("a", add_special=False)[0])
    mask = matcher.mask()
    assert matcher.done and mask is not None
    assert (
        set(allowed(mask, TOKENIZER.vocab_size)) == TOKENIZER.eos_ids == set(TOKENIZER.encode(END, add_special=False))
    )


def test_a_token_that_is_not_allowed_breaks_the_matcher_for_good(grammars: Grammars) -> None:
    matcher = grammars.choice(["a"]).begin()
    with pytest.raises(GrammarViolated):
        matcher.accept(TOKENIZER.encode("b", add_special=False)[0])
    assert not matcher.done
    with pytest.raises(GrammarViolated):
        matcher.mask()


def test_matchers_of_one_grammar_know_nothing_of_each_other(grammars: Grammars) -> None:
    grammar = grammars.choice(["ab", "cd"])
    first, second = grammar.begin(), grammar.begin()
    first.accept(TOKENIZER.encode("a", add_special=False)[0])
    mask = second.mask()
    assert mask is not None
    assert {TOKENIZER.token_text(token) for token in allowed(mask, TOKENIZER.vocab_size)} == {"a", "c"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "shoe-size"}, "shoe-size"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "object", "minProperties": 3}, "minProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "shoe"}, "shoe"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        (False, "no value can satisfy it"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value can satisfy it: incompatible types"),
        ({"enum": []}, "no value can satisfy it"),
        ({"type": "integer", "minimum": "a"}, "minimum has to be a number"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ],
)
def test_what_a_schema_asks_for_and_cannot_be_had_is_refused_by_name(
    grammars: Grammars, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(named)) as caught:
        grammars.json_schema(schema, param="response_format.json_schema.schema")
    assert caught.value.status == 400 and caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("pattern", ["[a-", "(", "(?=a)", r"(a)\1", r"\bx"])
def test_an_invalid_regular_expression_is_refused(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(f"the regular expression {pattern} ")):
        grammars.regex(pattern)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "there is no rule 'start'"),
        ("start: nowhere", "line 1, column 8: there is no rule or terminal 'nowhere'"),
        ("start: <|unknown|>", "line 1, column 8: the model has no special token '<|unknown|>'"),
        ('start: "a', "not closed"),
        ("{}", "line 1, column 1: a rule"),
        ('{"grammars": []}', "line 1, column 1: a rule"),
        ("start ::= x", "'=' is not allowed here"),
        ('start: "a"\nstart: "b"', "line 2, column 8: there are two rules 'start'"),
        ("start: B\nB: A\nA: B", "defined by itself"),
    ],
)
def test_an_invalid_lark_grammar_is_refused_in_plain_words(grammars: Grammars, source: str, words: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(words)):
        grammars.lark(source)


@pytest.mark.parametrize("options", [[], [""], ["a", ""], [str(n) for n in range(limits.MOST_CHOICES + 1)]])
def test_a_choice_of_nothing_or_of_too_much_is_refused(grammars: Grammars, options: list[str]) -> None:
    with pytest.raises(BadRequest):
        grammars.choice(options)


def test_what_is_too_large_is_refused_before_anything_is_made_of_it(grammars: Grammars) -> None:
    large = "a" * (limits.MOST_GRAMMAR_CHARS + 1)
    for ask in (grammars.regex, grammars.lark, lambda text: grammars.choice([text])):
        with pytest.raises(BadRequest, match="too large"):
            ask(large)
    with pytest.raises(BadRequest, match="too large"):
        grammars.json_schema({"title": large})


def _chain(length: int) -> dict[str, Any]:
    links = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


BOMBS: dict[str, Any] = {
    "runs for minutes": {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]},
    "overflows the stack": _chain(3000),
    "has too many properties to follow": _properties(2000),
    "doubles with each level": {"allOf": [{"anyOf": [{"const": 8 * n + m} for m in range(4)]} for n in range(12)]},
    "refers to itself": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_is_a_bomb_is_refused_and_the_next_one_served(grammars: Grammars, name: str) -> None:
    with pytest.raises(BadRequest):
        grammars.json_schema(BOMBS[name])
    assert takes(grammars.json_schema({"const": name}), json.dumps(name))


def test_a_bomb_is_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = BOMBS["runs for minutes"]
    with pytest.raises(BadRequest):
        grammars.json_schema(bomb)
    monkeypatch.setattr(CompilerProcesses, "problem", lambda trials, grammar: pytest.fail("it was tried again"))
    with pytest.raises(BadRequest):
        grammars.json_schema(bomb)


def test_other_threads_go_on_while_a_bomb_is_tried(grammars: Grammars) -> None:
    bomb = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 29)]}
    failures: list[IngotError] = []

    def light() -> None:
        try:
            grammars.json_schema(bomb)
        except BadRequest as error:
            failures.append(error)

    known = grammars.json_schema({"type": "object"})
    thread = threading.Thread(target=light)
    thread.start()
    beats = 0
    while thread.is_alive():
        known.begin().mask()
        beats += 1
        thread.join(0.001)
    assert failures and beats > 20


@pytest.mark.parametrize(
    "pattern", ["(a?){500}a{500}", ".*a.{400}.*b.{400}", "(.{0,100}b){0,100}c", r"(\w{1,50}\W{1,50}){1,50}"]
)
def test_a_pattern_that_explodes_has_masks_or_is_refused(grammars: Grammars, pattern: str) -> None:
    """Each mask has a bound of its own; past it the grammar is abandoned, never the bound."""
    chance = random.Random(3)
    try:
        matcher = grammars.regex(pattern).begin()
        for _ in range(60):
            mask = matcher.mask()
            assert mask is not None
            choices = [token for token in allowed(mask, TOKENIZER.vocab_size) if token not in TOKENIZER.eos_ids]
            if not choices:
                break
            matcher.accept(chance.choice(choices))
    except BadRequest:
        pass  # while compiling, or later: either way it is refused, and pytest's limit is not reached


def test_a_machine_that_stalls_makes_no_grammar_too_complex(grammars: Grammars) -> None:
    grammar = grammars.regex("[a-z]+ this one is kept")
    assert isinstance(grammar, LlguidanceGrammar)
    for _ in range(limits.SLOW_MASKS):
        grammar.took(60.0)
    for _ in range(200):
        grammar.took(60.0)
        for _ in range(limits.SLOW_SHARE):
            grammar.took(limits.SLOW_MASK_S)
    assert not grammar.abandoned
    with pytest.raises(GrammarTooComplex):
        for _ in range(400):
            grammar.took(2 * limits.SLOW_MASK_S)
    assert grammar.abandoned


def test_a_grammar_that_costs_too_much_per_token_is_given_up_in_all_its_answers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammars.regex("[a-z]+ this one is given up")
    matcher, other = grammar.begin(), grammar.begin()
    monkeypatch.setattr(limits, "SLOW_MASK_S", -1.0)
    monkeypatch.setattr(limits, "SLOW_MASKS", 0)
    monkeypatch.setattr(limits, "SLOW_SHARE", 1000)
    for each in (matcher, other):
        with pytest.raises(GrammarTooComplex):
            each.mask()
    for again in (grammar.begin, lambda: grammars.regex("[a-z]+ this one is given up")):
        with pytest.raises(GrammarTooComplex):
            again()


def test_grammars_are_compiled_once_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CACHED_GRAMMARS", 2)
    grammars = Grammars(TOKENIZER, TOKENIZER.vocab_size)
    try:
        first = grammars.choice(["a"])
        assert grammars.choice(["a"]) is first
        grammars.choice(["b"])
        grammars.choice(["c"])
        assert grammars.choice(["a"]) is not first
    finally:
        grammars.close()


def test_a_model_without_a_stop_token_can_still_follow_a_grammar() -> None:
    from ingot.text.tokenizer.tokenizer import Tokenizer

    endless = Tokenizer(TOKENIZER._vocabulary, named={})
    assert not endless.eos_ids
    grammars = Grammars(endless, endless.vocab_size)
    try:
        matcher = grammars.choice(["ab"]).begin()
        for token in endless.encode("ab", add_special=False):
            assert not matcher.done
            matcher.accept(token)
        assert matcher.done
    finally:
        grammars.close()
