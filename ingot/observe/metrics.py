"""What the engine has done since it started, and how full it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ingot.observe.histogram import Histogram, one_two_five

# vLLM's bounds, so that its dashboards' heat maps fit; tokens may come faster here than its first bound tells apart.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWERS = (1, 2, 5, 10, 20)


class Figures:
    """The engine thread writes; any thread may read, without a lock. Counts only grow, each is read at once, and no
    table changes its size."""

    def __init__(self, context: int, endings: Iterable[str], reasons: Iterable[str]) -> None:
        """`context` is the longest sequence, `endings` are how requests end, `reasons` why no more of a prompt was
        taken over."""
        self.prompt_tokens = 0  # of prompts that began to run;
        self.asked_tokens = 0  # of those, the ones that the prefix cache was asked about,
        self.matched_tokens = 0  # those it had,
        self.read_tokens = 0  # and those of the latter that were read from disk
        self.filed_asked_tokens = 0  # what memory lacked and the disk was asked for
        self.media_asked = 0  # pictures and clips of prompts that are to be computed,
        self.media_found = 0  # and those of them whose features were there, or on their way
        self.generated_tokens = 0
        self.preemptions = 0
        self.endings = dict.fromkeys(endings, 0)
        self.reasons = dict.fromkeys(reasons, 0)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(TOKEN_S)
        self.token_s = Histogram(TOKEN_S)  # of each answer, on average
        self.request_s = Histogram(REQUEST_S)
        self.queue_s, self.prefill_s, self.decode_s, self.inference_s = (Histogram(REQUEST_S) for _ in range(4))
        self.prompt_lengths, self.answer_lengths, self.longest_answers, self.answer_limits = (
            Histogram(tuple(one_two_five(context))) for _ in range(4)
        )
        self.answers = Histogram(ANSWERS)
        self.step_s = Histogram(STEP_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.occupied = 0.0  # the part of the memory for states that running sequences have reserved
        self.most_tokens = 0  # that fit into all of it
        self.page_tokens = 0  # that it is given out by
        self.state_bytes = 0  # that exist
        self.held_bytes = 0  # of those, what running sequences and kept prefixes hold
        self.kept_bytes: Mapping[str, int] = {}  # of kept prefixes, by tenant; never changed, but replaced
        self.active_bytes = 0  # that mlx has for everything: weights, states, what is being computed
