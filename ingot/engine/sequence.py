"""One answer in the making. A few integers say all that scheduling needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from ingot.cache.codecs.names import RAW
from ingot.cache.forward_batch import Row
from ingot.engine.request import CacheReport, Phase, Request, Sampling
from ingot.engine.sight import Sight
from ingot.engine.sparse.ask import SparseReport
from ingot.engine.sparse.thinned import Thinned
from ingot.engine.specprefill.selection import Places
from ingot.errors import IngotError
from ingot.models.vision.tower import PositionArray
from ingot.text.grammar.matcher import Guide
from ingot.text.tokens.translation import Translation


@dataclass(eq=False, slots=True)
class Sequence:
    """`tokens` are known, `computed` of them have their states in a row, `sampled` new ones were drawn.

    A drawn token may not be known yet: the engine reads a step's tokens while the next step runs.
    """

    request: Request
    index: int
    ticket: int  # order of arrival
    prompt: tuple[int, ...]
    limit: int  # most new tokens
    seed: int
    stop_tokens: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    sampled: int = 0
    reserved: int = 0
    row: Row | None = None  # while it runs
    decoding: bool = False
    ended: bool = False
    preemptions: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    drawn_at: float | None = None  # when its newest token was known
    scored: int = 0  # prompt tokens whose logprobs are computed or on their way; each is told once
    sight: Sight | None = None  # what its prompt shows besides tokens
    thinned: Thinned | None = None  # its prompt as it was sent, where only some of it is computed
    sparse: SparseReport | None = None  # what came of asking for that, once that is settled
    translated: Translation | None = None  # its prompt as who scores it has it, where that is in other tokens
    scoring_at: float | None = None  # when it began to be scored
    marks: frozenset[int] = frozenset()  # lengths at which a message of the prompt ends
    stops: frozenset[int] = frozenset()  # further lengths at which it is worth keeping what it computed
    agreed: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By another's ticket: its own length, the other's, and how many tokens they have in common."""
    cached: int = 0  # tokens that were taken over when it first ran
    report: CacheReport | None = None  # the same, explained
    kept: int = 0  # tokens that the prefix index holds of it
    codec: str = RAW  # what its states went through that were taken over
    proposed: int = 0  # tokens that were guessed ahead for it
    accepted: int = 0  # those of them that it would have drawn anyway
    passes: int = 0  # forward passes that drew for it, behind its prompt's
    unread: list[int] = field(default_factory=list)  # drawn and verified, but not yet among its known tokens
    guide: Guide | None = None  # what it is held to; has accepted the known tokens, each once
    unmasked: IngotError | None = None  # why its guide could not say what may come next: that draw will not count
    failure: IngotError | None = None  # of its guide: it must end, and its newest token is not to be shown

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def arrived(self) -> float:
        return self.request.arrived

    @property
    def stored(self) -> Many[int]:
        """The tokens whose states its row has, and perhaps more."""
        return [*self.tokens, *self.unread] if self.unread else self.tokens

    @property
    def keys(self) -> Many[int]:
        """Its known tokens as the prefix index knows them."""
        return self.keyed(self.tokens)

    def keyed(self, tokens: Many[int]) -> Many[int]:
        placed = self._placed
        return tokens if placed is None else placed.keyed(tokens)

    @property
    def _placed(self) -> Thinned | Sight | None:
        """Who knows where its tokens stand, where they do not stand one behind another."""
        return self.thinned or self.sight

    def position(self, place: int) -> int:
        """What RoPE is told of the token that is stored at `place`."""
        placed = self._placed
        return place if placed is None else placed.position(place)

    def stated(self, begin: int, end: int) -> PositionArray | None:
        """Positions of the tokens at places [begin, end), where they do not follow each other."""
        placed = self._placed
        return None if placed is None else placed.stated(begin, end)

    def thin(self, kept: Places) -> None:
        """Go on with so much of its prompt, before any of it is computed. From now on it is what is left that counts
        wherever tokens are stored."""
        assert self.row is None and not self.sampled
        self.sight = None if self.sight is None else self.sight.thinned(kept)
        self.thinned = Thinned(self.prompt, kept, self.sight)
        self.prompt = self.thinned.tokens
        self.tokens = list(self.prompt)
        self.marks = self.thinned.places(self.marks)
        self.agreed.clear()

    @property
    def whole_prompt(self) -> tuple[int, ...]:
        """As it was sent."""
        return self.prompt if self.thinned is None else self.thinned.whole

    @property
    def most_taken_over(self) -> int:
        """Of its tokens, those that it may take over: one always stays to be computed, and no medium is cut."""
        most = len(self.tokens) - 1
        item = None if self.sight is None else self.sight.inside(most)
        return most if item is None else item.begin

    @property
    def generated(self) -> Many[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def produced(self) -> int:
        """New tokens that are known."""
        return len(self.tokens) - len(self.prompt)

    @property
    def total(self) -> int:
        """Tokens that exist, known or not."""
        return len(self.prompt) + self.sampled

    @property
    def known(self) -> bool:
        """Every drawn token has been read back."""
        return len(self.tokens) == self.total

    @property
    def remaining(self) -> int:
        """Tokens whose states are still to be computed."""
        return self.total - self.computed

    @property
    def peak(self) -> int:
        """Tokens that its row holds when it is longest: the last one drawn is never computed."""
        return len(self.prompt) + max(0, self.limit - 1)

    @property
    def exhausted(self) -> bool:
        """All its tokens are drawn; what is left is to read them."""
        return self.sampled >= max(1, self.limit)  # a prompt that is only scored still runs to its end

    def banned_at(self, sampled: int) -> Many[int]:
        """Tokens that may not come next when so many are drawn."""
        return sorted(self.stop_tokens) if sampled < self.request.stop.min_tokens else ()

    @property
    def scoring(self) -> bool:
        """Its prompt's logprobs are asked for and not all on their way yet."""
        return self.sampling.prompt_logprobs is not None and self.scored < len(self.prompt) - 1

    @property
    def phase(self) -> Phase:
        if self.row is None:
            return "queued"
        return "decode" if self.decoding else "prefill"
