// WARPS warps, TOGETHER of them for numbers that are normed together: what a token read of the states is normed, before
// it is gated by SiLU or the sigmoid alone (NORM_FIRST) or behind that, or gated only.
//
// read [tokens, SIZE], gates [tokens, ROW], weight [WEIGHTS], which repeats, eps [1] -> gated [tokens, SIZE]. Number i's gate is in
// column GATE_AT + i / GATE_SPAN * GATE_STEP + i % GATE_SPAN.
constexpr int LANES = TOGETHER * 32;
constexpr int EACH = (NORM + LANES - 1) / LANES;
SHARED_FLOATS(partial, WARPS);
const int warp = int(simdgroup_index_in_threadgroup), token = int(threadgroup_position_in_grid.y);
const int lane = warp % TOGETHER * 32 + int(thread_index_in_simdgroup);
const int begin = (int(threadgroup_position_in_grid.x) * (WARPS / TOGETHER) + warp / TOGETHER) * NORM;
float x[EACH], opened[EACH], factors[EACH], squares = 0.0f;
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = begin + n * LANES + lane;
  factors[n] = NORMED && n * LANES + lane < NORM && i < SIZE ? float(weight[i % WEIGHTS]) : 1.0f;
}
AFTER_OTHERS();
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = begin + n * LANES + lane;
  const bool there = n * LANES + lane < NORM && i < SIZE;
  x[n] = there ? float(read[(size_t)token * SIZE + i]) : 0.0f;
  opened[n] = there ? float(gates[(size_t)token * ROW + GATE_AT + i / GATE_SPAN * GATE_STEP + i % GATE_SPAN]) : 0.0f;
  opened[n] = (SIGMOID ? 1.0f : opened[n]) * sigmoid(opened[n]);
  if (!NORM_FIRST) {
    x[n] = float(T(opened[n] * x[n]));
  }
  squares = multiply_add(x[n], x[n], squares);
}
float factor = 1.0f;
if (NORMED) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += shuffle_xor(squares, step);
  }
  if (TOGETHER > 1) {
    if (thread_index_in_simdgroup == 0) {
      partial[warp] = squares;
    }
    group_barrier();
    squares = 0.0f;
#pragma unroll
    for (int other = 0; other < TOGETHER; ++other) {
      squares += partial[warp / TOGETHER * TOGETHER + other];
    }
  }
  factor = 1.0f / root(squares / float(NORM) + eps[0]);
}
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = begin + n * LANES + lane;
  if (n * LANES + lane < NORM && i < SIZE) {
    float normed = x[n];
    if (NORMED) {
      normed = float(T(float(T(x[n] * factor)) * factors[n]));
    }
    gated[(size_t)token * SIZE + i] = NORM_FIRST ? T(opened[n] * normed) : T(normed);
  }
}
