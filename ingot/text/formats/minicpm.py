"""MiniCPM 5: functions with named parameters and no tags around them."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, KeyClose, Name, TagEnd, TextParameters
from ingot.text.formats.thinking import THINK

MINICPM5 = Format(
    name="minicpm5",
    forms=(
        CallForm(
            call=(
                '<function name="',
                Name(),
                TagEnd('">', alone=('"/>', '" />')),
                Gap(),
                TextParameters(
                    key_open='<param name="',
                    key_closes=(KeyClose('">'),),
                    value_close="</param>",
                    end="</function>",
                    quote=("<![CDATA[", "]]>"),
                ),
            ),
            unopened="line",
        ),
    ),
    thinking=THINK,
    signs=(("<function name=", "<param name="),),
    model_types=("minicpm5",),
)
