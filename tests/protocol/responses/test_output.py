"""What the rounds of one response add up to."""

from __future__ import annotations

import msgspec

from ingot.engine.request import Ended, SpeculationReport, Timing, Usage
from ingot.protocol.chat.answers import AnswerHead, Receipt
from ingot.protocol.responses.output import add_rounds


def test_the_receipt_of_a_response_adds_up_its_rounds() -> None:
    first = add_rounds(None, Ended(Usage(10, 4, 2, 1), Timing(0.1, 0.2, 0.3), (), SpeculationReport(8, 2, 2)))
    total = add_rounds(first, Ended(Usage(20, 6, 9, 0), Timing(0.1, 0.2, 0.3), (), SpeculationReport(2, 1, 5)))
    receipt = msgspec.to_builtins(Receipt.of(AnswerHead("resp_1", 0, "toy", ""), total))
    assert receipt["timing"] == {"queue_s": 0.2, "prefill_s": 0.4, "decode_s": 0.6}
    assert receipt["speculation"] == {"proposed": 10, "accepted": 3, "passes": 7, "tokens_per_pass": 1.429}
    assert total.usage == Usage(30, 10, 11, 1)
