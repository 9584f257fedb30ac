// One group a token: what a part of a layer gave is added to the states, and these are normed for the next part.
//
// states, added [tokens, SIZE], weight, shift, after [SIZE], numbers [8] (what is added to the mean of squares of the sums, and of
// what is added; what the latter and what the sums are multiplied by) -> sums, normed [tokens, SIZE]
// What is not ADDED is not read, and what is not NORMED is not written. What is added is itself normed AFTER its part, or SCALED;
// CLIPPED sums stay finite in float16; RESCALED ones are multiplied once they are rounded. Before CENTRED ones are normed, their
// mean is taken from them, and what is SHIFTED is added behind.
constexpr int EACH = (SIZE + WARPS * 32 - 1) / (WARPS * 32);
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup);
const int thread = warp * 32 + lane, from = int(threadgroup_position_in_grid.x) * SIZE;
SHARED_FLOATS(parts, WARPS);
#define SUM_OF_GROUP(whole, own)              \
  {                                           \
    float sum = own;                          \
    for (int step = 16; step > 0; step /= 2) { \
      sum += shuffle_xor(sum, step);          \
    }                                         \
    if (lane == 0) {                          \
      parts[warp] = sum;                      \
    }                                         \
    group_barrier();                          \
    for (int i = 0; i < WARPS; ++i) {         \
      whole += parts[i];                      \
    }                                         \
  }
float x[EACH], factors[EACH], others[EACH], shifts[EACH];
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * WARPS * 32 + thread;
  factors[n] = NORMED && i < SIZE ? float(weight[i]) : 0.0f;
  shifts[n] = SHIFTED && i < SIZE ? float(shift[i]) : 0.0f;
  others[n] = AFTER && i < SIZE ? float(after[i]) : 0.0f;
}
AFTER_OTHERS()
float given[EACH];
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * WARPS * 32 + thread;
  x[n] = i < SIZE ? float(states[from + i]) : 0.0f;
  given[n] = ADDED && i < SIZE ? float(added[from + i]) : 0.0f;
}
if (AFTER) {
  float squares = 0.0f, whole = 0.0f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    squares = multiply_add(given[n], given[n], squares);
  }
  SUM_OF_GROUP(whole, squares)
  const float factor = 1.0f / root(whole / float(SIZE) + numbers[1]);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    given[n] = float(T(float(T(given[n] * factor)) * others[n]));
  }
  group_barrier();
}
float squares = 0.0f;
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * WARPS * 32 + thread;
  if (SCALED) {
    given[n] = float(T(given[n] * float(T(numbers[2]))));
  }
  if (ADDED && i < SIZE) {
    float whole = x[n] + given[n];
    if (CLIPPED) {
      whole = whole > 65504.0f ? 65504.0f : whole < -65504.0f ? -65504.0f : whole;
    }
    const T sum = RESCALED ? T(float(T(whole)) * float(T(numbers[3]))) : T(whole);
    sums[from + i] = sum;
    x[n] = float(sum);
  }
  squares = multiply_add(x[n], x[n], squares);
}
if (CENTRED) {
  float whole = 0.0f, mean = 0.0f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    whole += x[n];
  }
  SUM_OF_GROUP(mean, whole)
  mean = mean / float(SIZE);
  squares = 0.0f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = n * WARPS * 32 + thread;
    x[n] = i < SIZE ? x[n] - mean : 0.0f;
    squares = multiply_add(x[n], x[n], squares);
  }
  group_barrier();
}
if (NORMED) {
  float whole = 0.0f;
  SUM_OF_GROUP(whole, squares)
  const float factor = 1.0f / root(whole / float(SIZE) + numbers[0]);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = n * WARPS * 32 + thread;
    if (i < SIZE) {
      const float own = float(T(x[n] * factor)) * factors[n];
      normed[from + i] = T(SHIFTED ? own + shifts[n] : own);
    }
  }
}
