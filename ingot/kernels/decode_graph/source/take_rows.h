// A thread a number: the states of some tokens.
//
// states [TOKENS, SIZE], rows [some] -> taken [some, SIZE]
const int row = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int given = rows[row];
const size_t token = given < 0 || given >= TOKENS ? 0 : given;
if (i < SIZE) {
  taken[(size_t)row * SIZE + i] = states[token * SIZE + i];
}
