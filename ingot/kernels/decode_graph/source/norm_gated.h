// One warp: what one head of a token read of a state is normed, and gated by SiLU.
//
// read [tokens, HEADS, SIZE], gates [tokens, GATE_ROW], of which HEADS * SIZE are read from GATE_AT on, weight [SIZE], eps [8]
// -> gated [tokens, HEADS, SIZE]
constexpr int EACH = (SIZE + 31) / 32;
const int lane = int(thread_index_in_simdgroup), token = int(threadgroup_position_in_grid.y);
const int head = int(threadgroup_position_in_grid.x) * WARPS + int(simdgroup_index_in_threadgroup);
if (head >= HEADS) {
  return;
}
const DEVICE T* from = read + ((size_t)token * HEADS + head) * SIZE;
const DEVICE T* gate = gates + (size_t)token * GATE_ROW + GATE_AT + head * SIZE;
float x[EACH], squares = 0.0f;
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * 32 + lane;
  x[n] = i < SIZE ? float(from[i]) : 0.0f;
  squares = multiply_add(x[n], x[n], squares);
}
#pragma unroll
for (int step = 16; step > 0; step /= 2) {
  squares += shuffle_xor(squares, step);
}
const float factor = 1.0f / root(squares / float(SIZE) + eps[0]);
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * 32 + lane;
  if (i < SIZE) {
    const float opened = float(gate[i]);
    const float normed = float(T(float(T(x[n] * factor)) * float(weight[i])));
    gated[((size_t)token * HEADS + head) * SIZE + i] = T(opened / (1.0f + power_of_two(-1.44269504f * opened)) * normed);
  }
}
