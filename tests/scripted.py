"""A model that says what a script tells it to, behind the real adapter, engine, parser and protocols.

`start(script)` gives a running engine. `script` is a function from the prompt's text, up to where the answer begins,
to the answer as a model would write it: `<think>`, `<tool_call>` and all. `said(...)` makes one of pairs.

Each byte is a token. The model keeps the tokens themselves as its keys, so that whatever moves, restores or evicts
states moves the very thing the next token depends on: a state that was mixed up says something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from ingot.cache.batch_state import BatchState
from ingot.cache.footprint import Footprint
from ingot.cache.forward_batch import ForwardPart
from ingot.engine.admission import EngineLimits
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import ModelCard
from ingot.engine.speculation.proposer import Proposer
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter
from ingot.text.tokenizer.tokenizer import Tokenizer

Script = Callable[[str], str]
Wait = Callable[[int], None]
"""What happens before a launch of that many tokens a row: a slow device sleeps, a test that looks on holds it up."""

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
ANSWER = f"{OPEN}assistant\n"
SPECIAL = (CLOSE, OPEN)
INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")  # of an engine that fills in the middle
VOCAB = 256 + len(SPECIAL) + len(INFILL)
UNLIKELY = -1e4
WIDEST = 8192
MEMORY = 1 << 30
CARD = ModelCard(
    name="scripted",
    source="a script",
    family="scripted",
    context=262_144,
    vocab=VOCAB,
    device="cpu",
    dtype="float32",
    weight_bytes=0,
    memory_budget=MEMORY,
    max_sequences=32,
    created=1_700_000_000,
)

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nTo call one: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def said(*pairs: tuple[str, str], otherwise: str = "I have nothing to say.") -> Script:
    """Answers with the second of the first pair whose first is in what the model was last told or given."""

    def script(prompt: str) -> str:
        last = last_message(prompt)
        return next((answer for words, answer in pairs if words in last), otherwise)

    return script


def last_message(prompt: str) -> str:
    """The last message before the answer, its role first. Agents put reminders of the system after the user's words."""
    messages = prompt.removesuffix(ANSWER).split(OPEN)
    return next((message for message in reversed(messages) if not message.startswith("system\n")), "")


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def tokenizer(template: str = TEMPLATE, special: Sequence[str] = SPECIAL) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    with TemporaryDirectory() as name:
        folder = Path(name)
        made.save(str(folder / "tokenizer.json"))
        config = {"eos_token": CLOSE, "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(folder)


class _OneLayer(nn.Module):
    """What mlx-lm asks for caches: a model of one layer, with a weight to have a type by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(1, 1)]


class ScriptedAdapter(ModelAdapter):
    """Puts all weight on the token that the script wants next."""

    def run(
        self,
        rows: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None = None,
        *,
        visual: None = None,
    ) -> mx.array:
        [part] = parts
        self.config["wait"](part.width)
        kept = tokens[:, None, None].astype(mx.float32)
        with rows.launch(parts, mixed=False) as layers:
            state: Any = layers[0]
            state.write(kept, kept)
            history = np.array(state.keys_and_values()[0][:, 0, :, 0]).astype(np.int64)
            starts = state.open_batch.starts
        wanted = range(tokens.size) if at is None else at
        ends = [(token // part.width, token % part.width + 1) for token in wanted]
        found = [self._next(history[row, : starts[row] + end]) for row, end in ends]
        likely = np.array(found)[:, None] == np.arange(self.vocab)
        return mx.array(np.where(likely, 0.0, UNLIKELY).astype(np.float32))

    def _next(self, history: np.ndarray[Any, Any]) -> int:
        script: _Writer = self.config["script"]
        return script.next(history)


class _Writer:
    """Which token comes next, by the text so far."""

    def __init__(self, script: Script, tokenizer: Tokenizer) -> None:
        self._script, self._tokenizer = script, tokenizer
        self._open = tokenizer.encode(ANSWER, add_special=False)
        self._middle = None if tokenizer.infill is None else tokenizer.infill.middle
        self._end = tokenizer.encode(CLOSE, add_special=False)[0]
        self._answer = lru_cache(maxsize=64)(self._answered)

    def next(self, history: np.ndarray[Any, Any]) -> int:
        begins = np.flatnonzero(history == self._open[0])
        width = len(self._open)
        middle = np.flatnonzero(history == self._middle)
        if len(middle):
            return self._after(history, int(middle[-1]) + 1)
        if not len(begins) or history[begins[-1] : begins[-1] + width].tolist() != self._open:
            return self._end
        return self._after(history, int(begins[-1]) + width)

    def _after(self, history: np.ndarray[Any, Any], place: int) -> int:
        answer = self._answer(history[:place].tobytes())
        whole, so_far = self._tokenizer.encode(answer, add_special=False), history[place:].tolist()
        if whole[: len(so_far)] == so_far:  # which may end within a character
            return whole[len(so_far)] if len(so_far) < len(whole) else self._end
        written = self._tokenizer.decode(so_far, skip_special=False)
        rest = self._tokenizer.encode(_left(answer, written), add_special=False)
        return rest[0] if rest else self._end

    def _answered(self, prompt: bytes) -> str:
        return self._script(self._tokenizer.decode(np.frombuffer(prompt, np.int64).tolist(), skip_special=False))


def _left(answer: str, written: str) -> str:
    """What of the answer is still to be written. Thinking that somebody else closed is over."""
    if not answer.startswith(written) and "</think>" in written:
        written = written.partition("</think>")[2].lstrip("\n")
        answer = answer.rpartition("</think>")[2].lstrip("\n")
    return answer.removeprefix(written) if answer.startswith(written) else ""


def start(
    script: Script,
    *,
    context: int = CARD.context,
    cache_bytes: int = 1 << 28,
    limits: EngineLimits | None = None,
    template: str = TEMPLATE,
    name: str = CARD.name,
    device: Device | None = None,
    wait: Wait = lambda width: None,
    fills: bool = False,
    proposers: Sequence[Proposer] = (),
) -> Engine:
    """A running engine, whose answers are the script's. The caller closes it. `wait` is called before each launch;
    `fills`: it fills in the middle too."""
    spelling = tokenizer(template, (*SPECIAL, *INFILL) if fills else SPECIAL)

    def load() -> LoadedModel:
        footprint = Footprint(((None, 8),), 0, 16, 0, 4 * VOCAB)
        known = {
            "model": _OneLayer(),
            "config": {"model_type": "scripted", "script": _Writer(script, spelling), "wait": wait},
            "device": device or current_device(),
            "widest": WIDEST,
            "margin": 0,
            "footprint": footprint,
            "ragged": True,
            "mixed": False,
            "vocab": VOCAB,
            "notes": (),
        }
        made = ScriptedAdapter(**{each.name: known.get(each.name) for each in fields(ModelAdapter)})
        budget = MemoryBudget(MEMORY, 0, footprint, context=context, widest=WIDEST, rows=32)
        card = replace(CARD, name=name, context=context, proposers=tuple(each.name for each in proposers))
        return LoadedModel(made, spelling, card, budget, cache_bytes, proposers=proposers)

    return Engine(load, limits or EngineLimits())
