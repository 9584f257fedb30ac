from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.request import Request
from ingot.engine.seats import Seats
from ingot.engine.sequence import Sequence
from tests.engine.world import CountingSlots


def make(number: int) -> Sequence:
    return Sequence(Request(f"r{number}", ((number,),)), 0, number, (number,), 10, seed=0)


@given(st.lists(st.tuples(st.sampled_from(["sit", "decode", "leave"]), st.integers(0, 9)), max_size=80))
def test_rows_stay_with_their_sequences_through_any_coming_and_going(moves: list[tuple[str, int]]) -> None:
    slots = CountingSlots(10)
    seats = Seats(slots)
    for number, (move, which) in enumerate(moves):
        if move == "sit" and len(seats.taken) < 10:
            sequence = make(number)
            seats.sit(sequence)
            assert sequence.slot is not None
            slots.rows[sequence.slot] = [number]
        elif move == "decode" and len(seats.taken) > seats.decoding:
            seats.start_decoding(seats.taken[seats.decoding + which % (len(seats.taken) - seats.decoding)])
        elif move == "leave" and seats.taken:
            seats.leave(seats.taken[which % len(seats.taken)])
        seats.check()
        assert [row[0] for row in slots.rows if row] == [sequence.ticket for sequence in seats.taken]
