// A thread a number: the first SIZE numbers of each head of each token, head by head.
//
// states [tokens, ROW], of which each head has STEP numbers -> split [heads, tokens, SIZE]
const int head = int(threadgroup_position_in_grid.y), token = int(threadgroup_position_in_grid.z);
const int tokens = int(threadgroups_per_grid.z);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  split[((size_t)head * tokens + token) * SIZE + i] = states[(size_t)token * ROW + head * STEP + i];
}
