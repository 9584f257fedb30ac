"""Answers as models of each family write them, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.registry import format_by_name


@dataclass(frozen=True)
class Case:
    format: str
    text: str
    means: list[tuple[Any, ...]]
    thinking: ThinkingStart = ThinkingStart.UNOPENED

    def __str__(self) -> str:
        return f"{self.format}: {self.text[:48]!r}"


OPENED = ThinkingStart.OPENED


def calls(name: str, **arguments: Any) -> tuple[Any, ...]:
    return ("calls", name, arguments)


def says(text: str) -> tuple[str, str]:
    return ("says", text)


def thinks(text: str) -> tuple[str, str]:
    return ("thinks", text)


PARIS = calls("get_weather", city="Paris")
OSLO = calls("get_weather", city="Oslo", days=3)
PING = calls("ping")
ARGUMENTS = '{"city": "Paris"}'
OSLO_ARGUMENTS = '{"city": "Oslo", "days": 3}'

HERMES = [
    Case("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>', [PARIS]),
    Case(
        "hermes",
        f'Let me see.\n<tool_call>{{"name":"get_weather","arguments":{ARGUMENTS}}}</tool_call>\n'
        f'<tool_call>{{"arguments": {OSLO_ARGUMENTS}, "name": "get_weather"}}</tool_call>\nDone.',
        [says("Let me see."), PARIS, OSLO, says("\nDone.")],
    ),
    Case("hermes", '<tool_call>{"name": "ping", "arguments": {}}', [PING]),
    Case("hermes", '<tool_call>{"name": "ping"}</tool_call>', [PING]),
    Case("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', [PING]),
    Case("hermes", '<tool_call>{"type":"function", "id": 7, "name": "ping", "arguments": {}}</tool_call>', [PING]),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
    ),
    Case(
        "hermes",
        f'<tool_call>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "ping", "arguments": {}}]</tool_call>',
        [PARIS, PING],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "write_file", "arguments": {"content": "a</tool_call>\\n<tool_call>{\\"b"}}</tool_call>',
        [calls("write_file", content='a</tool_call>\n<tool_call>{"b')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "write_file", "arguments": {"content": "two\nlines\tand a tab"}}</tool_call>',
        [calls("write_file", content="two\nlines\tand a tab")],
    ),
    Case(
        "hermes",
        '<tool_call>{"name":"get_weather","arguments":{"where":{"a":[1,[2,{"b":null}]],"c":"}]"}}}</tool_call>',
        [calls("get_weather", where={"a": [1, [2, {"b": None}]], "c": "}]"})],
    ),
    Case("hermes", '<tool_call>[{"name": "ping"},]</tool_call>', [PING]),
    Case("hermes", '<tool_call>{"name": "a\\ud800"}', [says('<tool_call>{"name": "a\\ud800"}')]),
    Case("hermes", '<tool_call>{"name": ""}', [says('<tool_call>{"name": ""}')]),
    Case("hermes", "<tool_call>{}", [says("<tool_call>{}")]),
    Case("hermes", '<tool_call>{"name": "ping", "arguments": {}\n</tool_call>', [PING]),
    Case("hermes", "<tool_call>no call</tool_call>", [says("<tool_call>no call</tool_call>")]),
    Case("hermes", "a <tool_call> b", [says("a <tool_call> b")]),
    Case("hermes", "<tool_call>\n<tool_call>", [says("<tool_call>\n<tool_call>")]),
    Case("hermes", '<tool_call>{"name": 5, "arguments": {}}', [says('<tool_call>{"name": 5, "arguments": {}}')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": 5}', [says('<tool_call>{"name": "f", "arguments": 5}')]),
    Case("hermes", '<tool_call>{"name": "ping", "argu', [says('<tool_call>{"name": "ping", "argu')]),
    Case(
        "hermes",
        '<tool_call>{"name": "ping", "arguments": {}}</tool_call></tool_call>',
        [PING],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "ping", "arguments": {}}}</tool_call> ok',
        [PING, says("}</tool_call> ok")],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        [("breaks", "get_weather", '{"city": "Par')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"days": 1',
        [("breaks", "get_weather", '{"days": ')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"days": oops}}</tool_call>',
        [("breaks", "get_weather", '{"days": '), says("oops}}</tool_call>")],
    ),
    Case("hermes", '<tool_call>{"name": "ping", "arguments": {}}</tool_c', [PING]),
    Case("hermes", "<think>\nHm.\n</think>\n\nYes.", [thinks("Hm."), says("Yes.")]),
    Case(
        "hermes",
        '<think>I call <tool_call>{"name": "ping", "arguments": {}}</tool_call> now</think>Done.',
        [thinks('I call <tool_call>{"name": "ping", "arguments": {}}</tool_call> now'), says("Done.")],
    ),
    Case("hermes", "Hm.\n</think>\n\nYes.", [thinks("Hm."), says("Yes.")], OPENED),
    Case("hermes", "<think>\nHm.</think>Yes.", [thinks("Hm."), says("Yes.")], OPENED),
    Case("hermes", "never closed \n", [thinks("never closed \n")], OPENED),
    Case("hermes", "half a </thin", [thinks("half a </thin")], OPENED),
    Case("hermes", "</think>\n\nYes.", [says("Yes.")]),
    Case("hermes", "The <think> tag and </think>.", [says("The <think> tag and </think>.")]),
    Case("hermes", " white\n space \n", [says(" white\n space \n")]),
    Case("hermes", "\n \n", [says("\n \n")]),
    Case("hermes", "", []),
]

QWEN = [
    Case("qwen", f"[Calling tool: get_weather({ARGUMENTS})]", [PARIS]),
    Case("qwen", f"So: [Calling tool: get_weather({ARGUMENTS})]\nOk.", [says("So:"), PARIS, says(" Ok.")]),
    Case("qwen", "[Calling tool: none of them]", [says("[Calling tool: none of them]")]),
    Case("qwen", "<tool_call>\n<function=ping>\n</function>\n</tool_call>", [PING]),
]

CODER_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
CODER = [
    Case("qwen3-coder", CODER_CALL, [PARIS]),
    Case("qwen3-coder", f"First.\n\n{CODER_CALL}\n{CODER_CALL}", [says("First."), PARIS, PARIS]),
    Case("qwen3-coder", "<function=get_weather><parameter=city>Paris</parameter></function>", [PARIS]),
    Case(
        "qwen3-coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\nThen.",
        [PARIS, says("Then.")],
    ),
    Case(
        "qwen3-coder",
        "<function=unknown><parameter=a>1</parameter></function>",
        [says("<function=unknown><parameter=a>1</parameter></function>")],
    ),
    Case("qwen3-coder", "<tool_call><function=unknown></function></tool_call>", [calls("unknown")]),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=where>\n{"x": {"y": 1.5}}\n</parameter>\n'
        "<parameter=note>\nnull\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
        [
            calls(
                "get_weather",
                days=3,
                metric=True,
                tags=["a", "b"],
                where={"x": {"y": 1.5}},
                note=None,
                unit="C",
            )
        ],
    ),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\nthree\n</parameter>\n<parameter=note>\nnullify\n"
        "</parameter>\n<parameter=tags>\n[1, oops\n</parameter>\n</function>\n</tool_call>",
        [calls("get_weather", days="three", note="nullify", tags="[1, oops")],
    ),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=write_file>\n<parameter=path>\n a.py \n</parameter>\n<parameter=content>\n\n"
        'if a < b and "c" > \'d\':\n\tprint("</parameter>")\n\n</parameter>\n</function>\n</tool_call>',
        [calls("write_file", path=" a.py ", content='\nif a < b and "c" > \'d\':\n\tprint("</parameter>")\n')],
    ),
    Case(
        "qwen3-coder",
        "<tool_call><function=ping></function></tool_call> then\n<function=ping></function>",
        [PING, says("then"), PING],
    ),
    Case("qwen3-coder", "<tool_call><function=ping></tool_call>ok", [PING, says("ok")]),
    Case("qwen3-coder", "<tool_call><function=ping\n</parameter>\n</function></tool_call>", [PING]),
    Case("qwen3-coder", CODER_CALL.replace("weather>", "weather").replace("city>", "city"), [PARIS]),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=write_file\n<parameter=path\na>b\n</parameter>\n<parameter=content>\n\n</parameter>\n"
        "</function>\n</tool_call>",
        [calls("write_file", path="a>b", content="")],
    ),
    Case(
        "qwen3-coder",
        "<function=get_weather\n<parameter=city\nParis\n<parameter=days\n3\n</function>\n</tool_call>",
        [calls("get_weather", city="Paris", days=3)],
    ),
    Case("qwen3-coder", "<function=ping\n is how\nit begins.", [says("<function=ping\n is how\nit begins.")]),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=write_file>\n<parameter=content>\nhalf of i",
        [("breaks", "write_file", '{"content": "half of i')],
    ),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=write_file>\n<parameter=content>\nall\n</parameter>\n</func",
        [("breaks", "write_file", '{"content": "all"')],
    ),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=write_file>\n<parameter=cont",
        [("breaks", "write_file", "")],
    ),
    Case("qwen3-coder", "<tool_call>\n<function=write_file>", [says("<tool_call>\n<function=write_file>")]),
    Case(
        "qwen3-coder",
        f"<think>\nI may {CODER_CALL}\n</think>\nNo.",
        [
            thinks(f"I may {CODER_CALL}"),
            says("No."),
        ],
    ),
]

LLAMA_CALL = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
LLAMA = [
    Case("llama", LLAMA_CALL, [PARIS]),
    Case("llama", f"<|python_tag|>{LLAMA_CALL}", [PARIS]),
    Case("llama", f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}<|eom_id|>", [PARIS, PARIS]),
    Case("llama", f"{LLAMA_CALL};\n{LLAMA_CALL}", [PARIS, PARIS]),
    Case("llama", f"{LLAMA_CALL}\n{LLAMA_CALL}", [PARIS, PARIS]),
    Case("llama", f'{{"type": "function", "name": "get_weather", "parameters": {ARGUMENTS}}}', [PARIS]),
    Case("llama", f"I will.\n{LLAMA_CALL}\nDone", [says("I will."), PARIS, says("\nDone")]),
    Case("llama", f"Such as {LLAMA_CALL}", [says(f"Such as {LLAMA_CALL}")]),
    Case("llama", f"<function=get_weather>{ARGUMENTS}</function>", [PARIS]),
    Case(
        "llama",
        f"<function=get_weather>{ARGUMENTS}</function><function=ping>{{}}</function>!",
        [
            PARIS,
            PING,
            says("!"),
        ],
    ),
    Case("llama", '{"name": "Ada", "parameters": {}}', [says('{"name": "Ada", "parameters": {}}')]),
    Case("llama", '{"answer": {"name": "ping"}}', [says('{"answer": {"name": "ping"}}')]),
    Case("llama", '{"name": "ping"}', [says('{"name": "ping"}')]),
    Case("llama", "{", [says("{")]),
    Case("llama", "if (x) {\n  {}\n}", [says("if (x) {\n  {}\n}")]),
    Case("llama", f"{LLAMA_CALL}; and more", [PARIS, says("; and more")]),
]

MISTRAL = [
    Case("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]', [PARIS]),
    Case(
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}, '
        f'{{"name": "get_weather", "arguments": {OSLO_ARGUMENTS}}}]',
        [PARIS, OSLO],
    ),
    Case("mistral", f"[TOOL_CALLS]get_weather{ARGUMENTS}", [PARIS]),
    Case("mistral-args", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", [PARIS]),
    Case("mistral-args", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}", [PARIS]),
    Case(
        "mistral-args",
        f"Ok.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]ping[ARGS]{{}}",
        [
            says("Ok."),
            PARIS,
            PING,
        ],
    ),
    Case("mistral-args", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}ping[ARGS]{{}}", [PARIS, PING]),
    Case(
        "mistral-args",
        f"[TOOL_CALLS]ping[ARGS]{{}}\nget_weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]ping[ARGS]{{}} ping",
        [PING, PARIS, PING, says("ping")],
    ),
    Case("mistral-args", "[TOOL_CALLS]ping[ARGS]{}\n\nLet me check that.", [PING, says("Let me check that.")]),
    Case("mistral-args", "[TOOL_CALLS]ping[ARGS]{}ping{}", [PING, says("ping{}")]),
    Case("mistral", "[THINK]Hm.[/THINK]Yes.", [thinks("Hm."), says("Yes.")]),
    Case("mistral", "[TOOL_CALLS] what?", [says("[TOOL_CALLS] what?")]),
    Case("mistral", "[TOOL_CALLS] [1]", [says("[TOOL_CALLS] [1]")]),
]

V3_CALL = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
V31_CALL = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
DSML_CALL = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
DEEPSEEK = [
    Case("deepseek-v3", f"<｜tool▁calls▁begin｜>{V3_CALL}<｜tool▁calls▁end｜>", [PARIS]),
    Case(
        "deepseek-v3",
        f"Ok.<｜tool▁calls▁begin｜>{V3_CALL}\n{V3_CALL}<｜tool▁calls▁end｜>",
        [
            says("Ok."),
            PARIS,
            PARIS,
        ],
    ),
    Case("deepseek-v3", V3_CALL, [PARIS]),
    Case("deepseek-v3", f"Hm.</think>{V3_CALL}", [thinks("Hm."), PARIS], OPENED),
    Case(
        "deepseek-v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write_file\n```json\n{"content": "```"}\n```'
        "<｜tool▁call▁end｜>",
        [calls("write_file", content="```")],
    ),
    Case("deepseek-v3.1", f"<｜tool▁calls▁begin｜>{V31_CALL}{V31_CALL}<｜tool▁calls▁end｜>", [PARIS, PARIS]),
    Case("deepseek-v3.1", f"{V31_CALL} bye", [PARIS, says("bye")]),
    Case("deepseek-v3.1", "<｜tool▁calls▁begin｜>?", [says("<｜tool▁calls▁begin｜>?")]),
    Case(
        "deepseek-v3.2",
        f"<｜DSML｜function_calls>\n{DSML_CALL}{DSML_CALL}</｜DSML｜function_calls>",
        [PARIS, PARIS],
    ),
    Case("deepseek-v3.2", f"Ok.\n\n<｜DSML｜tool_calls>\n{DSML_CALL}</｜DSML｜tool_calls>", [says("Ok."), PARIS]),
    Case(
        "deepseek-v3.2",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="true">5'
        '</｜DSML｜parameter><｜DSML｜parameter name="x" string="false">[5]</｜DSML｜parameter></｜DSML｜invoke>',
        [calls("get_weather", city="5", x=[5])],
    ),
]

KIMI_CALL = f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
KIMI = [
    Case("kimi-k2", f"<|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>", [PARIS]),
    Case(
        "kimi-k2",
        f"<think>Hm.</think>Ok.<|tool_calls_section_begin|>{KIMI_CALL}"
        "<|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [thinks("Hm."), says("Ok."), PARIS, PING],
    ),
    Case("kimi-k2", KIMI_CALL, [PARIS]),
]

GRANITE_ARRAY = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "ping", "arguments": {{}}}}]'
GRANITE = [
    Case("granite", f"<|tool_call|>{GRANITE_ARRAY}", [PARIS, PING]),
    Case("granite", f"<tool_call>{GRANITE_ARRAY}", [PARIS, PING]),
    Case("granite", f"Ok. <|tool_call|> {GRANITE_ARRAY} so", [says("Ok."), PARIS, PING, says(" so")]),
    Case("granite", "<|tool_call|>[]", [says("<|tool_call|>[]")]),
]

GLM_CALL = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
GLM = [
    Case("glm", GLM_CALL, [PARIS]),
    Case("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", [PARIS]),
    Case("glm", f"<think>Hm.</think>\nOk.\n{GLM_CALL}\n{GLM_CALL}", [thinks("Hm."), says("Ok."), PARIS, PARIS]),
    Case("glm", "<tool_call>ping</tool_call>", [PING]),
    Case("glm", "<tool_call>ping\n</tool_call>", [PING]),
    Case(
        "glm",
        "<tool_call>write_file\n<arg_key>content</arg_key>\n<arg_value>\n <arg_value>x</arg_value> y\n</arg_value>"
        "<arg_key>path</arg_key><arg_value></arg_value></tool_call>",
        [calls("write_file", content="\n <arg_value>x</arg_value> y\n", path="")],
    ),
    Case("glm", "<think></think>\n<|begin_of_box|>42<|end_of_box|>", [says("42")]),
    Case("glm", "It is <|begin_of_box|>42<|end_of_box|>.", [says("It is 42.")]),
    Case("glm", "<tool_call>two words", [says("<tool_call>two words")]),
]

MINIMAX_CALL = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>'
MINIMAX = [
    Case("minimax-m2", f"<minimax:tool_call>\n{MINIMAX_CALL}\n</minimax:tool_call>", [PARIS]),
    Case(
        "minimax-m2",
        f"Hm.\n</think>\n\nOk.\n<minimax:tool_call>\n{MINIMAX_CALL}\n{MINIMAX_CALL}\n</minimax:tool_call>\n"
        "<think>Again.</think>Done.\n<think>Sure?</think>\nYes.",
        [
            thinks("Hm."),
            says("Ok."),
            PARIS,
            PARIS,
            thinks("\nAgain."),
            says("\nDone."),
            thinks("Sure?"),
            says("\nYes."),
        ],
        OPENED,
    ),
    Case("minimax-m2", MINIMAX_CALL, [PARIS]),
    Case("minimax-m2", 'The <think> tag, <invoke name="x">', [says('The <think> tag, <invoke name="x">')]),
]

GEMMA = [
    Case("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', [PARIS]),
    Case(
        "gemma4",
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:ping{}<tool_call|>",
        [thinks("Hm."), OSLO, PING],
    ),
    Case(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>a "b" {c} \\ <|tool_call> <|"|>,metric:true,note:None,'
        'tags:[<|"|>x,y<|"|>],where:{a:{<|"|>b c<|"|>:-1.5e3}}}<tool_call|>',
        [
            calls(
                "get_weather",
                city='a "b" {c} \\ <|tool_call> ',
                metric=True,
                note=None,
                tags=["x,y"],
                where={"a": {"b c": -1500.0}},
            )
        ],
    ),
    Case("gemma4", "<|channel>thought\n<channel|>Yes.", [says("Yes.")]),
    Case("gemma4", '<|tool_call>call:write_file{path:<|"|>a', [("breaks", "write_file", '{"path":"a')]),
    Case(
        "function-gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        [PARIS],
    ),
    Case(
        "function-gemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}<end_function_call>"
        "<start_function_call>call:ping{}<end_function_call>!",
        [OSLO, PING, says("!")],
    ),
]

HARMONY_CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
HARMONY = [
    Case("harmony", f"{HARMONY_CALL}<|call|>", [PARIS]),
    Case("harmony", HARMONY_CALL, [PARIS]),
    Case(
        "harmony",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}<|call|>",
        [thinks("Hm."), PARIS],
    ),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        [thinks("Hm."), says("I will look."), PARIS],
    ),
    Case("harmony", f" to=functions.get_weather<|channel|>commentary<|message|>{ARGUMENTS}", [PARIS]),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [thinks("Hm."), says("Yes.")],
    ),
    Case("harmony", "<|channel|>analysis<|message|>cut off", [thinks("cut off")]),
    Case(
        "harmony", "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", [thinks("Hm."), says("Yes.")], OPENED
    ),
    Case("harmony", "Just text.", [says("Just text.")]),
    Case(
        "harmony",
        "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>no json<|call|>",
        [says("no json")],
    ),
    Case(
        "harmony",
        '<|channel|>commentary to=functions.write_file<|message|>{"content": "<|end|><|call|>"}<|call|>',
        [calls("write_file", content="<|end|><|call|>")],
    ),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>I could commentary to=functions.ping {}<|end|>",
        [thinks("I could commentary to=functions.ping {}")],
    ),
]

FUNCTIONARY = [
    Case("functionary", f"<|recipient|>get_weather\n<|content|>{ARGUMENTS}", [PARIS]),
    Case("functionary", f"get_weather\n<|content|>{ARGUMENTS}", [PARIS]),
    Case("functionary", "all\n<|content|>Hello all\nof you.", [says("Hello all\nof you.")]),
    Case("functionary", "allow me", [says("allow me")]),
    Case(
        "functionary",
        f"all\n<|content|>I will.\n<|from|>assistant\n<|recipient|>get_weather\n<|content|>{ARGUMENTS}\n"
        "<|from|>assistant\n<|recipient|>ping\n<|content|>{}<|stop|>",
        [says("I will."), PARIS, PING],
    ),
    Case("functionary", f"<function=get_weather>{ARGUMENTS}</function>", [PARIS]),
]

XLAM = [
    Case("xlam", GRANITE_ARRAY, [PARIS, PING]),
    Case("xlam", f"```json\n{GRANITE_ARRAY}\n```", [PARIS, PING]),
    Case("xlam", f"```\n{GRANITE_ARRAY}\n```\nDone.", [PARIS, PING, says("Done.")]),
    Case("xlam", f"<think>Hm.</think>\n{GRANITE_ARRAY}", [thinks("Hm."), PARIS, PING]),
    Case("xlam", f"Hm.</think>{GRANITE_ARRAY}", [thinks("Hm."), PARIS, PING], OPENED),
    Case("xlam", f"I call:\n{GRANITE_ARRAY}", [says("I call:"), PARIS, PING]),
    Case("xlam", '[{"name": "Ada", "arguments": {}}]', [says('[{"name": "Ada", "arguments": {}}]')]),
    Case("xlam", "[1, 2]\n```python\n[]\n```", [says("[1, 2]\n```python\n[]\n```")]),
]

SEED = [
    Case(
        "seed-oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        [PARIS],
    ),
    Case(
        "seed-oss",
        "<seed:think>Hm.</seed:think>Ok.<seed:tool_call><function=get_weather><parameter=city>\n</parameter>"
        "<parameter=tags>['a', \"b\"]</parameter><parameter=metric>False</parameter></function><function=ping>"
        "</function></seed:tool_call>",
        [thinks("Hm."), says("Ok."), calls("get_weather", city="\n", tags=["a", "b"], metric=False), PING],
    ),
]

PYTHONIC = [
    Case("lfm2", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>', [PARIS]),
    Case(
        "lfm2",
        "Ok.<|tool_call_start|>[get_weather(city='Oslo', days=3), ping()]<|tool_call_end|>So.",
        [says("Ok."), OSLO, PING, says("So.")],
    ),
    Case("pythonic", '[get_weather(city="Paris")]', [PARIS]),
    Case(
        "pythonic",
        "[get_weather(city='it\\'s \"x\"\\n\\x41\\u00e9\\101', metric=True, note=None, tags=['a', \"b\"], "
        'where={"a": [1, -2.5e3, false, null]}, scale=0.5)]',
        [
            calls(
                "get_weather",
                city='it\'s "x"\nAéA',
                metric=True,
                note=None,
                tags=["a", "b"],
                where={"a": [1, -2500.0, False, None]},
                scale=0.5,
            )
        ],
    ),
    Case(
        "pythonic",
        '[write_file(content="""a "quoted" \\"""\nb""", path="")]',
        [calls("write_file", content='a "quoted" """\nb', path="")],
    ),
    Case("pythonic", "[a link](https://x) and [ping()]", [says("[a link](https://x) and [ping()]")]),
    Case("pythonic", '[unknown(city="Paris")]', [says('[unknown(city="Paris")]')]),
    Case("pythonic", '[ping(), get_weather(city="Par', [PING, ("breaks", "get_weather", '{"city":"Par')]),
]

PLAIN = [
    Case("plain", f"<think>x</think>{CODER_CALL}", [says(f"<think>x</think>{CODER_CALL}")]),
]

WIRE = [
    *HERMES,
    *QWEN,
    *CODER,
    *LLAMA,
    *MISTRAL,
    *DEEPSEEK,
    *KIMI,
    *GRANITE,
    *GLM,
    *MINIMAX,
    *GEMMA,
    *HARMONY,
    *FUNCTIONARY,
    *XLAM,
    *SEED,
    *PYTHONIC,
    *PLAIN,
]
assert all(format_by_name(case.format) for case in WIRE)
