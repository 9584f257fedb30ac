"""Answers of families that few models speak, and what they mean."""

from __future__ import annotations

from tests.text.formats.wire import ARGUMENTS, GRANITE_ARRAY, OPENED, OSLO, PARIS, PING, Case, calls, says, thinks

_JSON = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
_PING = '{"name": "ping", "arguments": {}}'
_PARAMETERS = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
_COHERE = f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}}'
_K3 = (
    '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Oslo'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
_K3_JSON = (
    f'<|open|>call tool="get_weather" index="2"<|sep|><|open|>json type="object"<|sep|>{ARGUMENTS}<|close|>json<|sep|>'
    "<|close|>call<|sep|>"
)
_LONGCAT = (
    "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>Paris</longcat_arg_value>\n</longcat_tool_call>"
)
_SOLAR = f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>"
_MINICPM = '<function name="get_weather"><param name="city">Paris</param></function>'
_M = "]<]minimax[>["


def _element(name: str, *inside: str) -> str:
    return f"{_M}<{name}>{''.join(inside)}{_M}</{name}>"


def _m3(name: str, *elements: str) -> str:
    return f'{_M}<invoke name="{name}">{"".join(elements)}{_M}</invoke>'


def _m3_section(*invokes: str) -> str:
    return f"{_M}<tool_call>\n" + "\n".join(invokes) + f"\n{_M}</tool_call>"


def _hunyuan(suffix: str) -> str:
    return (
        f"<tool_calls{suffix}>\n<tool_call{suffix}>get_weather<tool_sep{suffix}>\n<arg_key{suffix}>city</arg_key{suffix}>\n"
        f"<arg_value{suffix}>Paris</arg_value{suffix}>\n</tool_call{suffix}>\n<tool_call{suffix}>ping<tool_sep{suffix}>"
        f"</tool_call{suffix}>\n</tool_calls{suffix}>"
    )


def _invoked(prefix: str, frame: str = "") -> str:
    return (
        f'<{prefix}invoke name="get_weather">\n<{prefix}parameter name="city">{frame}Paris{frame}</{prefix}parameter>\n'
        f'</{prefix}invoke>\n<{prefix}invoke name="ping">\n</{prefix}invoke>'
    )


FAMILIES = [
    Case("kimi-k3", f"<|open|>tools<|sep|>{_K3}{_K3_JSON}<|close|>tools<|sep|>", [OSLO, PARIS]),
    Case(
        "kimi-k3",
        f"Hm.<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|>{_K3}"
        "<|close|>tools<|sep|>",
        [thinks("Hm."), says("Ok."), OSLO],
        OPENED,
    ),
    Case("kimi-k3", f"{_K3}!", [OSLO, says("!")]),
    Case("longcat", f"<longcat_think>Hm.</longcat_think>{_LONGCAT}\n{_LONGCAT}", [thinks("Hm."), PARIS, PARIS]),
    Case("longcat", f"<longcat_tool_call>{_JSON}</longcat_tool_call>", [PARIS]),
    Case("minicpm5", f"So.\n{_MINICPM}{_MINICPM}", [says("So."), PARIS, PARIS]),
    Case(
        "minicpm5",
        '<function name="write_file"><param name="content"><![CDATA[a</param>\n<b> & c]]></param></function>',
        [calls("write_file", content="a</param>\n<b> & c")],
    ),
    Case("minicpm5", 'As <function name="ping"></function>.', [says('As <function name="ping"></function>.')]),
    Case("minicpm5", '<function name="ping"/>', [PING]),
    Case(
        "muse", f"Ok.\n<atem:function_calls>\n{_invoked('atem:')}\n</atem:function_calls>", [says("Ok."), PARIS, PING]
    ),
    Case(
        "dots",
        f"I will.<dots_function_call>\n{_invoked('', chr(10))}\n</dots_function_call>",
        [says("I will."), PARIS, PING],
    ),
    Case("dots", f"<dots_function_call>\n{_JSON}\n</dots_function_call>", [PARIS]),
    Case("hunyuan-a13b", "<think>Hm.</think>\n<answer>\nYes.\n</answer>", [thinks("Hm."), says("Yes.\n")]),
    Case("hunyuan-a13b", f"<answer>Ok.\n<tool_calls>{GRANITE_ARRAY}</tool_calls></answer>", [says("Ok."), PARIS, PING]),
    Case("hunyuan-v3", _hunyuan(""), [PARIS, PING]),
    Case("hunyuan-v3", f"Hm.</think>So.\n{_hunyuan('')}", [thinks("Hm."), says("So."), PARIS, PING], OPENED),
    Case(
        "hunyuan-v3-opensource",
        f"<think:opensource>Hm.</think:opensource>{_hunyuan(':opensource')}",
        [thinks("Hm."), PARIS, PING],
    ),
    Case(
        "apertus",
        f'<|inner_prefix|>Hm.<|inner_suffix|>Ok.<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}, {{"ping": {{}}}}]'
        "<|tools_suffix|>",
        [thinks("Hm."), says("Ok."), PARIS, PING],
    ),
    Case("apertus", f'<|tools_prefix|>[{{"get_weather":{ARGUMENTS}}}]', [PARIS]),
    Case("apertus", "<|tools_prefix|>[]", [says("<|tools_prefix|>[]")]),
    Case(
        "cohere",
        f"<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {_COHERE},\n    {_COHERE}\n]<|END_ACTION|>",
        [thinks("Hm."), PARIS, PARIS],
    ),
    Case("cohere", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", [says("Yes.")]),
    Case("gigachat3", f"Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{_JSON}", [says("Ok."), PARIS]),
    Case("gigachat3.1", f"<|function_call|>{_JSON}", [PARIS]),
    Case("internlm2", f"Ok.<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", [says("Ok."), PARIS]),
    Case("internlm2", f"<|action_start|> <|plugin|>{_PARAMETERS}<|action_end|>\n", [PARIS]),
    Case("jamba", f"<tool_calls>[\n    {_JSON},\n    {_PING}\n]</tool_calls>", [PARIS, PING]),
    Case("apriel", f"Hm.\n<tool_calls>{GRANITE_ARRAY}</tool_calls>", [thinks("Hm."), PARIS, PING], OPENED),
    Case(
        "apriel",
        f"Hm.\n[BEGIN FINAL RESPONSE]\n<tool_calls>{GRANITE_ARRAY}</tool_calls>",
        [thinks("Hm."), PARIS, PING],
        OPENED,
    ),
    Case(
        "apriel",
        "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]",
        [thinks("Hm."), says("Yes.\n")],
    ),
    Case("apriel", "Hm.[BEGIN FINAL RESPONSE]\nYes.", [thinks("Hm."), says("Yes.")], OPENED),
    Case("minimax-m3", "<mm:think>x</mm:think>y", [thinks("x"), says("y")]),
    Case(
        "minimax-m3",
        "<mm:think>Hm.</mm:think>Ok."
        + _m3_section(_m3("get_weather", _element("city", "Paris")), _m3("ping"))
        + "\nSo.",
        [thinks("Hm."), says("Ok."), PARIS, PING, says("\nSo.")],
    ),
    Case(
        "minimax-m3",
        _m3_section(
            _m3(
                "get_weather",
                *(
                    _element("city", " <b>\n"),
                    _element("days", "3"),
                    _element("scale", "-1.5e3"),
                    _element("metric", "true"),
                ),
                *(_element("note", "null"), _element("tags", _element("item", "1"), _element("item", "true"))),
                _element(
                    "where",
                    _element("item", "1"),
                    _element("a", _element("item", _element("b", "x")), _element("item", "2")),
                ),
            )
        ),
        [
            calls(
                "get_weather",
                city=" <b>\n",
                days=3,
                scale=-1.5e3,
                metric=True,
                note=None,
                tags=["1", "true"],
                where={"item": 1, "a": [{"b": "x"}, 2]},
            )
        ],
    ),
    Case(
        "minimax-m3",
        f'{_M}<tool_call>\n{_M}<invoke name="get_weather">\n{_M}<where>\n{_M}<a>1{_M}</a>\n{_M}</where>\n'
        f"{_M}<tags>\n{_M}</tags>\n{_M}<city>{_M}</city>\n{_M}</invoke>\n{_M}</tool_call>",
        [calls("get_weather", where={"a": 1}, tags=[], city="")],
    ),
    Case(
        "minimax-m3",
        _m3_section(
            _m3("get_weather", _element("where", '{"a": [1, null]}'), _element("tags", f'["{_M}</tags>{_M}<x>"]')),
            f'{_M}<invoke name="get_weather">{ARGUMENTS}{_M}</invoke>',
        ),
        [calls("get_weather", where={"a": [1, None]}, tags=[f"{_M}</tags>{_M}<x>"]), PARIS],
    ),
    Case(
        "minimax-m3",
        _m3_section(_m3("write_file", _element("content", f"{_M}<item>a{_M}</item> {_M}</content>\nb"))),
        [calls("write_file", content=f"{_M}<item>a{_M}</item> {_M}</content>\nb")],
    ),
    Case(
        "minimax-m3",
        _m3_section(_m3("get_weather", _element("-A", _element("item", _element("k", "1")), _element("item", "2")))),
        [calls("get_weather", **{"-A": [{"k": 1}, 2]})],
    ),
    Case("minimax-m3", _m3_section(_m3("get_weather", f"{_M}Oslo{_M}</city>", _element("days", "3"))), [OSLO]),
    Case(
        "minimax-m3",
        _m3_section(
            _m3("get_weather", _element("city", "Oslo"), f"{_M}3{_M}</days>", _element("tags", f"{_M}a{_M}</item>"))
        ),
        [calls("get_weather", city="Oslo", days=3, tags=["a"])],
    ),
    Case("minimax-m3", f"<tool_call> {_m3('get_weather', _element('city', 'Paris'))} {_M}</tool_call>", [PARIS]),
    Case("minimax-m3", f"Ok. {_m3('get_weather', _element('city', 'Paris'))}", [says("Ok."), PARIS]),
    Case("minimax-m3", _m3("fly"), [says(_m3("fly"))]),
    Case("minimax-m3", f"The mark is {_M}.", [says(f"The mark is {_M}.")]),
    Case("minimax-m3", f"{_M}<tool_call>\n{_M}<x>", [says(f"{_M}<tool_call>\n{_M}<x>")]),
    Case(
        "minimax-m3",
        f'{_M}<tool_call>\n{_M}<invoke name="get_weather">{_M}<where>{_M}<a>{_M}<item>1{_M}</item>{_M}</',
        [("breaks", "get_weather", '{"where": {"a": [1')],
    ),
    Case(
        "minimax-m3",
        f'{_M}<tool_call>{_M}<invoke name="get_weather">{_element("tags", _element("item", "a"))} and{_M}</invoke>',
        [("breaks", "get_weather", '{"tags": ["a"]'), says(f"and{_M}</invoke>")],
    ),
    Case(
        "minimax-m3",
        f"Hm.\n{_m3_section(_m3('get_weather', _element('city', 'Paris')))}",
        [thinks("Hm."), PARIS],
        OPENED,
    ),
    Case("minimax-m1", f"Ok.\n<tool_calls>\n{_JSON}\n{_PING}\n</tool_calls>", [says("Ok."), PARIS, PING]),
    Case("minimax-m1", f"<tool_calls>\n{_JSON}", [PARIS]),
    Case("nemotron-nano-v2", f"<think>\n</think>\n<TOOLCALL>{GRANITE_ARRAY}</TOOLCALL>", [PARIS, PING]),
    Case("granite-20b", f"<function_call> {_JSON} <function_call> {_PING}", [PARIS, PING]),
    Case("firefunction", f" functools{GRANITE_ARRAY}", [PARIS, PING]),
    Case("firefunction", "Use functools[0].", [says("Use functools[0].")]),
    Case(
        "solar-open",
        f"<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>{_SOLAR}{_SOLAR}<|calls|>",
        [thinks("Hm."), PARIS, PARIS],
    ),
    Case("solar-open", "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>", [thinks("Hm."), says("Yes.")]),
    Case("functionary-3.2", f"get_weather\n{ARGUMENTS}", [PARIS]),
    Case("functionary-3.2", "all\nHello all\nof you.", [says("Hello all\nof you.")]),
    Case("functionary-3.2", f"all\nOk.\n>>>get_weather\n{ARGUMENTS}\n>>>ping\n{{}}", [says("Ok."), PARIS, PING]),
    Case("functionary-3.2", "all\n>>>fly\n{}", [says(">>>fly\n{}")]),
]
