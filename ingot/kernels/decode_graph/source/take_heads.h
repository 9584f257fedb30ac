// A thread a number: the first numbers of each head, those of one head's tokens together.
//
// projected [tokens, ROW], in which heads begin every STEP numbers -> picked [HEADS, tokens, SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < HEADS * SIZE) {
  const size_t to = (size_t)(i / SIZE) * projected_shape[0] + token;
  picked[to * SIZE + i % SIZE] = projected[(size_t)token * ROW + i / SIZE * STEP + i % SIZE];
}
