// One warp: one head of queries of one token, or the token's latent. The rotated parts of queries and of the key are turned to
// their positions; the latent is normed; latents go into pages as keys, and what is turned of a key as values.
//
// queries [tokens, Q_ROW], of which each head has UNROTATED numbers and VALUE_SIZE that turn behind them, latents [tokens, KV_ROW],
// of which a latent of KEY_SIZE numbers and VALUE_SIZE that turn are read from KV_AT on, embedded [HEADS, tokens, KEY_SIZE] (queries
// in the space of latents), angles [tokens, DIMS] (cosines, then sines), norms [KEY_SIZE + 1] (what latents are multiplied by, and
// what is added to the mean of their squares), slots [tokens, 2] (page, place in it; a page below 0 is none), after [1] -> turned
// [tokens, HEADS, KEY_SIZE + VALUE_SIZE], done [1]
constexpr int EACH = (KEY_SIZE + 31) / 32;
const int lane = int(thread_index_in_simdgroup);
const int token = int(threadgroup_position_in_grid.x), tokens = int(threadgroups_per_grid.x);
const int head = int(threadgroup_position_in_grid.y) * WARPS + int(simdgroup_index_in_threadgroup);
const int page = slots[token * 2], place = slots[token * 2 + 1];
if (token == 0 && head == 0 && lane == 0) {
  done[0] = after[0] + 1;
}
const bool is_query = head < HEADS;
if (head > HEADS || (!is_query && page < 0)) {
  return;
}
const DEVICE T* from = queries + (size_t)token * Q_ROW + head * (UNROTATED + VALUE_SIZE) + UNROTATED;
DEVICE T* to = turned + ((size_t)token * HEADS + head) * (KEY_SIZE + VALUE_SIZE);
if (is_query) {
  const DEVICE T* own = embedded + ((size_t)head * tokens + token) * KEY_SIZE;
  Eight<T> eight;
  for (int i = lane * 8; i < KEY_SIZE; i += 256) {
    load_eight(eight, own + i);
    store_eight(to + i, eight);
  }
  to += KEY_SIZE;
} else {
  const DEVICE T* latent = latents + (size_t)token * KV_ROW + KV_AT;
  const DEVICE T* found;
  FIND_KEYS(found, page, 0)
  DEVICE T* to_latent = (DEVICE T*)found + place * KEY_SIZE;
  float x[EACH], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    x[i] = i * 32 + lane < KEY_SIZE ? float(latent[i * 32 + lane]) : 0.0f;
    squares = multiply_add(x[i], x[i], squares);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += shuffle_xor(squares, step);
  }
  const float length = root(squares / float(KEY_SIZE) + norms[KEY_SIZE]);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (i * 32 + lane < KEY_SIZE) {
      to_latent[i * 32 + lane] = T(x[i] / length * norms[i * 32 + lane]);
    }
  }
  FIND_VALUES(found, page, 0)
  to = (DEVICE T*)found + place * VALUE_SIZE;
  from = latent + KEY_SIZE;
}
for (int pair = lane; pair < VALUE_SIZE / 2; pair += 32) {
  const bool turns = pair < DIMS / 2;
  const int one = turns && !NEIGHBOURS ? pair : pair * 2;
  const int two = turns && !NEIGHBOURS ? pair + DIMS / 2 : pair * 2 + 1;
  const float x = float(from[one]), y = float(from[two]);
  const float cosine = turns ? angles[token * DIMS + pair] : 1.0f;
  const float sine = turns ? angles[token * DIMS + DIMS / 2 + pair] : 0.0f;
  to[one] = T(x * cosine - y * sine);
  to[two] = T(x * sine + y * cosine);
}
