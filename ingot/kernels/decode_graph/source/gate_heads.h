// A thread a number: what heads attended to, by the gate that lies behind each head's queries.
//
// attended [tokens, HEADS * SIZE], projected [tokens, ROW] (of each head, its queries and its gate; something else behind them)
// -> gated [tokens, HEADS * SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < HEADS * SIZE) {
  const float gate = float(projected[(size_t)token * ROW + (i / SIZE * 2 + 1) * SIZE + i % SIZE]);
  const float share = float(T(1.0f / (1.0f + power_of_two(-1.44269504f * gate))));
  gated[(size_t)token * HEADS * SIZE + i] = T(float(attended[(size_t)token * HEADS * SIZE + i]) * share);
}
