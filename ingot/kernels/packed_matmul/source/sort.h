// The first EXPERTS threadgroups list, each for an expert, the pairs of a token and an expert that chose it, in their order. The
// others arrange the columns of 64 at a time of `given` as products read them: those that lanes hold weights of are neighbours.
//
// chosen [tokens * chosen of each], given [tokens, columns] -> order [pairs], by expert; offsets [EXPERTS + 1] of experts in it;
// arranged [tokens, columns]
constexpr int WARPS = THREADS / 32;
SHARED_FLOATS(counts, WARPS * 2);
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup), thread = warp * 32 + lane;
const int expert = int(threadgroup_position_in_grid.x);
if (expert >= EXPERTS) {
  const size_t number = (size_t)(expert - EXPERTS) * THREADS + thread;
  if (number < (size_t)given_shape[0] * given_shape[1] / 8) {
    const DEVICE unsigned short* from = (const DEVICE unsigned short*)given + number / 8 * 64;
    const int chunk = int(number % 8), eight = chunk / 4 * 8, at = chunk / 2 % 2 * 2 + chunk % 2;
    uint4 raw;
    raw.x = from[eight + at] | (unsigned int)from[eight + at + 4] << 16;
    raw.y = from[16 + eight + at] | (unsigned int)from[16 + eight + at + 4] << 16;
    raw.z = from[32 + eight + at] | (unsigned int)from[32 + eight + at + 4] << 16;
    raw.w = from[48 + eight + at] | (unsigned int)from[48 + eight + at + 4] << 16;
    ((DEVICE uint4*)arranged)[number] = raw;
  }
} else {
  const int pairs = chosen_shape[0], span = (pairs + THREADS * 4 - 1) / (THREADS * 4) * 4;
  const int begin = least(thread * span, pairs), end = least(begin + span, pairs), whole = begin + (end - begin) / 4 * 4;
  float before = 0.0f, own = 0.0f, lower = 0.0f;  // pairs of this expert in threads before and in all, and of lower experts
#define COUNT(number)                     \
  own += (number) == expert ? 1.0f : 0.0f; \
  lower += (number) < expert ? 1.0f : 0.0f;
#pragma unroll 4
  for (int i = begin; i < whole; i += 4) {
    const uint4 four = *(const DEVICE uint4*)(chosen + i);
    COUNT(int(four.x)) COUNT(int(four.y)) COUNT(int(four.z)) COUNT(int(four.w))
  }
  for (int i = whole; i < end; ++i) {
    COUNT(chosen[i])
  }
#undef COUNT
  for (int step = 1; step < 32; step *= 2) {
    const float beside = shuffle_xor(own, step);
    before += (lane & step) != 0 ? beside : 0.0f;
    own += beside;
    lower += shuffle_xor(lower, step);
  }
  if (lane == 0) {
    counts[warp * 2] = own;
    counts[warp * 2 + 1] = lower;
  }
  group_barrier();
  float first = 0.0f, all = 0.0f;
  for (int i = 0; i < WARPS; ++i) {
    before += i < warp ? counts[i * 2] : 0.0f;
    all += counts[i * 2];
    first += counts[i * 2 + 1];
  }
  if (thread == 0) {
    offsets[expert] = int(first);
    offsets[expert + 1 < EXPERTS ? expert : EXPERTS] = int(expert + 1 < EXPERTS ? first : first + all);
  }
  int to = int(first + before);
#define LIST(number, i)        \
  if ((number) == expert) {    \
    order[to++] = (i);         \
  }
#pragma unroll 4
  for (int i = begin; i < whole; i += 4) {
    const uint4 four = *(const DEVICE uint4*)(chosen + i);
    LIST(int(four.x), i) LIST(int(four.y), i + 1) LIST(int(four.z), i + 2) LIST(int(four.w), i + 3)
  }
  for (int i = whole; i < end; ++i) {
    LIST(chosen[i], i)
  }
#undef LIST
}
