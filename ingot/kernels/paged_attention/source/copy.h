// One threadgroup: one head of one page's beginning, into another page.
//
// copies [n, 3] (page, page to write, places; a page below 0 is none), after [1] -> done [1]
const int number = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int thread_number = int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int source = copies[number * 3], target = copies[number * 3 + 1], places = copies[number * 3 + 2];
if (number == 0 && head == 0 && thread_number == 0) {
  done[0] = after[0] + 1;
}
if (source < 0) {
  return;
}
const DEVICE T* from;
const DEVICE T* to;
Eight<T> eight;
FIND_KEYS(from, source, head)
FIND_KEYS(to, target, head)
for (int i = thread_number * 8; i < places * KEY_SIZE; i += THREADS * 8) {
  load_eight(eight, from + i);
  store_eight((DEVICE T*)to + i, eight);
}
FIND_VALUES(from, source, head)
FIND_VALUES(to, target, head)
for (int i = thread_number * 8; i < places * VALUE_SIZE; i += THREADS * 8) {
  load_eight(eight, from + i);
  store_eight((DEVICE T*)to + i, eight);
}
