// One threadgroup: some columns of one value head's state of one row. A few lanes hold a column's numbers in registers while
// all tokens of the row pass, one after another, so that a token's bits do not depend on how a prompt is cut, nor on others.
//
// convolved [tokens, 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE], joint [tokens, ROW], where a value head's decay is in column
// DECAY_AT + (its key head) * FACTOR_STEP + (its number among those of that), and its strength likewise, numbers
// [2 * VALUE_HEADS + 1] (log2 of decay, bias, eps), spans [rows, 5], states [slots, VALUE_HEADS, VALUE_SIZE, KEY_SIZE], or addresses
// of which theirs is the second ->
// y [tokens, VALUE_HEADS * VALUE_SIZE], kept [..., VALUE_HEADS, VALUE_SIZE, KEY_SIZE]: the states after each token of the
// rows whose fifth number is where in there.
constexpr int LANES = KEY_SIZE % 32 == 0 ? 8 : 4;
constexpr int COLUMNS = THREADS / LANES;
constexpr int FOURS = KEY_SIZE / LANES / 4;
constexpr int CHUNK = KEY_SIZE <= 128 ? 16 : 8;  // tokens that are fetched at once
constexpr int CHANNELS = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE;
SHARED_FLOATS(queries, CHUNK * KEY_SIZE);
SHARED_FLOATS(keys, CHUNK * KEY_SIZE);
SHARED_FLOATS(values, CHUNK * COLUMNS);
SHARED_FLOATS(gates, CHUNK * 2);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int first = spans[row * 5], count = spans[row * 5 + 1], slot = spans[row * 5 + 2], keep = spans[row * 5 + 4];
const bool fresh = spans[row * 5 + 3] != 0;
if (count <= 0) {
  return;
}
FIND_STATES(states, 1)
constexpr int IN_GROUP = VALUE_HEADS / KEY_HEADS;
const int key_head = head / IN_GROUP;
const int factor = key_head * FACTOR_STEP + head % IN_GROUP;
const int begin_column = int(threadgroup_position_in_grid.x) * COLUMNS;
const int own = (warp * 32 + lane) / LANES;  // column of this group
const int part = lane % LANES;
const bool held = begin_column + own < VALUE_SIZE;
const size_t line = ((size_t)head * VALUE_SIZE + begin_column + own) * KEY_SIZE;
constexpr size_t ALL = (size_t)VALUE_HEADS * VALUE_SIZE * KEY_SIZE;

float state[FOURS * 4];
#pragma unroll
for (int j = 0; j < FOURS; ++j) {
  float4 four;
  four.x = 0.0f; four.y = 0.0f; four.z = 0.0f; four.w = 0.0f;
  if (held && !fresh) {
    four = ((const DEVICE float4*)(states + slot * ALL + line))[j * LANES + part];
  }
  state[j * 4] = four.x; state[j * 4 + 1] = four.y; state[j * 4 + 2] = four.z; state[j * 4 + 3] = four.w;
}

for (int begin = 0; begin < count; begin += CHUNK) {
  const int steps = count - begin < CHUNK ? count - begin : CHUNK;
  group_barrier();
  // A warp takes whole tokens: queries and keys of length one, the first scaled; values; decay and strength.
  for (int t = warp; t < steps; t += THREADS / 32) {
    const size_t token = first + begin + t;
    const size_t of = token * CHANNELS + key_head * KEY_SIZE;
    float q[(KEY_SIZE + 31) / 32], k[(KEY_SIZE + 31) / 32], of_q = 0.0f, of_k = 0.0f;
#pragma unroll
    for (int i = 0; i < (KEY_SIZE + 31) / 32; ++i) {
      const bool there = i * 32 + lane < KEY_SIZE;
      q[i] = there ? float(convolved[of + i * 32 + lane]) : 0.0f;
      k[i] = there ? float(convolved[of + KEY_HEADS * KEY_SIZE + i * 32 + lane]) : 0.0f;
      of_q = multiply_add(q[i], q[i], of_q);
      of_k = multiply_add(k[i], k[i], of_k);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      of_q += shuffle_xor(of_q, step);
      of_k += shuffle_xor(of_k, step);
    }
    of_q = 1.0f / root((of_q + numbers[2 * VALUE_HEADS]) * KEY_SIZE);
    of_k = 1.0f / root(of_k + numbers[2 * VALUE_HEADS]);
#pragma unroll
    for (int i = 0; i < (KEY_SIZE + 31) / 32; ++i) {
      if (i * 32 + lane < KEY_SIZE) {
        queries[t * KEY_SIZE + i * 32 + lane] = q[i] * of_q;
        keys[t * KEY_SIZE + i * 32 + lane] = k[i] * of_k;
      }
    }
    for (int column = lane; column < COLUMNS; column += 32) {
      const size_t at = token * CHANNELS + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + begin_column + column;
      values[t * COLUMNS + column] = begin_column + column < VALUE_SIZE ? float(convolved[at]) : 0.0f;
    }
    if (lane == 0) {
      const float slowness = softplus(float(joint[token * ROW + DECAY_AT + factor]) + numbers[VALUE_HEADS + head]);
      gates[t * 2] = power_of_two(numbers[head] * slowness);
      gates[t * 2 + 1] = sigmoid(float(joint[token * ROW + STRENGTH_AT + factor]));
    }
  }
  group_barrier();
  for (int t = 0; t < steps; ++t) {
    const float decay = gates[t * 2], strength = gates[t * 2 + 1], value = values[t * COLUMNS + own];
    float q[FOURS * 4], k[FOURS * 4], sums[4];
#pragma unroll
    for (int j = 0; j < FOURS; ++j) {
      read_four(keys + t * KEY_SIZE + (j * LANES + part) * 4, k + j * 4);
      read_four(queries + t * KEY_SIZE + (j * LANES + part) * 4, q + j * 4);
    }
#pragma unroll
    for (int i = 0; i < FOURS * 4; ++i) {
      state[i] *= decay;
      sums[i % 4] = i < 4 ? state[i] * k[i] : multiply_add(state[i], k[i], sums[i % 4]);
    }
    float known = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      known += shuffle_xor(known, step);
    }
    const float delta = (value - known) * strength;
#pragma unroll
    for (int i = 0; i < FOURS * 4; ++i) {
      state[i] = multiply_add(k[i], delta, state[i]);
      sums[i % 4] = i < 4 ? state[i] * q[i] : multiply_add(state[i], q[i], sums[i % 4]);
    }
    float read = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      read += shuffle_xor(read, step);
    }
    if (held && part == 0) {
      y[((size_t)(first + begin + t) * VALUE_HEADS + head) * VALUE_SIZE + begin_column + own] = T(read);
    }
    if (held && keep >= 0) {
#pragma unroll
      for (int j = 0; j < FOURS; ++j) {
        store_four((DEVICE float4*)(kept + (keep + begin + t) * ALL + line) + j * LANES + part, state + j * 4);
      }
    }
  }
}
if (held) {
#pragma unroll
  for (int j = 0; j < FOURS; ++j) {
    store_four((DEVICE float4*)(STATES_AFTER(states, row, slot, ALL) + line) + j * LANES + part, state + j * 4);
  }
}
