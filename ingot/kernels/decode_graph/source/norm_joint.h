// One group a part of a token: all queries are normed as one, and all keys; values stay as they are.
//
// projected [tokens, QUERIES + KEYS + VALUES], weights [QUERIES + KEYS], eps [8] (of queries, of keys) -> normed like projected
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup);
const int thread = warp * 32 + lane, part = int(threadgroup_position_in_grid.x);
const int begin = part == 0 ? 0 : part == 1 ? QUERIES : QUERIES + KEYS;
const int size = part == 0 ? QUERIES : part == 1 ? KEYS : VALUES;
const size_t from = (size_t)threadgroup_position_in_grid.y * (QUERIES + KEYS + VALUES) + begin;
SHARED_FLOATS(parts, WARPS);
float squares = 0.0f;
for (int i = thread; i < size; i += WARPS * 32) {
  const float x = float(projected[from + i]);
  squares = multiply_add(x, x, squares);
}
#pragma unroll
for (int step = 16; step > 0; step /= 2) {
  squares += shuffle_xor(squares, step);
}
if (lane == 0) {
  parts[warp] = squares;
}
group_barrier();
float whole = 0.0f;
#pragma unroll
for (int i = 0; i < WARPS; ++i) {
  whole += parts[i];
}
const float factor = 1.0f / root(whole / float(size) + eps[part < 2 ? part : 0]);
for (int i = thread; i < size; i += WARPS * 32) {
  const T x = projected[from + i];
  normed[from + i] = part == 2 ? x : T(float(T(float(x) * factor)) * float(weights[begin + i]));
}
