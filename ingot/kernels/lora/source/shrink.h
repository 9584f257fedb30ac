// One group a number: a token's states by a row of the first matrix of its adapter.
//
// states [tokens, SIZE], matrices [adapters, RANKS, SIZE], places [tokens] -> inner [tokens, RANKS]
// At place 0 is no adapter.
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup);
const int rank = int(threadgroup_position_in_grid.x), token = int(threadgroup_position_in_grid.y);
SHARED_FLOATS(parts, WARPS);
const int place = places[token];
float sum = 0.0f;
if (place > 0) {
  const DEVICE T* x = states + (size_t)token * SIZE;
  const DEVICE T* row = matrices + ((size_t)place * RANKS + rank) * SIZE;
  for (int i = (warp * 32 + lane) * 8; i < SIZE; i += WARPS * 32 * 8) {
    Eight<T> left, right;
    load_eight(left, x + i);
    load_eight(right, row + i);
    float one[8], two[8];
    widen(left, one);
    widen(right, two);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      sum = multiply_add(one[n], two[n], sum);
    }
  }
}
#pragma unroll
for (int step = 16; step > 0; step /= 2) {
  sum += shuffle_xor(sum, step);
}
if (lane == 0) {
  parts[warp] = sum;
}
group_barrier();
if (warp == 0 && lane == 0) {
  float whole = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    whole += parts[i];
  }
  inner[(size_t)token * RANKS + rank] = T(whole);
}
