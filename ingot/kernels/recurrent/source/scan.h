// One threadgroup: some columns of one head's state of one row. A few lanes hold four columns' numbers in registers while all
// tokens of the row pass, one after another, so that a token's bits do not depend on how a prompt is cut, nor on others.
//
// convolved [tokens, HEADS * SIZE + 2 * KEYS * STATE]: what enters, then what it is written by, and read by, of each group of heads;
// joint [tokens, ROW], whose steps begin at STEP_AT, numbers [3 * HEADS + 2] (log2 of decay, bias, skip; limits of steps), spans
// [rows, 5], states [slots, HEADS, SIZE, STATE], or addresses of which theirs is the second -> y [tokens, HEADS * SIZE], kept
// [..., HEADS, SIZE, STATE]: the states after each token of the rows whose fifth number is where in there.
constexpr int LANES = STATE % 64 == 0 ? 16 : STATE % 32 == 0 ? 8 : 4;
constexpr int EACH = 4;  // columns of so many lanes
constexpr int COLUMNS = WARPS * 32 / LANES * EACH;
constexpr int FOURS = STATE / LANES / 4;
constexpr int CHUNK = STATE <= 128 ? 16 : 8;  // tokens that are fetched at once
constexpr int CHANNELS = HEADS * SIZE + 2 * KEYS * STATE;
constexpr int EIGHTS = STATE / 8;
SHARED_FLOATS(writers, CHUNK * STATE);
SHARED_FLOATS(readers, CHUNK * STATE);
SHARED_FLOATS(values, CHUNK * COLUMNS);
SHARED_FLOATS(gates, CHUNK * 2);

const int lane = int(thread_index_in_simdgroup), place = int(simdgroup_index_in_threadgroup) * 32 + lane;
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int first = spans[row * 5], count = spans[row * 5 + 1], slot = spans[row * 5 + 2], keep = spans[row * 5 + 4];
const bool fresh = spans[row * 5 + 3] != 0;
if (count <= 0) {
  return;
}
FIND_STATES(states, 1)
const int part = lane % LANES;
const int own = place / LANES * EACH;  // the first of these lanes' columns, in this group
const int begin_column = int(threadgroup_position_in_grid.x) * COLUMNS;
const size_t line = ((size_t)head * SIZE + begin_column + own) * STATE;
constexpr size_t ALL = (size_t)HEADS * SIZE * STATE;
const int writer = HEADS * SIZE + head / (HEADS / KEYS) * STATE;

float state[EACH][FOURS * 4];
#pragma unroll
for (int e = 0; e < EACH; ++e) {
#pragma unroll
  for (int j = 0; j < FOURS; ++j) {
    float4 four;
    four.x = 0.0f; four.y = 0.0f; four.z = 0.0f; four.w = 0.0f;
    if (begin_column + own + e < SIZE && !fresh) {
      four = ((const DEVICE float4*)(states + slot * ALL + line + e * STATE))[j * LANES + part];
    }
    state[e][j * 4] = four.x; state[e][j * 4 + 1] = four.y; state[e][j * 4 + 2] = four.z; state[e][j * 4 + 3] = four.w;
  }
}

for (int begin = 0; begin < count; begin += CHUNK) {
  const int steps = count - begin < CHUNK ? count - begin : CHUNK;
  group_barrier();
#pragma unroll 4
  for (int i = place; i < steps * EIGHTS * 2; i += WARPS * 32) {
    const int t = i / (EIGHTS * 2), at = i % (EIGHTS * 2);
    const bool reads = at >= EIGHTS;
    const int column = (reads ? at - EIGHTS : at) * 8;
    Eight<T> eight;
    float wide[8];
    load_eight(eight, convolved + (size_t)(first + begin + t) * CHANNELS + writer + (reads ? KEYS * STATE : 0) + column);
    widen(eight, wide);
    store_shared(wide, (reads ? readers : writers) + t * STATE + column);
  }
  for (int i = place; i < steps * COLUMNS; i += WARPS * 32) {
    const int t = i / COLUMNS, column = begin_column + i % COLUMNS;
    const size_t at = (size_t)(first + begin + t) * CHANNELS + head * SIZE + column;
    values[i] = column < SIZE ? float(convolved[at]) : 0.0f;
  }
  if (place < steps) {
    const float given = float(joint[(size_t)(first + begin + place) * ROW + STEP_AT + head]);
    float step = softplus(given + numbers[HEADS + head]);
    step = step < numbers[3 * HEADS] ? numbers[3 * HEADS] : step;
    step = step > numbers[3 * HEADS + 1] ? numbers[3 * HEADS + 1] : step;
    gates[place * 2] = power_of_two(numbers[head] * step);
    gates[place * 2 + 1] = step;
  }
  group_barrier();
  for (int t = 0; t < steps; ++t) {
    const float decay = gates[t * 2], step = gates[t * 2 + 1];
    float given[EACH], sums[EACH];
    read_four(values + t * COLUMNS + own, given);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      given[e] *= step;
      sums[e] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < FOURS; ++j) {
      float w[4], r[4];
      read_four(writers + t * STATE + (j * LANES + part) * 4, w);
      read_four(readers + t * STATE + (j * LANES + part) * 4, r);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          state[e][j * 4 + i] = multiply_add(state[e][j * 4 + i], decay, given[e] * w[i]);
          sums[e] = multiply_add(state[e][j * 4 + i], r[i], sums[e]);
        }
      }
    }
    int column = 0, last = EACH;
    bool sole = true;
    Fold<EACH, LANES / 2>::sum(sums, lane, column, last, sole);
    if (sole && begin_column + own + column < SIZE) {
      const float skipped = numbers[2 * HEADS + head] * values[t * COLUMNS + own + column];
      y[(size_t)(first + begin + t) * HEADS * SIZE + head * SIZE + begin_column + own + column] = T(sums[0] + skipped);
    }
    if (keep >= 0) {
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
#pragma unroll
        for (int j = 0; j < FOURS; ++j) {
          if (begin_column + own + e < SIZE) {
            store_four((DEVICE float4*)(kept + (keep + begin + t) * ALL + line + e * STATE) + j * LANES + part, state[e] + j * 4);
          }
        }
      }
    }
  }
}
#pragma unroll
for (int e = 0; e < EACH; ++e) {
#pragma unroll
  for (int j = 0; j < FOURS; ++j) {
    if (begin_column + own + e < SIZE) {
      store_four((DEVICE float4*)(STATES_AFTER(states, row, slot, ALL) + line + e * STATE) + j * LANES + part, state[e] + j * 4);
    }
  }
}
