// A thread a number: two states of a token, one behind the other.
//
// first, second [tokens, SIZE] -> both [tokens, 2 * SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  both[(size_t)token * 2 * SIZE + i] = first[(size_t)token * SIZE + i];
  both[((size_t)token * 2 + 1) * SIZE + i] = second[(size_t)token * SIZE + i];
}
