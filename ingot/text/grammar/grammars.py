"""One model's grammars: made from what clients ask for, tried, compiled and kept."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.errors import BadRequest, Unavailable
from ingot.text.grammar import limits
from ingot.text.grammar.answer import AllPlans, CallPlan, composed
from ingot.text.grammar.calls import (
    CallChoice,
    GuidedTool,
    StructuralTag,
    begun_calls_grammar,
    call_grammar,
    structural_tags_grammar,
)
from ingot.text.grammar.compiled import TOO_COMPLEX, CompiledGrammar
from ingot.text.grammar.lark import Rules, json_schema, quoted
from ingot.text.grammar.lazy_calls import HeldCalls
from ingot.text.grammar.matcher import GrammarTooComplex, GuidePlan
from ingot.text.grammar.pending import Uncompiled, prepared
from ingot.text.grammar.problems import in_our_words
from ingot.text.grammar.schema_checks import check_schema, place_in, plain_schema
from ingot.text.grammar.trial import Trials
from ingot.text.grammar.vocabulary import Lexicon
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.format import Format

log = logging.getLogger("ingot.grammar")


class Grammars:
    """For any thread. Everything here may take a while: not for an event loop, nor for the engine.

    All of it raises BadRequest for what is invalid, cannot be held to (it says what), is too large or takes too long
    to compile, with `param` as the field that is to blame; and Unavailable when too many others are being compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, CompiledGrammar | str] = OrderedDict()
        self._lexicon: Lexicon | None = None
        self._trials: Trials | None = None

    def prepare(self) -> None:
        """Read the vocabulary. Others wait for it, so do it before anyone is served; else the first to ask does."""
        self._ready()

    def close(self) -> None:
        if self._trials is not None:
            self._trials.close()

    def json_object(self) -> GuidePlan:
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any] | bool, *, param: str | None = None) -> GuidePlan:
        check_schema(schema, param)
        plain = plain_schema(schema)
        return self._compiled(_json_grammar(plain), "The schema", param, blamed=lambda problem: _blamed(plain, problem))

    def regex(self, pattern: str, *, param: str | None = None) -> GuidePlan:
        """An answer that the whole of `pattern` matches, in the syntax of Rust's regex crate."""
        from llguidance import LLMatcher

        _check_size(len(pattern), "The regular expression", param)
        return self._compiled(LLMatcher.grammar_from_regex(pattern), "The regular expression", param)

    def choice(self, options: Sequence[str], *, param: str | None = None) -> GuidePlan:
        """An answer that is one of `options`."""
        if not options or not all(options):
            raise BadRequest("A choice needs at least one option, and none of them empty.", param=param)
        if len(options) > limits.MOST_CHOICES:
            raise BadRequest(f"A choice may have at most {limits.MOST_CHOICES} options.", param=param)
        _check_size(sum(map(len, options)), "The choice", param)
        # One terminal: the parser would have to follow every alternative at once, the lexer need not.
        written = " | ".join(quoted(option) for option in dict.fromkeys(options))
        return self._compiled(_lark_grammar(f"start: T\nT: {written}"), "The choice", param)

    def lark(self, source: str, *, param: str | None = None) -> GuidePlan:
        """An answer by a Lark grammar, in llguidance's dialect."""
        _check_size(len(source), "The grammar", param)
        return self._compiled(_lark_grammar(source), "The grammar", param)

    def structural_tags(
        self, tags: Sequence[StructuralTag], triggers: Sequence[str], *, param: str | None = None
    ) -> GuidePlan:
        """Free text in which what a trigger begins is one of the tags, whose content is held to its schema."""
        for tag in tags:
            if not any(map(tag.begin.startswith, triggers)):
                raise BadRequest(f"No trigger is the beginning of the tag {tag.begin[:100]!r}.", param=param)
            check_schema(tag.schema, param)
        plain = [replace(tag, schema=plain_schema(tag.schema)) for tag in tags]
        source = structural_tags_grammar(Rules(self._ready().special_ids), plain, triggers)
        return self._compiled(_lark_grammar(source), "The structural tag", param)

    def tools(
        self,
        format: Format,
        tools: Sequence[GuidedTool],
        choice: CallChoice,
        *,
        parallel: bool,
        opened: bool = False,
        param: str | None = None,
    ) -> GuidePlan | None:
        """Answers that call tools: must, or `auto`, may. None where nothing need be held to: auto without strict tools.

        A required call comes without text before it: one or more of them where `parallel`, else exactly one. A named
        function is called once. `opened`: the prompt already ends with the marker that opens calls.
        """
        if choice == "auto" and not any(tool.strict for tool in tools):
            return None
        rules = Rules(self._ready().special_ids)
        tools = _plain(tools)

        def blamed(problem: str) -> str:
            return _blamed_tool(tools, problem)

        try:
            source = call_grammar(rules, format, tools, choice, parallel=parallel, opened=opened)
        except BadRequest as error:
            raise type(error)(blamed(str(error)), param=param) from None
        return CallPlan(self._compiled(_lark_grammar(source), "The tools' schemas", param, blamed=blamed))

    def begun_calls(
        self, format: Format, tools: Sequence[GuidedTool], start: ThinkingStart, *, parallel: bool
    ) -> tuple[GuidePlan | None, tuple[str, ...]]:
        """Answers that are free but for the calls that they begin, and the tools whose schemas those cannot be held to.

        Never raises: what cannot be held is not. Where no call can be, the plan is None.
        """
        tools = _plain(tools)
        if format.channels is not None and not format.channels.names_calls:
            return None, tuple(tool.name for tool in tools)
        key = _key(repr((format.forms, format.channels, parallel, *tools)))
        ready = prepared.get()
        found = (ready or {}).get(key) or self._kept(key)
        if found is None and ready is not None:
            raise Uncompiled(key, lambda: self._compile_begun(key, format, tools, parallel), optional=True)
        if found is None:
            try:
                found = self._compile_begun(key, format, tools, parallel)
            except Unavailable as error:
                found = str(error)
        if isinstance(found, str) or found.given_up:
            return None, tuple(tool.name for tool in tools)
        unseen = self._tokenizer.special_ids - self._tokenizer.special_within(format.markers)
        names = tuple(tool.name for tool in tools)
        plan = HeldCalls(self._ready(), found, format, names, start, unseen)
        return plan.prepare(), found.unheld

    def answer(
        self,
        plan: GuidePlan | None,
        format: Format,
        start: ThinkingStart,
        *,
        calls: GuidePlan | None = None,
        begun: GuidePlan | None = None,
        budget: int | None = None,
        may_think: bool = False,
    ) -> GuidePlan | None:
        """A whole answer: thinking, which is free but for a `budget` of tokens, and then what `plan` says, or `calls`.

        Calls, which `tools` makes of required ones, may come instead of what the plan says. Without either, calls may
        come that are held once they have `begun`. The prompt leaves the
        answer within a thinking part or before it (`start`); there, the model may open one if it `may_think`. Without
        a plan, what follows the thinking is free. None where all is.
        """
        held = composed(self._ready(), plan, format, start, calls=calls, budget=budget, may_think=may_think)
        return AllPlans((held, begun)) if held and begun else held or begun

    def _ready(self) -> Lexicon:
        with self._lock:
            if self._lexicon is None:
                self._lexicon = Lexicon(self._tokenizer, self._vocab)
                self._trials = Trials(self._lexicon)
                assert self._lexicon.library is not None
            return self._lexicon

    def _compiled(
        self, grammar: str, what: str, param: str | None, blamed: Callable[[str], str] = str
    ) -> CompiledGrammar:
        """`blamed`: a problem, with what of the client's it is about."""
        _check_size(len(grammar), what, param, limits.MOST_COMPILED_CHARS)
        key = _key(grammar)
        ready = prepared.get()
        found = (ready or {}).get(key) or self._kept(key)
        if found is None and ready is not None:
            raise Uncompiled(key, lambda: self._compile(key, grammar))
        if found is None:
            found = self._compile(key, grammar)
        if isinstance(found, str):
            raise BadRequest(f"{what} cannot be held to: {blamed(found)}", param=param)
        if found.given_up:
            raise GrammarTooComplex(TOO_COMPLEX, param=param)
        return found

    def _compile(self, key: bytes, grammar: str) -> CompiledGrammar | str:
        """The grammar, or what is wrong with it; kept for those who come next, others of its tenant among them."""
        if (known := self._kept(key)) is not None:
            return known
        found = self._compiled_anew(grammar)
        self._keep(key, found)
        return found

    def _compile_begun(
        self, key: bytes, format: Format, tools: Sequence[GuidedTool], parallel: bool
    ) -> CompiledGrammar | str:
        """With as many of the schemas as can be held to: all of them, else those that can be alone, else none."""
        if (known := self._kept(key)) is not None:
            return known
        unheld: set[str] = set()
        found = self._begun(format, tools, parallel)
        if isinstance(found, str):
            deadline = time.monotonic() + limits.COMPILE_WALL_S
            unheld = {
                tool.name
                for tool in tools
                if time.monotonic() > deadline or isinstance(self._begun(format, [tool], parallel), str)
            }
            found = self._begun(format, _without_schemas(tools, unheld), parallel)
        if isinstance(found, str):
            unheld = {tool.name for tool in tools}
            found = self._begun(format, _without_schemas(tools, unheld), parallel)
        if isinstance(found, str):
            log.warning("calls that models begin are not held to a grammar in the format %s: %s", format.name, found)
        elif unheld:
            found.unheld = tuple(sorted(unheld))
            log.info("calls of %s are not held to their schemas, which cannot be", ", ".join(found.unheld)[:200])
        self._keep(key, found)
        return found

    def _begun(self, format: Format, tools: Sequence[GuidedTool], parallel: bool) -> CompiledGrammar | str:
        rules = Rules(self._ready().special_ids)
        try:
            source = begun_calls_grammar(rules, format, tools, parallel=parallel)
        except BadRequest as error:
            return str(error)
        if len(source) > limits.MOST_COMPILED_CHARS:
            return "it is too large"
        return self._compiled_anew(_lark_grammar(source))

    def _compiled_anew(self, grammar: str) -> CompiledGrammar | str:
        from llguidance import LLMatcher

        lexicon = self._ready()
        assert self._trials is not None
        problem = self._trials.problem(grammar)
        if problem is None:
            matcher = LLMatcher(lexicon.library, grammar, log_level=0, limits=limits.parser_limits())
            matcher.compute_bitmask()
            problem = matcher.get_error()
        return in_our_words(problem) if problem else CompiledGrammar(matcher)

    def _kept(self, key: bytes) -> CompiledGrammar | str | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _keep(self, key: bytes, found: CompiledGrammar | str) -> None:
        with self._lock:
            self._known[key] = found
            while len(self._known) > limits.KEPT:
                self._known.popitem(last=False)


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


def _plain(tools: Sequence[GuidedTool]) -> list[GuidedTool]:
    return [replace(tool, parameters=plain_schema(tool.parameters)) for tool in tools]


def _blamed(schema: Any, problem: str, whose: str = "") -> str:
    place = place_in(schema, problem)
    return problem if place is None else f"{problem.removesuffix('.')} ({whose}at {place})"


def _blamed_tool(tools: Sequence[GuidedTool], problem: str) -> str:
    """Strict tools are the first to blame: others are held to what they can be."""
    for tool in sorted(tools, key=lambda tool: not tool.strict):
        if (told := _blamed(tool.parameters, problem, f"tool '{tool.name}', ")) != problem:
            return told
    return problem


def _without_schemas(tools: Sequence[GuidedTool], names: Collection[str]) -> list[GuidedTool]:
    return [GuidedTool(tool.name) if tool.name in names else tool for tool in tools]


def _json_grammar(schema: Mapping[str, Any] | bool) -> str:
    return json.dumps({"grammars": [{"json_schema": json_schema(schema)}]})


def _lark_grammar(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def _check_size(size: int, what: str, param: str | None, most: int = limits.MOST_CHARS) -> None:
    if size > most:
        raise BadRequest(f"{what} is too large: {size} characters, where at most {most} are taken.", param=param)
