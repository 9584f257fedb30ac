// A thread a number: what an MLP gates, by its gate, rounded where plain operations would round.
//
// both [tokens, 2 * SIZE]: gates, and what they gate -> gated [tokens, SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  const DEVICE T* from = both + (size_t)token * 2 * SIZE;
  const float gate = float(from[i]);
  const float share = float(T(1.0f / (1.0f + power_of_two(-1.44269504f * gate))));
  gated[(size_t)token * SIZE + i] = T(float(T(gate * share)) * float(from[SIZE + i]));
}
