// One threadgroup: one head of one query. Adds up what `attend` found in each stretch, in their order.
//
// partial [tokens, heads, stretches, VALUE_SIZE + 4], numbers [2 + heads], rows [rows, 6] -> attended [tokens, heads, VALUE_SIZE]
constexpr int HEADS = KV_HEADS * GROUP;
const int row = int(threadgroup_position_in_grid.z) / rows[5];
const int query = int(threadgroup_position_in_grid.z) % rows[5];
const int head = int(threadgroup_position_in_grid.y);
const int thread_number = int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int length = rows[row * 6], count = rows[row * 6 + 3], token = rows[row * 6 + 2] + query;
if (query >= count) {
  return;
}
const int least = WINDOW > 0 && length - count + 1 > WINDOW ? length - count + 1 - WINDOW : 0;
const int stretches = (length + STRETCH - 1) / STRETCH - least / STRETCH;
const DEVICE float* found = partial + ((size_t)token * HEADS + head) * partial_shape[2] * (VALUE_SIZE + 4);

float largest = SINKS ? numbers[2 + head] : nothing();
for (int s = 0; s < stretches; ++s) {
  largest = larger(largest, found[s * (VALUE_SIZE + 4) + VALUE_SIZE]);
}
for (int column = thread_number; column < VALUE_SIZE; column += THREADS) {
  float sum = SINKS ? power_of_two(numbers[2 + head] - largest) : 0.0f, value = 0.0f;
  for (int s = 0; s < stretches; ++s) {
    const DEVICE float* stretch = found + s * (VALUE_SIZE + 4);
    const float factor = power_of_two(stretch[VALUE_SIZE] - largest);
    sum = multiply_add(factor, stretch[VALUE_SIZE + 1], sum);
    value = multiply_add(factor, stretch[column], value);
  }
  attended[((size_t)token * HEADS + head) * VALUE_SIZE + column] = T(value / sum);
}
