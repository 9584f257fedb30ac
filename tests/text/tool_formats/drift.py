"""What models of each family drift into, and what it means all the same."""

from __future__ import annotations

from tests.text.tool_formats.wire import (
    ARGUMENTS,
    CODER_CALL,
    DSML_CALL,
    GLM_CALL,
    GRANITE_ARRAY,
    KIMI_CALL,
    MINIMAX_CALL,
    OPENED,
    OSLO,
    PARIS,
    PING,
    V31_CALL,
    Case,
    calls,
    says,
    thinks,
)

# What ends a value does not within a string of one that is JSON.
CLOSERS = [
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=tags>\n"
        '["a</parameter>\n</function>\n</tool_call>", "b\\"</parameter></function>"]\n'
        "</parameter>\n</function>\n</tool_call>",
        [calls("get_weather", tags=["a</parameter>\n</function>\n</tool_call>", 'b"</parameter></function>'])],
    ),
    Case(
        "glm",
        '<tool_call>get_weather<arg_key>where</arg_key><arg_value>{"</arg_value></tool_call>": 1}'
        "</arg_value></tool_call>",
        [calls("get_weather", where={"</arg_value></tool_call>": 1})],
    ),
    Case(
        "deepseek-v3.2",
        '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="x" string="false">'
        '["</｜DSML｜parameter>\n</｜DSML｜invoke>"]'
        "</｜DSML｜parameter></｜DSML｜invoke>",
        [calls("get_weather", x=["</｜DSML｜parameter>\n</｜DSML｜invoke>"])],
    ),
    Case(
        "qwen3-coder",
        "<function=get_weather><parameter=tags>['it</parameter></function>', '</parameter></function>']"
        "</parameter></function>",
        [calls("get_weather", tags=["it</parameter></function>", "</parameter></function>"])],
    ),
    Case(
        "qwen3-coder",
        '<function=get_weather><parameter=tags>["a"</parameter></function>',
        [calls("get_weather", tags='["a"')],
    ),
]

_HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'

# Models that call a tool amid their thinking, and end there.
UNCLOSED = [
    Case(
        "qwen3-coder",
        f"I need the weather.\n\n{CODER_CALL}",
        [thinks("I need the weather."), PARIS],
        OPENED,
    ),
    Case("qwen3-coder", f"<think>\nHm.\n{CODER_CALL}", [thinks("Hm."), PARIS]),
    Case(
        "kimi-k2",
        f"Hm.\n<|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>",
        [thinks("Hm."), PARIS],
        OPENED,
    ),
    Case("glm", f"Hm.\n{GLM_CALL}\n{GLM_CALL}", [thinks("Hm."), PARIS, PARIS], OPENED),
    Case("deepseek-v3.1", f"Hm.\n<｜tool▁calls▁begin｜>{V31_CALL}<｜tool▁calls▁end｜>", [thinks("Hm."), PARIS], OPENED),
    Case(
        "deepseek-v3.2",
        f"Hm.\n\n<｜DSML｜function_calls>\n{DSML_CALL}</｜DSML｜function_calls>",
        [thinks("Hm."), PARIS],
        OPENED,
    ),
    Case("glm", f"Hm.\n{GLM_CALL}\nOr not.\n</think>\nNo.", [thinks(f"Hm.\n{GLM_CALL}\nOr not."), says("No.")], OPENED),
    Case("glm", "Hm.\n<tool_call>fly\n</tool_call>", [thinks("Hm.\n<tool_call>fly\n</tool_call>")], OPENED),
    Case("glm", f"Hm.\n`{GLM_CALL}`", [thinks(f"Hm.\n`{GLM_CALL}`")], OPENED),
    Case(
        "glm",
        f"{GLM_CALL}\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        [PARIS, thinks("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par")],
        OPENED,
    ),
    Case(
        "deepseek-v3.1",
        f"<｜tool▁calls▁begin｜>{V31_CALL}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{{oops",
        [PARIS, thinks("<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{oops")],
        OPENED,
    ),
]

# On one line with what was thought, where nothing else has such markers; and in thinking behind which nothing comes.
UNCLOSED += [
    Case("glm", f"Hm. {GLM_CALL}", [thinks("Hm."), PARIS], OPENED),
    Case("glm", f"Hm.{GLM_CALL}\n{GLM_CALL}", [thinks("Hm."), PARIS, PARIS], OPENED),
    Case(
        "kimi-k2",
        f"Hm. <|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>",
        [thinks("Hm."), PARIS],
        OPENED,
    ),
    Case("kimi-k2", f"<think>Hm.{KIMI_CALL}", [thinks("Hm."), PARIS]),
    Case("glm", f"Hm: '{GLM_CALL}'", [thinks(f"Hm: '{GLM_CALL}'")], OPENED),
    Case("glm", f"Hm.\n{GLM_CALL}\n</think>", [thinks("Hm."), PARIS], OPENED),
    Case("glm", f"Hm. {GLM_CALL} So.</think>\n\n", [thinks("Hm."), PARIS, thinks(" So.")], OPENED),
    Case("qwen3-coder", f"<think>\nHm.\n{CODER_CALL}\n</think>\n", [thinks("Hm."), PARIS]),
    Case("qwen", f"<think>\nHm.\n{_HERMES_CALL}\n</think>\n\n", [thinks("Hm."), PARIS]),
    Case("qwen", f"<think>\nHm. {_HERMES_CALL}\n</think>\n\n", [thinks(f"Hm. {_HERMES_CALL}")]),
    Case("glm", f"Hm. {GLM_CALL}</think>{GLM_CALL}", [thinks(f"Hm. {GLM_CALL}"), PARIS], OPENED),
    Case(
        "minimax-m2",
        f"<think>Hm.</think>\nYes.\n<think>Or:\n{MINIMAX_CALL}</think>\n",
        [thinks("Hm."), says("Yes."), thinks(f"Or:\n{MINIMAX_CALL}")],
    ),
]

COMMAS = [
    Case("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris",}}</tool_call>', [PARIS]),
    Case("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", }, }\n</tool_call>', [PARIS]),
    Case(
        "qwen3-coder",
        '<function=get_weather><parameter=tags>["a", "b", ]</parameter></function>',
        [calls("get_weather", tags=["a", "b"])],
    ),
]

TOOL_CODES = [
    Case(name, f"```tool_code\n{written}\n```", means)
    for name in ("gemma4", "function-gemma", "hermes")
    for written, means in (
        ('get_weather(city="Paris")', [PARIS]),
        ("print(default_api.get_weather(city='Oslo', days=3))", [OSLO]),
        ('get_weather(city="Paris")\nping()', [PARIS, PING]),
        ("import math", [says("```tool_code\nimport math\n```")]),
        ("fly(to='Rome')", [says("```tool_code\nfly(to='Rome')\n```")]),
    )
]

GEMMA = [
    Case("gemma4", 'tool_code = get_weather(city="Paris")\nprint(tool_code)', [PARIS]),
    Case("gemma4", "So.\ntool_code = ping()\nprint(tool_code)\ntool_code = ping()", [says("So."), PING, PING]),
    Case("gemma4", "tool_code = fly()\nx = ping()", [says("tool_code = fly()\nx = ping()")]),
    Case("gemma4", "<|tool_call>call:get_weather(city='Oslo', days=3)<tool_call|>", [OSLO]),
    Case("gemma4", "<|tool_call>call:get_weather(city=Oslo, days=3)<tool_call|>So.", [OSLO, says("So.")]),
    Case("gemma4", '<|tool_call>call:get_weather(city=<|"|>Oslo (N)<|"|>)', [calls("get_weather", city="Oslo (N)")]),
    Case("gemma4", "Ok.\ncall:get_weather(city=Paris)\n", [says("Ok."), PARIS]),
    Case("gemma4", "call:get_weather{city:Paris}", [PARIS]),
    Case("gemma4", "call:fly{to:Paris}, or recall:it", [says("call:fly{to:Paris}, or recall:it")]),
    Case(
        "gemma4", '<|tool_call>call:get_weather{größe:3,<|"|>a b<|"|>:1}', [calls("get_weather", größe=3, **{"a b": 1})]
    ),
    Case("function-gemma", "<start_function_call>call:ping()<end_function_call>", [PING]),
    Case("gemma4", "<|tool_call>call:get_weather{city:'Paris'}<tool_call|>", [PARIS]),
    Case("gemma4", '<|tool_call>call:get_weather{"city":"Paris"}<tool_call|>', [PARIS]),
    Case(
        "gemma4",
        '<|tool_call>call:get_weather{city: "a \\"b\\" }"}<tool_call|>',
        [calls("get_weather", city='a "b" }')],
    ),
    Case("gemma4", "<|tool_call>call:get_weather{city:Paris}<tool_call|>", [PARIS]),
    Case("gemma4", "<|tool_call>call:get_weather{city: Oslo , days: 3}<tool_call|>", [OSLO]),
    Case(
        "gemma4",
        "<|tool_call>call:get_weather{city:New York,metric:true}",
        [calls("get_weather", city="New York", metric=True)],
    ),
    Case(
        "gemma4", "<|tool_call>call:write_file{path:https://x.y/z?a=1}", [calls("write_file", path="https://x.y/z?a=1")]
    ),
    Case(
        "gemma4",
        '<|tool_call>call:get_weather{tags:["a,b", "c"],where:{a:[b, 2]}}',
        [calls("get_weather", tags=["a,b", "c"], where={"a": ["b", 2]})],
    ),
    Case("gemma4", '<|tool_call>call:get_weather{city=<|"|>Oslo<|"|>,days=3}', [OSLO]),
    Case("gemma4", '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>days:3}', [OSLO]),
    Case(
        "gemma4",
        '<|tool_call>call:get_weather{tags:[] city:<|"|>Oslo<|"|> days:3}',
        [calls("get_weather", tags=[], city="Oslo", days=3)],
    ),
    Case("gemma4", '<|tool_call>call:get_weather{city:Paris<|"|>}<tool_call|>', [PARIS]),
    Case("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}call:ping{}<tool_call|>', [PARIS, PING]),
    # A comma may be missing here, or it is one text: it cannot be told.
    Case(
        "gemma4",
        "<|tool_call>call:get_weather{city:Oslo days:3}",
        [("breaks", "get_weather", '{"city":'), says("Oslo days:3}")],
    ),
]

_WRAPPED = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
DSML = [
    *(
        Case(
            "deepseek-v3.2",
            f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n{_WRAPPED.format(key, string, ARGUMENTS)}\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            [PARIS],
        )
        for key, string in (("arguments", "false"), ("input", "false"), ("arguments", "true"))
    ),
    Case(
        "deepseek-v3.2",
        f'<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather">{ARGUMENTS}</｜DSML｜invoke></｜DSML｜tool_calls>',
        [PARIS],
    ),
    Case(
        "deepseek-v3.2",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ping"/>\n<｜DSML｜invoke name="ping" />\n'
        "</｜DSML｜tool_calls>\nSo.",
        [PING, PING, says("So.")],
    ),
    Case(
        "deepseek-v3.2",
        f'<｜DSML｜invoke name="get_weather">{_WRAPPED.format("arguments", "false", "[1]")}</｜DSML｜invoke>',
        [calls("get_weather", arguments=[1])],
    ),
    Case("minimax-m2", '<minimax:tool_call><invoke name="ping"/></minimax:tool_call>', [PING]),
    # With keys that the tool does not have, it is a value like any other.
    *(
        Case(
            "deepseek-v3.2",
            f'<｜DSML｜invoke name="get_weather">{_WRAPPED.format("arguments", string, text)}</｜DSML｜invoke>',
            [calls("get_weather", arguments=value)],
        )
        for string, text, value in (("false", '{"who": 1}', {"who": 1}), ("true", '{"who": 1}', '{"who": 1}'))
    ),
]

LFM = [
    Case("lfm2", f"<|tool_call_start|>{GRANITE_ARRAY}<|tool_call_end|>", [PARIS, PING]),
    Case("lfm2", f"<|tool_call_start|>[ {GRANITE_ARRAY[1:]}<|tool_call_end|>!", [PARIS, PING, says("!")]),
    Case("lfm2", f'<|tool_call_start|>{{"name": "get_weather", "arguments": {ARGUMENTS}}}<|tool_call_end|>', [PARIS]),
]

OBJECTS = [
    Case("qwen3-coder", f"<tool_call>\n<function=get_weather>\n{ARGUMENTS}\n</function>\n</tool_call>", [PARIS]),
    Case("qwen3-coder", f"<function=get_weather>{ARGUMENTS}</function> So.", [PARIS, says("So.")]),
    Case("qwen", f"<tool_call><function=get_weather>{ARGUMENTS}</function></tool_call>", [PARIS]),
    Case("glm", f"<tool_call>get_weather\n{ARGUMENTS}</tool_call>", [PARIS]),
    Case("glm", _HERMES_CALL, [PARIS]),
    Case(
        "qwen3-coder",
        '<function=get_weather>{"city": "Par',
        [("breaks", "get_weather", '{"city": "Par')],
    ),
]

FORGOTTEN = [
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        [OSLO],
    ),
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</function>\n"
        "</tool_call>\nSo.",
        [OSLO, says("So.")],
    ),
    # What is no parameter of the tool, or was given, is text like any other; so is an end that nothing confirms.
    Case(
        "qwen3-coder",
        "<tool_call>\n<function=write_file>\n<parameter=content>\n<parameter=x>\n<parameter=content></function> y\n"
        "</parameter>\n</function>\n</tool_call>",
        [calls("write_file", content="<parameter=x>\n<parameter=content></function> y")],
    ),
    Case(
        "glm",
        "<tool_call>get_weather\n<arg_key>note</arg_key>\n<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        [PARIS],
    ),
    Case("glm", "<tool_call>ping\n<arg_key>note</arg_key>\n</tool_call>", [PING]),
]

# A line break is taken off behind a value only where one was taken off before it: else it is the value's own.
LINE_BREAKS = [
    Case(
        "qwen3-coder",
        f"<tool_call>\n<function=write_file>\n<parameter=content>{written}</parameter>\n</function>\n</tool_call>",
        [calls("write_file", content=content)],
    )
    for written, content in (
        ("a\nb\n", "a\nb\n"),
        ("\na\nb\n", "a\nb"),
        ("\na\nb\n\n", "a\nb\n"),
        ("\na", "a"),
        ("\n\n", ""),
        ("a", "a"),
        ("", ""),
    )
]

THINKING = [
    Case("qwen3-coder", "<think>\n<think>\nHm.\n</think>\n</think>\nYes.", [thinks("Hm."), says("Yes.")], OPENED),
    Case("hermes", "<think>One.</think>\n<think>Two.</think>Yes.", [thinks("One.Two."), says("Yes.")]),
    Case(
        "hermes",
        "<think>One.</think>Yes.\n<think>Two.</think>No.",
        [thinks("One."), says("Yes."), thinks("Two."), says("\nNo.")],
    ),
    Case(
        "qwen3-coder",
        "One.</think>Yes.<think>Two.</think>No.",
        [thinks("One."), says("Yes."), thinks("Two."), says("No.")],
        OPENED,
    ),
    Case(
        "hermes",
        "<think>One.</think>The <think> tag, `<think>`.\n```\n<think>\n```",
        [thinks("One."), says("The <think> tag, `<think>`.\n```\n<think>\n```")],
    ),
    Case(
        "cohere",
        '<|START_RESPONSE|>{"a": "<|START_TEXT|> \\"<|END_TEXT|>", "b": 1}<|END_RESPONSE|>',
        [says('{"a": "<|START_TEXT|> \\"<|END_TEXT|>", "b": 1}')],
    ),
    Case("cohere", "<|START_TEXT|>It is <|END_TEXT|>so.", [says("It is so.")]),
]

PROSE = [
    Case("qwen3-coder", "Write <function=ping></function> for it.", [says("Write <function=ping></function> for it.")]),
    Case("qwen3-coder", "So: `<function=ping>\n</function>`", [says("So: `<function=ping>\n</function>`")]),
    Case("llama", "Write <function=ping>{}</function>.", [says("Write <function=ping>{}</function>.")]),
    Case("minimax-m2", 'As <invoke name="ping"></invoke>.', [says('As <invoke name="ping"></invoke>.')]),
    Case("qwen3-coder", "So:\n  <function=ping>\n</function>", [says("So:"), PING]),
    # Right behind a sentence it is a call: what is shown has a space or a quote before it.
    Case("llama", f"I look.<function=get_weather>{ARGUMENTS}</function>", [says("I look."), PARIS]),
    Case("llama", f"text<function=get_weather>{ARGUMENTS}</function>", [says("text"), PARIS]),
    Case("llama", "(<function=ping>{}</function>)", [says("(<function=ping>{}</function>)")]),
]

DRIFT = [
    *CLOSERS,
    *UNCLOSED,
    *GEMMA,
    *DSML,
    *COMMAS,
    *TOOL_CODES,
    *LFM,
    *OBJECTS,
    *FORGOTTEN,
    *LINE_BREAKS,
    *THINKING,
    *PROSE,
]
