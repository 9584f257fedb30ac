// A thread a number: what a token's experts gave, by their weights, summed in their order; and beside it what all tokens'
// expert gave.
//
// given [tokens * TOP, SIZE], chosen, weights [tokens * TOP], bias [experts, SIZE], shared [tokens, SIZE], gates [tokens, GATES],
// of which the one at GATE_AT is read -> combined [tokens, SIZE]
// What is BIASED is so before it is weighed. BESIDE: shared is added, and GATED by a sigmoid.
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < TOP; ++n) {
    const int product = token * TOP + n;
    float own = float(given[(size_t)product * SIZE + i]);
    if (BIASED) {
      own = float(T(own + float(bias[(size_t)chosen[product] * SIZE + i])));
    }
    sum = multiply_add(weights[product], own, sum);
  }
  float whole = float(T(sum));
  if (BESIDE) {
    float own = float(shared[(size_t)token * SIZE + i]);
    if (GATED) {
      const float gate = float(gates[(size_t)token * GATES + GATE_AT]);
      own = float(T(own * float(T(1.0f / (1.0f + power_of_two(-1.44269504f * gate))))));
    }
    whole += own;
  }
  combined[(size_t)token * SIZE + i] = T(whole);
}
