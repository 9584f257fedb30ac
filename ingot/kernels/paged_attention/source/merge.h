// One threadgroup: one head of one query. Adds up what was found in each split, in their order: in those that a row needs, or
// in all, where SPLIT is 0.
//
// partial [tokens, heads, splits, VALUE_SIZE + 4], numbers [2 + heads], rows [rows, 6] -> attended [tokens, heads, VALUE_SIZE]
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int LINE = VALUE_SIZE + 4;
constexpr int COLUMNS = (VALUE_SIZE + THREADS - 1) / THREADS;  // of a thread
SHARED_FLOATS(maxima, THREADS / 32);
SHARED_FLOATS(factors, THREADS * 2);  // of some splits, and their sums of weights
const int row = int(threadgroup_position_in_grid.z) / rows[5];
const int query = int(threadgroup_position_in_grid.z) % rows[5];
const int head = int(threadgroup_position_in_grid.y);
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup);
const int thread_number = warp * 32 + lane;
const int length = rows[row * 6], count = rows[row * 6 + 3], token = rows[row * 6 + 2] + query;
if (query >= count) {
  return;
}
const int least = WINDOW > 0 && length - count + 1 > WINDOW ? length - count + 1 - WINDOW : 0;
const int splits = SPLIT == 0 ? int(partial_shape[2]) : length > 0 ? SPLIT_AT(length - 1) + 1 - SPLIT_AT(least) : 0;
const DEVICE float* found = partial + ((size_t)token * HEADS + head) * partial_shape[2] * LINE;

float largest = SINKS ? numbers[2 + head] : nothing();
for (int s = thread_number; s < splits; s += THREADS) {
  largest = larger(largest, found[s * LINE + VALUE_SIZE]);
}
#pragma unroll
for (int step = 16; step > 0; step /= 2) {
  largest = larger(largest, shuffle_xor(largest, step));
}
if (lane == 0) {
  maxima[warp] = largest;
}
group_barrier();
#pragma unroll
for (int other = 0; other < THREADS / 32; ++other) {
  largest = larger(largest, maxima[other]);
}

float sum = SINKS ? power_of_two(numbers[2 + head] - largest) : 0.0f, values[COLUMNS];
#pragma unroll
for (int i = 0; i < COLUMNS; ++i) {
  values[i] = 0.0f;
}
for (int first = 0; first < splits; first += THREADS) {
  const int some = splits - first < THREADS ? splits - first : THREADS;
  if (thread_number < some) {
    const DEVICE float* ends = found + (first + thread_number) * LINE + VALUE_SIZE;
    factors[thread_number * 2] = power_of_two(ends[0] - largest);
    factors[thread_number * 2 + 1] = ends[1];
  }
  group_barrier();
#pragma unroll 8
  for (int s = 0; s < some; ++s) {
    sum = multiply_add(factors[s * 2], factors[s * 2 + 1], sum);
  }
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = i * THREADS + thread_number;
    const DEVICE float* split = found + first * LINE + (column < VALUE_SIZE ? column : 0);
#pragma unroll 16
    for (int s = 0; s < some; ++s) {
      values[i] = multiply_add(factors[s * 2], split[s * LINE], values[i]);
    }
  }
  group_barrier();
}
#pragma unroll
for (int i = 0; i < COLUMNS; ++i) {
  const int column = i * THREADS + thread_number;
  if (column < VALUE_SIZE) {
    attended[((size_t)token * HEADS + head) * VALUE_SIZE + column] = T(values[i] / sum);
  }
}
