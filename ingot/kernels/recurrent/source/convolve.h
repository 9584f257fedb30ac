// One thread: one channel of one row, some tokens of it. A causal filter over these and the few before them, and SiLU where the
// layer has it; afterwards the tail is what the row's last tokens entered with.
//
// x [tokens, X_ROW], of which channel i enters from column columns[i]; GATED: times column i, and the output times column
// CHANNELS + i. filter [CHANNELS * TAPS, and CHANNELS if BIASED], tails [slots, TAPS - 1, CHANNELS], or addresses that begin with
// theirs, spans [rows, 6] (first token, how many, slot, whether nothing came before, where states are kept, the slot that is written to)
// -> convolved [tokens, CHANNELS]
#define ENTERED(token)                                                                                             \
  (GATED ? float(T(float(x[(size_t)(token) * X_ROW + column]) * float(x[(size_t)(token) * X_ROW + channel]))) \
         : float(x[(size_t)(token) * X_ROW + column]))
constexpr int AHEAD = 8;  // tokens that are fetched at once
constexpr int STRETCH = 64;
const int channel = int(threadgroup_position_in_grid.x) * THREADS + int(simdgroup_index_in_threadgroup) * 32 +
    int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.y);
const int from = int(threadgroup_position_in_grid.z) * STRETCH;
const bool within = channel < CHANNELS;
const int column = within ? columns[channel] : 0;
const float shift = BIASED && within ? filter[CHANNELS * TAPS + channel] : 0.0f;
float weight[TAPS], seen[TAPS];
#pragma unroll
for (int tap = 0; tap < TAPS; ++tap) {
  weight[tap] = within ? filter[channel * TAPS + tap] : 0.0f;
}
AFTER_OTHERS();
const int first = spans[row * 6], count = spans[row * 6 + 1], slot = spans[row * 6 + 2], target = spans[row * 6 + 5];
const bool fresh = spans[row * 6 + 3] != 0;
if (!within || count <= from) {
  return;
}
FIND_STATES(tails, 0)
#pragma unroll
for (int tap = 0; tap < TAPS - 1; ++tap) {
  const int at = from + tap - (TAPS - 1);
  seen[tap + 1] = 0.0f;
  if (at >= 0) {
    seen[tap + 1] = ENTERED(first + at);
  } else if (!fresh) {
    seen[tap + 1] = tails[((size_t)slot * (TAPS - 1) + tap) * CHANNELS + channel];
  }
}
const int end = count < from + STRETCH ? count : from + STRETCH;
for (int begin = from; begin < end; begin += AHEAD) {
  float next[AHEAD], gate[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    next[i] = begin + i < end ? ENTERED(first + begin + i) : 0.0f;
    gate[i] = GATED && begin + i < end ? float(x[(size_t)(first + begin + i) * X_ROW + CHANNELS + channel]) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    if (begin + i < end) {
#pragma unroll
      for (int tap = 0; tap < TAPS - 1; ++tap) {
        seen[tap] = seen[tap + 1];
      }
      seen[TAPS - 1] = next[i];
      float sum = shift;
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        sum = multiply_add(weight[tap], seen[tap], sum);
      }
      sum = SILU ? sum * sigmoid(sum) : sum;
      convolved[(size_t)(first + begin + i) * CHANNELS + channel] = GATED ? T(gate[i] * float(T(sum))) : T(sum);
    }
  }
}
// Nobody else reads the tail, or has read it when it is written.
if (from == 0) {
  DEVICE float* tail = STATES_AFTER(tails, row, target, (TAPS - 1) * CHANNELS) + channel;
#pragma unroll
  for (int tap = 0; tap < TAPS - 1; ++tap) {
    tail[(size_t)tap * CHANNELS] = count > STRETCH ? ENTERED(first + count - (TAPS - 1) + tap) : seen[tap + 1];
  }
}
#undef ENTERED
