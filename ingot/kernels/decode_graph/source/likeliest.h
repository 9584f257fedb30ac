// One threadgroup: the first of the likeliest tokens of a slice of a row's logits. A token's number is exact as a float.
//
// logits [rows, VOCAB] -> found [rows, SLICES, 2]: the largest logit, and its token
constexpr int EACH = (VOCAB + SLICES - 1) / SLICES;
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup);
const int slice = int(threadgroup_position_in_grid.x), row = int(threadgroup_position_in_grid.y);
const int end = slice * EACH + EACH < VOCAB ? slice * EACH + EACH : VOCAB;
const DEVICE T* scores = logits + (size_t)row * VOCAB;
SHARED_FLOATS(of_warps, WARPS * 2);

float most = nothing(), likeliest = float(slice * EACH);
#pragma unroll 4
for (int i = slice * EACH + warp * 32 + lane; i < end; i += WARPS * 32) {
  const float score = float(scores[i]);
  likeliest = score > most ? float(i) : likeliest;
  most = larger(most, score);
}
#define JOIN(other_most, other_token)                                                                   \
  {                                                                                                     \
    const float theirs = other_most, token = other_token;                                               \
    likeliest = theirs > most || (theirs == most && token < likeliest) ? token : likeliest;             \
    most = larger(most, theirs);                                                                        \
  }
#pragma unroll
for (int step = 16; step > 0; step /= 2) {
  const float theirs_most = shuffle_xor(most, step), theirs_token = shuffle_xor(likeliest, step);
  JOIN(theirs_most, theirs_token)
}
if (lane == 0) {
  of_warps[warp * 2] = most;
  of_warps[warp * 2 + 1] = likeliest;
}
group_barrier();
if (warp == 0 && lane == 0) {
  for (int other = 1; other < WARPS; ++other) {
    JOIN(of_warps[other * 2], of_warps[other * 2 + 1])
  }
  found[(row * SLICES + slice) * 2] = most;
  found[(row * SLICES + slice) * 2 + 1] = likeliest;
}
#undef JOIN
