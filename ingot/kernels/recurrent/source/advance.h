// One threadgroup: some columns of one value head's state of one row. A few lanes hold a column's numbers in registers while
// all tokens of the row pass, one after another, so that a token's bits do not depend on how a prompt is cut, nor on others.
//
// convolved [tokens, 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE], joint [tokens, ROW], where a value head's strength is in
// column STRENGTH_AT + (its key head) * FACTOR_STEP + (its number among those of that), slowness [tokens, SLOWNESS_ROW], where what
// its decay is made of is likewise from SLOWNESS_AT on, or (BY_KEY) where KEY_SIZE numbers are: each number of a key has a decay
// of its own. numbers [VALUE_HEADS * (1 + DECAYS) + 3]: rates, biases, eps, the most that strengths can be, and the bound. A decay is
// 2^(rate * softplus(x + bias)), or (BOUNDED) 2^(bound * sigmoid(rate * (x + bias))). spans [rows, 6], states
// [slots, VALUE_HEADS, VALUE_SIZE, KEY_SIZE], or addresses of which theirs is the second ->
// y [tokens, VALUE_HEADS * VALUE_SIZE], kept [..., VALUE_HEADS, VALUE_SIZE, KEY_SIZE]: the states after each token of the
// rows whose fifth number is where in there.
constexpr int LANES = KEY_SIZE % 32 == 0 ? 8 : 4;
constexpr int COLUMNS = THREADS / LANES;
constexpr int FOURS = KEY_SIZE / LANES / 4;
constexpr int CHUNK = KEY_SIZE <= 128 ? 16 : 8;  // tokens that are fetched at once
constexpr int CHANNELS = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE;
constexpr int DECAYS = BY_KEY ? KEY_SIZE : 1;  // of a value head
constexpr int OPTIONS = VALUE_HEADS * (1 + DECAYS);
SHARED_FLOATS(queries, CHUNK * KEY_SIZE);
SHARED_FLOATS(keys, CHUNK * KEY_SIZE);
SHARED_FLOATS(values, CHUNK * COLUMNS);
SHARED_FLOATS(decays, CHUNK * DECAYS);
SHARED_FLOATS(strengths, CHUNK);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int first = spans[row * 6], count = spans[row * 6 + 1], slot = spans[row * 6 + 2], keep = spans[row * 6 + 4];
const bool fresh = spans[row * 6 + 3] != 0;
const int target = spans[row * 6 + 5];
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

// Nothing that precedes this writes states or spans.
AFTER_OTHERS();
// What a chunk is made of is fetched while the one before is computed: a warp takes whole tokens.
constexpr int TOKENS = CHUNK / (THREADS / 32);
constexpr int EACH = (KEY_SIZE + 31) / 32;
constexpr int ENTERING = (COLUMNS + 31) / 32;
constexpr int OWN_DECAYS = (DECAYS + 31) / 32;
float fetched_q[TOKENS][EACH], fetched_k[TOKENS][EACH], entering[TOKENS][ENTERING], slow[TOKENS][OWN_DECAYS], strong[TOKENS];
for (int begin = -CHUNK; begin < count; begin += CHUNK) {
  if (begin >= 0) {
    group_barrier();
    // Queries and keys of length one, the first scaled; values; decays and strength.
#pragma unroll
    for (int n = 0; n < TOKENS; ++n) {
      const int t = warp + n * (THREADS / 32);
      float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        of_q = multiply_add(fetched_q[n][i], fetched_q[n][i], of_q);
        of_k = multiply_add(fetched_k[n][i], fetched_k[n][i], of_k);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        of_q += shuffle_xor(of_q, step);
        of_k += shuffle_xor(of_k, step);
      }
      of_q = 1.0f / root((of_q + numbers[OPTIONS]) * KEY_SIZE);
      of_k = 1.0f / root(of_k + numbers[OPTIONS]);
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        if (i * 32 + lane < KEY_SIZE) {
          queries[t * KEY_SIZE + i * 32 + lane] = fetched_q[n][i] * of_q;
          keys[t * KEY_SIZE + i * 32 + lane] = fetched_k[n][i] * of_k;
        }
      }
#pragma unroll
      for (int i = 0; i < ENTERING; ++i) {
        if (i * 32 + lane < COLUMNS) {
          values[t * COLUMNS + i * 32 + lane] = entering[n][i];
        }
      }
#pragma unroll
      for (int i = 0; i < OWN_DECAYS; ++i) {
        const int at = i * 32 + lane;
        if (at < DECAYS) {
          const float x = slow[n][i] + numbers[VALUE_HEADS + head * DECAYS + at];
          decays[t * DECAYS + at] =
              power_of_two(BOUNDED ? numbers[OPTIONS + 2] * sigmoid(numbers[head] * x) : numbers[head] * softplus(x));
        }
      }
      if (lane == 0) {
        strengths[t] = numbers[OPTIONS + 1] * sigmoid(strong[n]);
      }
    }
    group_barrier();
  }
#pragma unroll
  for (int n = 0; n < TOKENS; ++n) {
    const int t = begin + CHUNK + warp + n * (THREADS / 32);
    const bool there = t < count;
    const size_t token = first + t, of = token * CHANNELS + key_head * KEY_SIZE;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const bool within = there && i * 32 + lane < KEY_SIZE;
      fetched_q[n][i] = within ? float(convolved[of + i * 32 + lane]) : 0.0f;
      fetched_k[n][i] = within ? float(convolved[of + KEY_HEADS * KEY_SIZE + i * 32 + lane]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ENTERING; ++i) {
      const int column = i * 32 + lane;
      const size_t at = token * CHANNELS + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + begin_column + column;
      const bool within = there && column < COLUMNS && begin_column + column < VALUE_SIZE;
      entering[n][i] = within ? float(convolved[at]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < OWN_DECAYS; ++i) {
      const bool within = there && i * 32 + lane < DECAYS;
      const size_t at = token * SLOWNESS_ROW + SLOWNESS_AT + factor * DECAYS + i * 32 + lane;
      slow[n][i] = within ? float(slowness[at]) : 0.0f;
    }
    strong[n] = there ? float(joint[token * ROW + STRENGTH_AT + factor]) : 0.0f;
  }
  const int steps = begin < 0 ? 0 : count - begin < CHUNK ? count - begin : CHUNK;
#pragma unroll 2
  for (int t = 0; t < steps; ++t) {
    const float strength = strengths[t], value = values[t * COLUMNS + own];
    float q[FOURS * 4], k[FOURS * 4], decay[BY_KEY ? FOURS * 4 : 1], sums[4];
    decay[0] = decays[t * DECAYS];
#pragma unroll
    for (int j = 0; j < FOURS; ++j) {
      if (BY_KEY) {
        read_four(decays + t * DECAYS + (j * LANES + part) * 4, decay + j * 4);
      }
      read_four(keys + t * KEY_SIZE + (j * LANES + part) * 4, k + j * 4);
      read_four(queries + t * KEY_SIZE + (j * LANES + part) * 4, q + j * 4);
    }
#pragma unroll
    for (int i = 0; i < FOURS * 4; ++i) {
      state[i] *= decay[BY_KEY ? i : 0];
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
    store_four((DEVICE float4*)(STATES_AFTER(states, row, target, ALL) + line) + j * LANES + part, state + j * 4);
  }
}
