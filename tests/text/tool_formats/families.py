"""Answers of less common families, and what they mean."""

from __future__ import annotations

from tests.text.tool_formats.wire import ARGUMENTS, GRANITE_ARRAY, OPENED, OSLO, PARIS, PING, Case, calls, says, thinks

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
_ATEM = (
    '<atem:function_calls>\n<atem:invoke name="{}">\n{}</atem:invoke>\n</atem:function_calls>',
    '<atem:parameter name="{}">{}</atem:parameter>\n',
)
_MUSE_PARIS = _ATEM[0].format("get_weather", _ATEM[1].format("city", "Paris"))
_MUSE_PING = _ATEM[0].format("ping", "")
_INKLING = '<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Paris"}}<|end_message|>'
_IFM_ARGUMENT = "<ifm|arg_key>{}</ifm|arg_key>{}<ifm|arg_value>{}</ifm|arg_value>\n"
_IFM_TYPE = "\n<ifm|arg_type>{}</ifm|arg_type>\n"
_IFM_CALL = "<ifm|tool_call>{}\n{}</ifm|tool_call>"
_IFM = _IFM_CALL.format("get_weather", _IFM_ARGUMENT.format("city", "{}", "Paris"))
_IFM_TYPED = (("a", "string", "1"), ("b", "integer", "1"), ("c", "array[string]", "[]"), ("d", "any", "1"))
_STEP = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather"><steptml:parameter name="city">Paris'
    "</steptml:parameter></steptml:invoke><｜tool_call_end｜>"
)
_MIMO = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


def _typed(mark: str, section: str, prefix: str = "", string: str = ' string="true"') -> str:
    return (
        f'<{mark}{section}>\n<{mark}{prefix}invoke name="get_weather">\n<{mark}{prefix}parameter name="city"{string}>'
        f'Oslo</{mark}{prefix}parameter>\n<{mark}{prefix}parameter name="days" string="false">3'
        f"</{mark}{prefix}parameter>\n</{mark}{prefix}invoke>\n</{mark}{section}>"
    )


def _plamo(name: str, arguments: str, constrain: str = "<|plamo:constrain|>json<|plamo:msg|>") -> str:
    return (
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|>{constrain}{arguments}<|plamo:end_tool_arguments:plamo|>"
        "<|plamo:end_tool_request:plamo|>"
    )


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
    Case(
        "kimi-k3",
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="a &amp;&quot;b&amp;lt;" '
        'type="string"<|sep|>R&amp;D<|close|>argument<|sep|><|close|>call<|sep|>',
        [calls("get_weather", **{'a &"b&lt;': "R&amp;D"})],
    ),
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
    Case("granite-20b", f"<function_call> {_PING} {_JSON}", [PING, PARIS]),
    Case("firefunction", f" functools{GRANITE_ARRAY}", [PARIS, PING]),
    Case("firefunction", "Use functools[0].", [says("Use functools[0].")]),
    Case(
        "solar-open",
        f"<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>{_SOLAR}{_SOLAR}<|calls|>",
        [thinks("Hm."), PARIS, PARIS],
    ),
    Case("solar-open", "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>", [thinks("Hm."), says("Yes.")]),
    Case(
        "deepseek-v4.1",
        f"Hm.</think>Ok.\n\n{_typed('｜DSML｜', ' calls', ' ')}",
        [thinks("Hm."), says("Ok."), OSLO],
        OPENED,
    ),
    Case(
        "deepseek-v4.1",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="ping">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        [PING],
    ),
    Case("deepseek-v4.1", _typed("｜DSML｜", " calls", " ").partition("\n")[2], [OSLO]),
    Case("deepseek-v4.1", f"Hm.\n\n{_typed('｜DSML｜', ' calls', ' ')}", [thinks("Hm."), OSLO], OPENED),
    *(
        Case("deepseek-v4", _typed("｜DSML｜", name), [OSLO])
        for name in ("tool_calls", "function_calls", "toolcalls", "tool")
    ),
    Case("deepseek-v4", _typed("｜DSML｜", "r:tool_calls", "r:"), [OSLO]),
    Case("deepseek-v4", _typed("｜DSML｜", "r:tool_calls"), [OSLO]),
    Case("deepseek-v4", _typed("｜DSML｜", "tool_calls", "r:"), [OSLO]),
    Case("deepseek-v4", _typed("｜DSML｜", "r:tool_calls", "r:").replace("/｜DSML｜r:tool", "/｜DSML｜tool"), [OSLO]),
    Case("deepseek-v4", _typed("｜DSML｜", "tool_calls", string=""), [OSLO]),
    Case(
        "gigachat3.5",
        f"<think>Hm.</think>Ok.\n{_typed('｜GCML｜', 'tool_calls')}<|message_sep|>",
        [thinks("Hm."), says("Ok."), OSLO],
    ),
    Case(
        "muse",
        f" to=self<|message|>Hm.<|eom|><|start|>assistant to=commentary<|message|>Ok.<|eom|><|start|>assistant"
        f" to=get_weather<|message|>{_MUSE_PARIS}<|eom|><|start|>assistant to=ping<|message|>{_MUSE_PING}<|eot|>",
        [thinks("Hm."), says("Ok."), PARIS, PING],
    ),
    Case(
        "muse",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes to=x.<|eot|>",
        [thinks("Hm."), says("Yes to=x.")],
    ),
    Case(
        "muse",
        f" to=self<|message|>Hm, to=me. to=get_weather<|message|>{_MUSE_PARIS}<|eom|>",
        [thinks("Hm, to=me."), PARIS],
    ),
    Case("muse", f" to=self<|message|>As {_MUSE_PING}?<|eom|>", [thinks(f"As {_MUSE_PING}?")]),
    Case("muse", f"to=user<|message|>Write {_MUSE_PING}.<|eot|>", [says(f"Write {_MUSE_PING}.")]),
    Case("muse", " to=ping<|message|>No call.<|eom|>", [says("No call.")]),
    Case("muse", "Just so, to=you.", [says("Just so, to=you.")]),
    Case("muse", " <|message|>Yes.<|eot|>", [says("Yes.")]),
    Case(
        "muse",
        f" to=ping<|message|>{_MUSE_PING.replace('</atem:invoke>', '</atem:invoke></atem:invoke>')}<|eom|>"
        "<|start|>assistant to=user<|message|>So.<|eot|>",
        [PING, says("So.")],
    ),
    Case(
        "muse",
        " to=write_file<|message|>"
        + _ATEM[0].format("write_file", _ATEM[1].format("content", 'a\n "b" <|eom'))
        + "<|eot|>",
        [calls("write_file", content='a\n "b" <|eom')],
    ),
    Case(
        "muse",
        f" to=get_weather<|message|>{_MUSE_PARIS.partition('is<')[0]}",
        [("breaks", "get_weather", '{"city": "Par')],
    ),
    Case(
        "inkling",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Ok.<|end_message|><|message_model|>get_weather"
        f"{_INKLING}<|message_model|>{_INKLING}<|content_model_end_sampling|>",
        [thinks("Hm."), says("Ok."), PARIS, PARIS],
    ),
    Case("inkling", f"get_weather{_INKLING}", [PARIS]),
    Case("inkling", '<|content_invoke_tool_json|>{"args": {}, "name": "ping"}<|end_message|>', [PING]),
    Case("inkling", "<|content_text|>Yes.<|end_message|>", [says("Yes.")]),
    Case("inkling", "Just so.", [says("Just so.")]),
    Case("inkling", "<|content_invoke_tool_text|>ls<|end_message|>", [says("ls")]),
    Case("phi4-mini", f"<|tool_call|>{GRANITE_ARRAY}<|/tool_call|>", [PARIS, PING]),
    Case("phi4-mini", f"<|tool_call|>{_JSON}<|/tool_call|>", [PARIS]),
    Case("phi4-mini", f"Ok.\nfunctools{GRANITE_ARRAY}", [says("Ok."), PARIS, PING]),
    Case("phi4-mini", f"functools[{_PARAMETERS}]", [PARIS]),
    Case("olmo3", '<function_calls>\nget_weather(city="Paris")\nping()\n</function_calls>', [PARIS, PING]),
    Case(
        "olmo3",
        "<think>Hm.</think>Ok.<function_calls>get_weather(city='Oslo', days=3)</function_calls>So.",
        [thinks("Hm."), says("Ok."), OSLO, says("So.")],
    ),
    Case(
        "olmo3",
        '<function_calls>\nget_weather(city="a", metric=true, note=null, where={"a": [1, False]})\n',
        [calls("get_weather", city="a", metric=True, note=None, where={"a": [1, False]})],
    ),
    Case(
        "olmo3",
        "<function_calls>\nNo call.\n</function_calls>",
        [says("<function_calls>\nNo call.\n</function_calls>")],
    ),
    Case("ui-tars", "Thought: Hm.\nAction: get_weather(city='Paris')", [says("Thought: Hm."), PARIS]),
    Case(
        "ui-tars",
        "Action: get_weather(city='Paris')\n\nping()\n\nThought: So.\nAction: ping()",
        [PARIS, PING, says("Thought: So."), PING],
    ),
    Case(
        "ui-tars",
        "Action: get_weather(city='<|box_start|>(1,2)<|box_end|>')",
        [calls("get_weather", city="<|box_start|>(1,2)<|box_end|>")],
    ),
    Case("ui-tars", "Action: fly()", [says("Action: fly()")]),
    Case("ernie4.5", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", [thinks("Hm."), says("Yes.\n\n")], OPENED),
    Case("ernie4.5", f"Hm.\n</think>\n\n\n<tool_call>\n{_JSON}\n</tool_call>\n", [thinks("Hm."), PARIS], OPENED),
    Case("kimi-vl", "◁think▷Hm.◁/think▷Yes.", [thinks("Hm."), says("Yes.")]),
    Case("kimi-vl", f"◁think▷Hm.◁/think▷<tool_call>{_JSON}</tool_call>", [thinks("Hm."), PARIS]),
    Case("mimo-v2", _MIMO.format("get_weather", "<parameter=city>Paris</parameter>\n"), [PARIS]),
    Case(
        "mimo-v2",
        "<think></think>"
        + _MIMO.format("write_file", "<parameter=content>a\n</parameter><parameter=path>\n</parameter>")
        + _MIMO.format("ping", ""),
        [calls("write_file", content="a\n", path="\n"), PING],
    ),
    Case(
        "plamo3",
        f"<|plamo:begin_think:plamo|>Hm.<|plamo:end_think:plamo|>Ok.<|plamo:begin_tool_requests:plamo|>"
        f"{_plamo('get_weather', ARGUMENTS)}{_plamo('ping', '{}', '')}<|plamo:end_tool_requests:plamo|>",
        [thinks("Hm."), says("Ok."), PARIS, PING],
    ),
    Case("plamo3", f"Hm.<|plamo:end_think:plamo|>{_plamo('get_weather', ARGUMENTS)}", [thinks("Hm."), PARIS], OPENED),
    Case("hunyuan-v4", _hunyuan("").replace("<tool_sep>", ""), [PARIS, PING]),
    Case("hunyuan-v4", f"Hm.</think>{_hunyuan('')}", [thinks("Hm."), PARIS, PING], OPENED),
    Case(
        "k2-horizon",
        f"Hm.</ifm|think>\n<ifm|tool_calls>\n{_IFM.format('')}\n</ifm|tool_calls>",
        [thinks("Hm."), PARIS],
        OPENED,
    ),
    Case(
        "k2-horizon",
        f"<ifm|tool_calls>{_IFM.format('<ifm|arg_type>string</ifm|arg_type>')}<ifm|tool_call>ping</ifm|tool_call></ifm|tool_calls>",
        [PARIS, PING],
    ),
    Case(
        "k2-horizon",
        "<ifm|tool_calls>"
        + _IFM_CALL.format(
            "unheard_of",
            "".join(_IFM_ARGUMENT.format(key, _IFM_TYPE.format(type), value) for key, type, value in _IFM_TYPED),
        ),
        [calls("unheard_of", a="1", b=1, c=[], d=1)],
    ),
    Case("k2-horizon", f"<ifm|tool_calls>\n<ifm|tool_call>{_JSON}</ifm|tool_call>\n</ifm|tool_calls>", [PARIS]),
    Case(
        "iquest-q1",
        "<think>Hm.</think>" + _LONGCAT.replace("longcat_arg", "arg").replace("longcat", "iquest"),
        [thinks("Hm."), PARIS],
    ),
    Case(
        "step3",
        f"Hm.</think>Ok.<｜tool_calls_begin｜>\n{_STEP}\n{_STEP}\n<｜tool_calls_end｜>",
        [thinks("Hm."), says("Ok."), PARIS, PARIS],
        OPENED,
    ),
    Case("step3", f"<｜tool_calls_begin｜>{_STEP}", [PARIS]),
    Case("step3", f"<｜tool_calls_begin｜>{_STEP.replace('function<｜tool_sep｜>', '')}<｜tool_calls_end｜>", [PARIS]),
    Case("step3", f"<｜tool_calls_begin｜>{_STEP}<｜tool_sep｜>{_STEP}<｜tool_calls_end｜>", [PARIS, PARIS]),
    Case("step3", _STEP.replace("<steptml:invoke", "get_weather\n<steptml:invoke"), [PARIS]),
    Case("functionary-3.2", f"get_weather\n{ARGUMENTS}", [PARIS]),
    Case("functionary-3.2", "all\nHello all\nof you.", [says("Hello all\nof you.")]),
    Case("functionary-3.2", f"all\nOk.\n>>>get_weather\n{ARGUMENTS}\n>>>ping\n{{}}", [says("Ok."), PARIS, PING]),
    Case("functionary-3.2", "all\n>>>fly\n{}", [says(">>>fly\n{}")]),
]
