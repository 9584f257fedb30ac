// A thread a number: each token's numbers, times a factor of its own.
//
// states [tokens, SIZE], factors [tokens] -> scaled [tokens, SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  scaled[(size_t)token * SIZE + i] = T(float(states[(size_t)token * SIZE + i]) * factors[token]);
}
