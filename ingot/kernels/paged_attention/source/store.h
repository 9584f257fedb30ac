// One threadgroup: one head of a page in fewer bits, into its place.
//
// pages [n, heads, WORDS], numbers [n] of pages, after [1] -> done [1]
const int number = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int thread_number = int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int page = numbers[number];
if (number == 0 && head == 0 && thread_number == 0) {
  done[0] = after[0] + 1;
}
if (page < 0) {
  return;
}
const size_t own = (size_t)number * KV_HEADS + head, place = (size_t)(page & 0xfffff) * KV_HEADS + head;
DEVICE int* to = ((DEVICE int* const DEVICE*)coded)[page >> 20] + place * WORDS;
for (int i = thread_number; i < WORDS; i += THREADS) {
  to[i] = pages[own * WORDS + i];
}
