// One threadgroup: some columns of one head's state of one row. A few lanes hold four columns' numbers in registers while all
// tokens of the row pass, one after another, so that a token's bits do not depend on how a prompt is cut, nor on others.
//
// convolved [tokens, HEADS * SIZE + 2 * KEYS * STATE]: what enters, then what it is written by, and read by, of each group of heads;
// joint [tokens, ROW], whose steps begin at STEP_AT, numbers [3 * HEADS + 2] (log2 of decay, bias, skip; limits of steps), spans
// [rows, 6], states [slots, HEADS, SIZE, STATE], or addresses of which theirs is the second -> y [tokens, HEADS * SIZE], kept
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
const int first = spans[row * 6], count = spans[row * 6 + 1], slot = spans[row * 6 + 2], keep = spans[row * 6 + 4];
const bool fresh = spans[row * 6 + 3] != 0;
const int target = spans[row * 6 + 5];
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

// Nothing that precedes this writes states or spans.
AFTER_OTHERS();
// What a chunk is made of is fetched while the one before is computed.
constexpr int THREADS = WARPS * 32;
constexpr int FETCHES = (CHUNK * EIGHTS * 2 + THREADS - 1) / THREADS;
constexpr int ENTERING = (CHUNK * COLUMNS + THREADS - 1) / THREADS;
Eight<T> fetched[FETCHES];
float entering[ENTERING], pace = 0.0f;
for (int begin = -CHUNK; begin < count; begin += CHUNK) {
  if (begin >= 0) {
    group_barrier();
#pragma unroll
    for (int n = 0; n < FETCHES; ++n) {
      const int i = n * THREADS + place, column = i % (EIGHTS * 2) * 8;
      if (i < CHUNK * EIGHTS * 2) {
        float wide[8];
        widen(fetched[n], wide);
        SHARED float* to = column < STATE ? writers + column : readers + column - STATE;
        store_shared(wide, to + i / (EIGHTS * 2) * STATE);
      }
    }
#pragma unroll
    for (int n = 0; n < ENTERING; ++n) {
      if (n * THREADS + place < CHUNK * COLUMNS) {
        values[n * THREADS + place] = entering[n];
      }
    }
    if (place < CHUNK) {
      float step = softplus(pace + numbers[HEADS + head]);
      step = step < numbers[3 * HEADS] ? numbers[3 * HEADS] : step;
      step = step > numbers[3 * HEADS + 1] ? numbers[3 * HEADS + 1] : step;
      gates[place * 2] = power_of_two(numbers[head] * step);
      gates[place * 2 + 1] = step;
    }
    group_barrier();
  }
  const int next = begin + CHUNK;
#pragma unroll
  for (int n = 0; n < FETCHES; ++n) {
    const int i = n * THREADS + place, t = next + i / (EIGHTS * 2), column = i % (EIGHTS * 2) * 8;
    clear_eight(fetched[n]);
    if (i < CHUNK * EIGHTS * 2 && t < count) {
      const int at = column < STATE ? writer + column : writer + (KEYS - 1) * STATE + column;
      load_eight(fetched[n], convolved + (size_t)(first + t) * CHANNELS + at);
    }
  }
#pragma unroll
  for (int n = 0; n < ENTERING; ++n) {
    const int i = n * THREADS + place, t = next + i / COLUMNS, column = begin_column + i % COLUMNS;
    entering[n] = 0.0f;
    if (i < CHUNK * COLUMNS && t < count && column < SIZE) {
      entering[n] = float(convolved[(size_t)(first + t) * CHANNELS + head * SIZE + column]);
    }
  }
  if (place < CHUNK && next + place < count) {
    pace = float(joint[(size_t)(first + next + place) * ROW + STEP_AT + head]);
  }
  const int steps = begin < 0 ? 0 : count - begin < CHUNK ? count - begin : CHUNK;
#pragma unroll 2
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
      store_four((DEVICE float4*)(STATES_AFTER(states, row, target, ALL) + line + e * STATE) + j * LANES + part, state[e] + j * 4);
    }
  }
}
