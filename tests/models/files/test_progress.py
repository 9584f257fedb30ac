import io

from ingot.models.files.progress import REPORT_S, TerminalProgress, format_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    stream, clock = Terminal(), Clock()
    progress = TerminalProgress(stream, clock)
    for done in (0, 500, 1000):
        progress("fetching", done, 1000)
        clock.now += 1
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("fetching: 1.0 kB of 1.0 kB (100 %)\n")


def test_a_terminal_is_not_redrawn_for_every_byte() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream, Clock())
    for done in range(100):
        progress("fetching", done, 1000)
    assert stream.getvalue().count("\r") == 1


def test_a_new_message_starts_a_new_line() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream, Clock())
    progress("fetching", 1, 2)
    progress("converting", 1, 2)
    progress.finish()
    assert [line.rpartition("K")[2] for line in stream.getvalue().strip().split("\n")] == [
        "fetching: 1 B of 2 B (50 %)",
        "converting: 1 B of 2 B (50 %)",
    ]


def test_a_log_gets_a_line_at_the_start_now_and_then_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = TerminalProgress(stream, clock)
    for done in range(11):
        progress("fetching", done, 10)
        clock.now += REPORT_S / 4
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("fetching: 0 B") and lines[-1].endswith("(100 %)")
    assert 3 <= len(lines) <= 5


def test_work_of_unknown_length_is_shown_without_a_share() -> None:
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    progress("looking")
    progress("fetching", 1_500_000)
    assert stream.getvalue() == "looking\nfetching: 1.5 MB\n"


def test_sizes_are_short() -> None:
    assert [format_bytes(size) for size in (0, 999, 1000, 92_900_000, 150_000_000, 4_200_000_000)] == [
        "0 B", "999 B", "1.0 kB", "92.9 MB", "150 MB", "4.2 GB",
    ]  # fmt: skip
