// One group a token: a layer's output is added to the states, and these are normed for the next.
//
// states, added [tokens, SIZE], weight [SIZE], eps [8] -> sums, normed [tokens, SIZE]
// What is not ADDED is not read, and what is not NORMED is not written.
constexpr int EACH = (SIZE + WARPS * 32 - 1) / (WARPS * 32);
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup);
const int thread = warp * 32 + lane, from = int(threadgroup_position_in_grid.x) * SIZE;
SHARED_FLOATS(parts, WARPS);
float x[EACH], factors[EACH];
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * WARPS * 32 + thread;
  factors[n] = NORMED && i < SIZE ? float(weight[i]) : 0.0f;
}
AFTER_OTHERS()
float squares = 0.0f;
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * WARPS * 32 + thread;
  x[n] = i < SIZE ? float(states[from + i]) : 0.0f;
  if (ADDED && i < SIZE) {
    const T sum = T(x[n] + float(added[from + i]));
    sums[from + i] = sum;
    x[n] = float(sum);
  }
  squares = multiply_add(x[n], x[n], squares);
}
if (NORMED) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += shuffle_xor(squares, step);
  }
  if (lane == 0) {
    parts[warp] = squares;
  }
  group_barrier();
  float whole = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    whole += parts[i];
  }
  const float factor = 1.0f / root(whole / float(SIZE) + eps[0]);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = n * WARPS * 32 + thread;
    if (i < SIZE) {
      normed[from + i] = T(float(T(x[n] * factor)) * factors[n]);
    }
  }
}
