// All threads: what a step is given goes where its graph reads it.
//
// states, angles, slots, table, rows, and adapters of ADAPTED tokens: data; after: whatever must be there before; memory: of the graph, written in place;
// spots [8]: where each begins in there, in units of 16 bytes -> posted [1]
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
COPY(T, states, states_shape[0], 0)
COPY(float, angles, angles_shape[0], 1)
COPY(int, slots, slots_shape[0], 2)
COPY(int, table, table_shape[0], 3)
COPY(int, rows, rows_shape[0], 4)
#ifdef ADAPTED
COPY(int, adapters, adapters_shape[0], 5)
#endif
if (thread == 0) {
  posted[0] = after[0];
}
