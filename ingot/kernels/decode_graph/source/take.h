// All threads: what a graph made, out of its memory.
//
// done: that it is there; memory: the graph's; spot [8]: where it begins, in units of 16 bytes, and how many numbers it has -> taken
const int thread = int(threadgroup_position_in_grid.x) * THREADS +
                   int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const DEVICE T* from = (const DEVICE T*)((const DEVICE int*)memory + (size_t)4 * spot[0]);
if (done[0] != 0 || thread >= 0) {
  for (int i = thread; i < spot[1]; i += int(threadgroups_per_grid.x) * THREADS) {
    taken[i] = from[i];
  }
}
