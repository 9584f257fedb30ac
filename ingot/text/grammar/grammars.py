"""One model's grammars: made from what clients ask for, tried, compiled and cached.

The library that compiles them bounds most of its work, but not all of it: there are short schemas for which it runs for
minutes, and ones that crash it. So each grammar is compiled in a process of its own first (`CompilerProcess`, which
runs `compile_process`), which may take so much processor time and no more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.errors import BadRequest, Unavailable
from ingot.text.grammar import limits
from ingot.text.grammar.answer import CallAnswerGrammar, CombinedGrammar, compose_answer_grammar
from ingot.text.grammar.calls import (
    CallChoice,
    GrammarTool,
    StructuralTag,
    call_grammar,
    lazy_calls_grammar,
    structural_tags_grammar,
)
from ingot.text.grammar.compiled import TOO_COMPLEX, LlguidanceGrammar
from ingot.text.grammar.lark import LarkRules, quote_lark_text, schema_with_options
from ingot.text.grammar.lazy_calls import LazyCallGrammar
from ingot.text.grammar.limits import (
    COMPILE_WALL_S,
    COMPILER_PROCESSES,
    WAIT_S,
    check_schema,
    describe_problem,
    plain_schema,
    problem_path,
)
from ingot.text.grammar.matcher import CompiledGrammar, GrammarTooComplex
from ingot.text.grammar.pending import GrammarPending, prepared_grammars
from ingot.text.grammar.vocabulary import GrammarVocabulary
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.format import Format

log = logging.getLogger("ingot.grammar")


class Grammars:
    """For any thread. Everything here may take a while: not for an event loop, nor for the engine.

    All of it raises BadRequest for what is invalid, cannot be enforced, is too large or takes too long to compile, with
    `param` as the field to blame; and Unavailable when too many others are being compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, LlguidanceGrammar | str] = OrderedDict()
        self._vocabulary: GrammarVocabulary | None = None
        self._compilers: CompilerProcesses | None = None

    def prepare(self) -> None:
        """Read the vocabulary. Others wait for it, so do it before anyone is served; else the first to ask does."""
        self._ready()

    def close(self) -> None:
        if self._compilers is not None:
            self._compilers.close()

    def json_schema(self, schema: Mapping[str, Any] | bool, *, param: str | None = None) -> CompiledGrammar:
        check_schema(schema, param)
        plain = plain_schema(schema)
        grammar = json.dumps({"grammars": [{"json_schema": schema_with_options(plain)}]})
        return self._compiled(grammar, "The schema", param, blamed=lambda problem: _blame_schema(plain, problem))

    def regex(self, pattern: str, *, param: str | None = None) -> CompiledGrammar:
        """An answer that the whole of `pattern` matches, in the syntax of Rust's regex crate."""
        from llguidance import LLMatcher

        _check_size(len(pattern), "The regular expression", param)
        return self._compiled(LLMatcher.grammar_from_regex(pattern), "The regular expression", param)

    def choice(self, options: Sequence[str], *, param: str | None = None) -> CompiledGrammar:
        """An answer that is one of `options`."""
        if not options or not all(options):
            raise BadRequest("A choice needs at least one option, and none of them empty.", param=param)
        if len(options) > limits.MOST_CHOICES:
            raise BadRequest(f"A choice may have at most {limits.MOST_CHOICES} options.", param=param)
        _check_size(sum(map(len, options)), "The choice", param)
        # One terminal: the parser would have to follow every alternative at once, the lexer need not.
        written = " | ".join(quote_lark_text(option) for option in dict.fromkeys(options))
        return self._compiled(_lark_grammar(f"start: T\nT: {written}"), "The choice", param)

    def lark(self, source: str, *, param: str | None = None) -> CompiledGrammar:
        """An answer by a Lark grammar, in llguidance's dialect."""
        _check_size(len(source), "The grammar", param)
        return self._compiled(_lark_grammar(source), "The grammar", param)

    def structural_tags(
        self, tags: Sequence[StructuralTag], triggers: Sequence[str], *, param: str | None = None
    ) -> CompiledGrammar:
        """Free text in which a trigger begins one of the tags, whose content follows its schema."""
        for tag in tags:
            if not any(map(tag.begin.startswith, triggers)):
                raise BadRequest(f"No trigger is the beginning of the tag {tag.begin[:100]!r}.", param=param)
            check_schema(tag.schema, param)
        plain = [replace(tag, schema=plain_schema(tag.schema)) for tag in tags]
        source = structural_tags_grammar(LarkRules(self._ready().special_ids), plain, triggers)
        return self._compiled(_lark_grammar(source), "The structural tag", param)

    def tools(
        self,
        format: Format,
        tools: Sequence[GrammarTool],
        choice: CallChoice,
        *,
        parallel: bool,
        param: str | None = None,
    ) -> CompiledGrammar | None:
        """Answers that call tools: must, or `auto`, may. None where nothing is constrained: auto without strict tools.

        A required call comes without text before it: one or more of them where `parallel`, else exactly one. A named
        function is called once.
        """
        if choice == "auto" and not any(tool.strict for tool in tools):
            return None
        rules = LarkRules(self._ready().special_ids)
        tools = _plain_tools(tools)

        def blamed(problem: str) -> str:
            return _blame_tool(tools, problem)

        try:
            source = call_grammar(rules, format, tools, choice, parallel=parallel)
        except BadRequest as error:
            raise type(error)(blamed(str(error)), param=param) from None
        return CallAnswerGrammar(self._compiled(_lark_grammar(source), "The tools' schemas", param, blamed=blamed))

    def begun_calls(
        self, format: Format, tools: Sequence[GrammarTool], start: ThinkingStart, *, parallel: bool
    ) -> tuple[CompiledGrammar | None, tuple[str, ...]]:
        """Answers that are free except for the calls that they begin, and the tools whose schemas are not enforced.

        Never raises: what cannot be enforced is not. Where no call can be, the grammar is None.
        """
        tools = _plain_tools(tools)
        if format.channels is not None and not format.channels.names_calls:
            return None, tuple(tool.name for tool in tools)
        key = _grammar_key(repr((format.forms, format.channels, parallel, *tools)))
        try:
            found = self._find(key, lambda: self._compile_lazy_calls(format, tools, parallel), optional=True)
        except Unavailable as error:
            found = str(error)
        if isinstance(found, str) or found.abandoned:
            return None, tuple(tool.name for tool in tools)
        hidden_ids = self._tokenizer.special_ids - self._tokenizer.special_within(format.markers)
        names = tuple(tool.name for tool in tools)
        plan = LazyCallGrammar(self._ready(), found, format, names, start, hidden_ids)
        return plan.prepare(), found.unenforced

    def answer(
        self,
        plan: CompiledGrammar | None,
        format: Format,
        start: ThinkingStart,
        *,
        calls: CompiledGrammar | None = None,
        begun: CompiledGrammar | None = None,
        budget: int | None = None,
        may_think: bool = False,
    ) -> CompiledGrammar | None:
        """A whole answer: thinking, which is free up to a `budget` of tokens, and then `plan`, a grammar, or `calls`.

        Calls, a grammar of required ones that `tools` makes, may come instead of the plan. Without either, calls are
        constrained once they have `begun`. The answer begins within a thinking part or before it (`start`); there, the
        model may open one if it `may_think`. Without a plan, what follows the thinking is free. None where all is.
        """
        grammar = compose_answer_grammar(
            self._ready(), plan, format, start, calls=calls, budget=budget, may_think=may_think
        )
        return CombinedGrammar((grammar, begun)) if grammar and begun else grammar or begun

    def _ready(self) -> GrammarVocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer, self._vocab)
                self._compilers = CompilerProcesses(self._vocabulary)
                assert self._vocabulary.library is not None
            return self._vocabulary

    def _compiled(
        self, grammar: str, what: str, param: str | None, blamed: Callable[[str], str] = str
    ) -> LlguidanceGrammar:
        """`blamed`: a problem, with what of the client's it is about."""
        _check_size(len(grammar), what, param, limits.MOST_COMPILED_CHARS)
        key = _grammar_key(grammar)
        found = self._find(key, lambda: self._compile(grammar))
        if isinstance(found, str):
            raise BadRequest(f"{what} cannot be enforced: {blamed(found)}", param=param)
        if found.abandoned:
            raise GrammarTooComplex(TOO_COMPLEX, param=param)
        return found

    def _find(
        self, key: bytes, compile: Callable[[], LlguidanceGrammar | str], *, optional: bool = False
    ) -> LlguidanceGrammar | str:
        """The grammar of this key, or what is wrong with it: cached, else compiled, now or by whoever catches
        GrammarPending. It is cached for later requests, also those of other tenants."""

        def compile_once() -> LlguidanceGrammar | str:
            if (cached := self._cached(key)) is not None:
                return cached
            compiled = compile()
            with self._lock:
                self._cache[key] = compiled
                while len(self._cache) > limits.MOST_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
            return compiled

        ready = prepared_grammars.get()
        found = (ready or {}).get(key) or self._cached(key)
        if found is None and ready is not None:
            raise GrammarPending(key, compile_once, optional=optional)
        return compile_once() if found is None else found

    def _compile_lazy_calls(
        self, format: Format, tools: Sequence[GrammarTool], parallel: bool
    ) -> LlguidanceGrammar | str:
        """With as many of the schemas as can be enforced: all of them, else those that can be alone, else none."""
        unenforced: set[str] = set()
        found = self._compile_calls_of(format, tools, parallel)
        if isinstance(found, str):
            deadline = time.monotonic() + limits.COMPILE_WALL_S
            unenforced = {
                tool.name
                for tool in tools
                if time.monotonic() > deadline or isinstance(self._compile_calls_of(format, [tool], parallel), str)
            }
            found = self._compile_calls_of(format, _without_schemas(tools, unenforced), parallel)
        if isinstance(found, str):
            unenforced = {tool.name for tool in tools}
            found = self._compile_calls_of(format, _without_schemas(tools, unenforced), parallel)
        if isinstance(found, str):
            log.warning(
                "calls that models begin are not constrained by a grammar in the format %s: %s", format.name, found
            )
        elif unenforced:
            found.unenforced = tuple(sorted(unenforced))
            log.info(
                "the schemas of %s cannot be enforced in calls that models begin", ", ".join(found.unenforced)[:200]
            )
        return found

    def _compile_calls_of(
        self, format: Format, tools: Sequence[GrammarTool], parallel: bool
    ) -> LlguidanceGrammar | str:
        rules = LarkRules(self._ready().special_ids)
        try:
            source = lazy_calls_grammar(rules, format, tools, parallel=parallel)
        except BadRequest as error:
            return str(error)
        if len(source) > limits.MOST_COMPILED_CHARS:
            return "it is too large"
        return self._compile(_lark_grammar(source))

    def _compile(self, grammar: str) -> LlguidanceGrammar | str:
        from llguidance import LLMatcher

        vocabulary = self._ready()
        assert self._compilers is not None
        problem = self._compilers.problem(grammar)
        if problem is None:
            matcher = LLMatcher(vocabulary.library, grammar, log_level=0, limits=limits.parser_limits())
            matcher.compute_bitmask()
            problem = matcher.get_error()
        return describe_problem(problem) if problem else LlguidanceGrammar(matcher)

    def _cached(self, key: bytes) -> LlguidanceGrammar | str | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)


def _grammar_key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


def _plain_tools(tools: Sequence[GrammarTool]) -> list[GrammarTool]:
    return [replace(tool, parameters=plain_schema(tool.parameters)) for tool in tools]


def _blame_schema(schema: Any, problem: str, whose: str = "") -> str:
    path = problem_path(schema, problem)
    return problem if path is None else f"{problem.removesuffix('.')} ({whose}at {path})"


def _blame_tool(tools: Sequence[GrammarTool], problem: str) -> str:
    """Strict tools are the first to blame: of others, what cannot be enforced is left out."""
    for tool in sorted(tools, key=lambda tool: not tool.strict):
        if (described := _blame_schema(tool.parameters, problem, f"tool '{tool.name}', ")) != problem:
            return described
    return problem


def _without_schemas(tools: Sequence[GrammarTool], names: Collection[str]) -> list[GrammarTool]:
    return [GrammarTool(tool.name) if tool.name in names else tool for tool in tools]


def _lark_grammar(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def _check_size(size: int, what: str, param: str | None, most: int = limits.MOST_GRAMMAR_CHARS) -> None:
    if size > most:
        raise BadRequest(f"{what} is too large: {size} characters, where at most {most} are allowed.", param=param)


COMPILER_START_S = 20.0  # longest that the process may take to start, on a machine that is busy with other things


class CompilerProcess:
    """One process, started when first needed and again after it was killed. For any thread; one tries at a time."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def problem(self, grammar: str) -> str | None:
        """What is wrong with the grammar; None if nothing is. Raises Unavailable when too many others are tried."""
        if not self._lock.acquire(timeout=WAIT_S):
            raise Unavailable("The server is busy compiling other grammars", retry_after=WAIT_S)
        try:
            return self._try_compile(grammar)
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._end()

    @property
    def idle(self) -> bool:
        return not self._lock.locked()

    def _try_compile(self, grammar: str) -> str | None:
        if self._process is None:
            self._start()
        answer = self._exchange(json.dumps(grammar), COMPILE_WALL_S)
        if answer is None:
            log.warning("a grammar of %d characters took too long to compile, or crashed the compiler", len(grammar))
            self._end()
            return "it is too complex to compile"
        found: str | None = json.loads(answer)
        return found

    def _start(self) -> None:
        # -P: what lies in the working directory is nothing to import.
        command = [sys.executable, "-P", "-m", "ingot.text.grammar.compile_process"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        vocabulary = self._vocabulary
        stop = min(vocabulary.stops, default=vocabulary.vocab)
        described = {"vocab": vocabulary.vocab, "special": vocabulary.special_ids, "stop": stop}
        if self._exchange(json.dumps(described) + '\n"start: /a/"', COMPILER_START_S) is None:
            self._end()
            raise Unavailable("The process that compiles grammars does not start; see the server's log")

    def _exchange(self, line: str, seconds: float) -> bytes | None:
        """The answer to a line, or None if the process ends or takes too long."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        deadline = time.monotonic() + seconds
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready or not (read := os.read(self._process.stdout.fileno(), 1 << 16)):
                return None
            answer += read
        return answer

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None


class CompilerProcesses:
    """As many processes as grammars may be tried at once. For any thread."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._compilers = [CompilerProcess(vocabulary) for _ in range(COMPILER_PROCESSES)]

    def problem(self, grammar: str) -> str | None:
        """As `CompilerProcess` has it, in the first process that is idle, so that no more are started than are
        needed."""
        compiler = next((each for each in self._compilers if each.idle), self._compilers[0])
        return compiler.problem(grammar)

    def close(self) -> None:
        for compiler in self._compilers:
            compiler.close()
