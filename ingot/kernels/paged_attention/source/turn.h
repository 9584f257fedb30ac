// One warp: one head of one token. Queries and keys are normed and turned to their positions; keys and values go into their
// page.
//
// projected [tokens, heads * Q_STEP + KV_HEADS * (KEY_SIZE + VALUE_SIZE)] (queries, each with Q_STEP - KEY_SIZE numbers of
// something else behind it; keys; values), angles [tokens, DIMS] (cosines, then sines), norms [2 * KEY_SIZE + 3] (what queries and
// keys are multiplied by, and what is added to the means of their squares and of those of values), slots [tokens, 2] (page, place
// in it; a page below 0 is none), after [1] -> turned [tokens, heads, KEY_SIZE], done [1]
// With KEYS_AS_VALUES there are no values, but keys are values, too, before they are normed and turned. QUERIES_ONLY: there are
// neither, as others have written them.
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int KV_ROW = QUERIES_ONLY ? 0 : KV_HEADS * (KEY_SIZE + (KEYS_AS_VALUES ? 0 : VALUE_SIZE));
constexpr int ROW = HEADS * Q_STEP + KV_ROW;
constexpr int PAIRS = (KEY_SIZE / 2 + 31) / 32;  // of numbers that turn together, a lane
const int lane = int(thread_index_in_simdgroup);
const int token = int(threadgroup_position_in_grid.x);
const int number = int(threadgroup_position_in_grid.y) * WARPS + int(simdgroup_index_in_threadgroup);
const int page = slots[token * 2], place = slots[token * 2 + 1];
if (token == 0 && number == 0 && lane == 0) {
  done[0] = after[0] + 1;
}
const bool is_query = number < HEADS;
const int head = is_query ? number : (number - HEADS) % KV_HEADS;
if (number >= HEADS + (QUERIES_ONLY ? 0 : 2 * KV_HEADS) || (!is_query && page < 0)) {
  return;
}
const DEVICE T* found;
const DEVICE T* row = projected + (size_t)token * ROW;
if (number >= HEADS + KV_HEADS) {
  FIND_VALUES(found, page, head)
  DEVICE T* to = (DEVICE T*)found + place * VALUE_SIZE;
  const DEVICE T* from = row + HEADS * Q_STEP + (KEYS_AS_VALUES ? head * KEY_SIZE : KV_HEADS * KEY_SIZE + head * VALUE_SIZE);
  float values[(VALUE_SIZE + 31) / 32], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < (VALUE_SIZE + 31) / 32; ++i) {
    values[i] = i * 32 + lane < VALUE_SIZE ? float(from[i * 32 + lane]) : 0.0f;
    squares = multiply_add(values[i], values[i], squares);
  }
#pragma unroll
  for (int step = 16; VALUES_NORMED && step > 0; step /= 2) {
    squares += shuffle_xor(squares, step);
  }
  const float length = VALUES_NORMED ? root(squares / float(VALUE_SIZE) + norms[2 * KEY_SIZE + 2]) : 1.0f;
#pragma unroll
  for (int i = 0; i < (VALUE_SIZE + 31) / 32; ++i) {
    if (i * 32 + lane < VALUE_SIZE) {
      to[i * 32 + lane] = T(VALUES_NORMED ? values[i] / length : values[i]);
    }
  }
  return;
}
const DEVICE T* from = row + (is_query ? head * Q_STEP : HEADS * Q_STEP + head * KEY_SIZE);
float low[PAIRS], high[PAIRS];
float squares = 0.0f;
#pragma unroll
for (int i = 0; i < PAIRS; ++i) {
  const int pair = i * 32 + lane;
  const bool turns = pair < DIMS / 2;
  low[i] = pair < KEY_SIZE / 2 ? float(from[turns && !NEIGHBOURS ? pair : pair * 2]) : 0.0f;
  high[i] = pair < KEY_SIZE / 2 ? float(from[turns && !NEIGHBOURS ? pair + DIMS / 2 : pair * 2 + 1]) : 0.0f;
  squares = multiply_add(low[i], low[i], multiply_add(high[i], high[i], squares));
}
#pragma unroll
for (int step = 16; NORMED && step > 0; step /= 2) {
  squares += shuffle_xor(squares, step);
}
DEVICE T* to = turned + ((size_t)token * HEADS + head) * KEY_SIZE;
if (!is_query) {
  FIND_KEYS(found, page, head)
  to = (DEVICE T*)found + place * KEY_SIZE;
}
const int weighed = is_query ? 0 : KEY_SIZE;
const float length = NORMED ? root(squares / float(KEY_SIZE) + norms[2 * KEY_SIZE + (is_query ? 0 : 1)]) : 1.0f;
#pragma unroll
for (int i = 0; i < PAIRS; ++i) {
  const int pair = i * 32 + lane;
  const bool turns = pair < DIMS / 2;
  const int one = turns && !NEIGHBOURS ? pair : pair * 2;
  const int two = turns && !NEIGHBOURS ? pair + DIMS / 2 : pair * 2 + 1;
  if (pair < KEY_SIZE / 2) {
    const float x = NORMED ? low[i] / length * norms[weighed + one] : low[i];
    const float y = NORMED ? high[i] / length * norms[weighed + two] : high[i];
    const float cosine = turns ? angles[token * DIMS + pair] : 1.0f;
    const float sine = turns ? angles[token * DIMS + DIMS / 2 + pair] : 0.0f;
    to[one] = T(x * cosine - y * sine);
    to[two] = T(x * sine + y * cosine);
  }
}
