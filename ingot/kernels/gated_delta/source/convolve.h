// One thread: one channel of one row. A causal filter over the row's tokens and the few before them, then SiLU; afterwards
// the tail is the row's last tokens.
//
// x [tokens, X_ROW], of which CHANNELS are read, filter [CHANNELS * TAPS], tails [slots, TAPS - 1, CHANNELS], or addresses that begin
// with theirs, spans [rows, 5] (first token, how many, slot, whether nothing came before, where states are kept)
// -> convolved [tokens, CHANNELS]
constexpr int AHEAD = 8;  // tokens that are fetched at once
const int channel = int(threadgroup_position_in_grid.x) * THREADS + int(simdgroup_index_in_threadgroup) * 32 +
    int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.y);
const int first = spans[row * 5], count = spans[row * 5 + 1], slot = spans[row * 5 + 2];
const bool fresh = spans[row * 5 + 3] != 0;
if (channel >= CHANNELS || count <= 0) {
  return;
}
#ifdef BY_ADDRESS
DEVICE float* tails = ((DEVICE float* const*)addresses)[0];
IN_DEVICE_MEMORY(tails)
#endif
float weight[TAPS], seen[TAPS];
#pragma unroll
for (int tap = 0; tap < TAPS; ++tap) {
  weight[tap] = float(filter[channel * TAPS + tap]);
}
#pragma unroll
for (int tap = 0; tap < TAPS - 1; ++tap) {
  seen[tap + 1] = fresh ? 0.0f : tails[((size_t)slot * (TAPS - 1) + tap) * CHANNELS + channel];
}
for (int begin = 0; begin < count; begin += AHEAD) {
  float next[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    next[i] = begin + i < count ? float(x[(size_t)(first + begin + i) * X_ROW + channel]) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    if (begin + i < count) {
#pragma unroll
      for (int tap = 0; tap < TAPS - 1; ++tap) {
        seen[tap] = seen[tap + 1];
      }
      seen[TAPS - 1] = next[i];
      float sum = 0.0f;
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        sum = multiply_add(weight[tap], seen[tap], sum);
      }
      convolved[(size_t)(first + begin + i) * CHANNELS + channel] = T(sum * sigmoid(sum));
    }
  }
}
DEVICE float* tail = (DEVICE float*)tails + (size_t)slot * (TAPS - 1) * CHANNELS + channel;
#pragma unroll
for (int tap = 0; tap < TAPS - 1; ++tap) {
  tail[(size_t)tap * CHANNELS] = seen[tap + 1];
}
