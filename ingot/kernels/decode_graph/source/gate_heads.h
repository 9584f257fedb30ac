// A thread a number: what heads attended to, by their gates, of which there is one a head or one a number.
//
// attended [tokens, HEADS * SIZE], gates [tokens, ROW] (those of a head begin every STEP numbers, from BEGIN on) -> gated
// [tokens, HEADS * SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < HEADS * SIZE) {
  const float gate = float(gates[(size_t)token * ROW + BEGIN + i / SIZE * STEP + (ONE_A_HEAD ? 0 : i % SIZE)]);
  const float size = gate < 0.0f ? -gate : gate;
  const float opened = SOFTPLUS
      ? (gate < 0.0f ? 0.0f : gate) + 0.69314718f * logarithm_of_two(1.0f + power_of_two(-1.44269504f * size))
      : 1.0f / (1.0f + power_of_two(-1.44269504f * gate));
  gated[(size_t)token * HEADS * SIZE + i] = T(float(attended[(size_t)token * HEADS * SIZE + i]) * float(T(opened)));
}
