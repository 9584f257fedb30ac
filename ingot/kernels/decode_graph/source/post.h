// All threads: what a step is given goes where its graph reads it.
//
// states_*, angles_*, words_*: data of any length; after: whatever must be there before; memory: of the graph, written in place;
// spots: where each begins in there, in units of 16 bytes -> posted [1]
// COPY_ALL stands for a COPY of each.
const int thread = int(threadgroup_position_in_grid.x) * THREADS +
                   int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int all = int(threadgroups_per_grid.x) * THREADS;
#define COPY(TYPE, NAME, COUNT, NUMBER)                                        \
  {                                                                       \
    DEVICE TYPE* to = (DEVICE TYPE*)((DEVICE int*)memory + (size_t)4 * spots[NUMBER]); \
    for (int i = thread; i < COUNT; i += all) {                 \
      to[i] = NAME[i];                                                    \
    }                                                                     \
  }
COPY_ALL
if (thread == 0) {
  posted[0] = after[0];
}
