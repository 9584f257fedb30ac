"""Events on their way to readers, of whom some are gone."""

from __future__ import annotations

import logging

import pytest

from ingot.engine.jobs import Job
from ingot.engine.outbox import Outbox
from ingot.engine.request import Failed, Request
from ingot.engine.streams import Batch
from ingot.errors import Cancelled, IngotError
from tests.engines import tiny_tokenizer


class Reader:
    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.batches: list[Batch] = []

    def post(self, batch: Batch) -> None:
        if self.gone:
            raise OSError("nobody is there")
        self.batches.append(batch)


def job(id: str, reader: Reader) -> Job:
    return Job(Request(id, ((1,),)), reader, [], tiny_tokenizer())


def said(text: str) -> Failed:
    return Failed(IngotError(text))


def nobody(job: Job) -> None:
    raise AssertionError(f"the reader of {job.request.id} is there")


def test_a_reader_is_woken_once_for_all_that_a_step_has_for_it() -> None:
    outbox, readers = Outbox(), [Reader(), Reader()]
    one, two = (job(f"{number}", reader) for number, reader in enumerate(readers))
    first, second, third = (said(word) for word in ("first", "second", "third"))
    outbox.put(one, [first])
    outbox.put(two, [second])
    outbox.put(one, [])
    outbox.put(one, [third])
    outbox.flush(nobody)
    outbox.flush(nobody)
    assert [reader.batches for reader in readers] == [[[first, third]], [[second]]]


def test_whoever_takes_nothing_is_ended_and_hears_no_more_and_the_others_do(caplog: pytest.LogCaptureFixture) -> None:
    outbox, here = Outbox(), Reader()
    deaf, other = job("deaf", Reader(gone=True)), job("other", here)
    ended: list[Job] = []

    def end(gone: Job) -> None:
        ended.append(gone)
        outbox.put(gone, [Failed(Cancelled("The request was cancelled"))])

    last = said("last")
    outbox.put(deaf, [said("anything")])
    outbox.put(other, [last])
    with caplog.at_level(logging.ERROR, "ingot.engine"):
        outbox.flush(end)
    outbox.flush(nobody)
    assert ended == [deaf] and here.batches == [[last]]
    assert "nobody takes the events of request deaf" in caplog.text


def test_a_job_is_sent_off_with_what_was_still_here_for_it() -> None:
    outbox, reader = Outbox(), Reader()
    leaving = job("leaving", reader)
    earlier, last = said("earlier"), said("last")
    outbox.put(leaving, [earlier])
    outbox.send_off(leaving, last)
    outbox.send_off(job("deaf", Reader(gone=True)), last)
    outbox.flush(nobody)
    assert reader.batches == [[earlier, last]]
