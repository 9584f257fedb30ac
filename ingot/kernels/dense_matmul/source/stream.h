// One threadgroup: products of up to EIGHTS * 8 rows with WARPS * TILES * 16 rows of weights, by matrix units, for rows that
// are so many that reading them costs, too.
//
// Numbers are summed as where rows are few (multiply.h): columns are cut into SPANS spans, each summed from its first column to
// its last, then neighbouring spans are added, then neighbouring sums. All warps take the same columns, and other outputs each.
// Where outputs are few, SPLIT threadgroups share the spans.
//
// Weights and activations come to shared memory in stages of 64 columns, all but one of STAGES on their way at a time.
// A lane copies the weights that it will multiply by itself; activations are copied once for all warps, which is why they meet
// once a stage. What each lane holds of a tile is what it holds where rows are few.
//
// given [rows, columns], weight [outputs, columns] -> y [rows, outputs]
// BIASED: bias [outputs] is added before rounding. ADDED: residual [rows, outputs] is added to what was rounded.
// GATED: weight [2 * outputs, columns], of a gate and what it lets pass; eight rows of a tile are from each.
// PARTED: -> y [SPLIT, rows, outputs], sums that are still to be joined.
constexpr int HALVES = 2;
#ifdef GATED
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
constexpr int LINES = TILES * 2;         // rows of weights that a lane holds numbers of
constexpr int OWN = TILES * 16 / PARTS;  // outputs of a warp
constexpr int EACH = SPANS / SPLIT;      // spans of a threadgroup
static_assert(EACH * SPLIT == SPANS, "threadgroups have as many spans each");
constexpr int SUMS = TILES * EIGHTS * 4;
constexpr int CHUNKS = 32 * 4;  // floats that hold a chunk of each lane
constexpr int WEIGHTS = LINES * HALVES * CHUNKS, SHARED_BY_ALL = EIGHTS * HALVES * CHUNKS;
constexpr int STAGE = WARPS * WEIGHTS + SHARED_BY_ALL;
LENT_FLOATS(ring, STAGES * STAGE);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int rows = given_shape[0], outputs = weight_shape[0] / PARTS, chunks = weight_shape[1] / 8;
const int span = ((chunks + 7) / 8 + SPANS - 1) / SPANS;
const int part = int(threadgroup_position_in_grid.x) % SPLIT, turns = EACH * span;
const int first_output = (int(threadgroup_position_in_grid.x) / SPLIT * WARPS + warp) * OWN;
const int first_chunk = part * turns * HALVES * 4 + across;

// Rows of weights beyond the last are read as the last, and their products thrown away.
const DEVICE uint4* lines[LINES];
#pragma unroll
for (int i = 0; i < LINES; ++i) {
  const int output = first_output + (PARTS == 2 ? i / 2 * 8 : i * 8) + up;
  const int row = (output < outputs ? output : outputs - 1) + (PARTS == 2 ? i % 2 * outputs : 0);
  lines[i] = (const DEVICE uint4*)weight + (size_t)row * chunks;
}
const DEVICE uint4* const own = (const DEVICE uint4*)given + (size_t)up * chunks;
SHARED float* const weights = ring + warp * WEIGHTS + lane * 4;
SHARED float* const shared_by_all = ring + WARPS * WEIGHTS + lane * 4;

#define FETCH(slot, turn)                                                                                                \
  _Pragma("unroll") for (int i = 0; i < LINES * HALVES; ++i) {                                                           \
    const int chunk = first_chunk + ((turn) * HALVES + i % HALVES) * 4;                                                  \
    const bool there = chunk < chunks;                                                                                   \
    pass_chunk(weights + (slot) * STAGE + i * CHUNKS, lines[i / HALVES] + (there ? chunk : 0), there);                   \
  }
#define MEET(slot, turn, put)                                                                                            \
  _Pragma("unroll") for (int i = 0; i < EIGHTS * HALVES; i += WARPS) {                                                   \
    const int mine = i + warp, row = mine / HALVES * 8, chunk = first_chunk + ((turn) * HALVES + mine % HALVES) * 4;     \
    const bool there = row + up < rows && chunk < chunks;                                                                \
    if (EIGHTS * HALVES % WARPS == 0 || mine < EIGHTS * HALVES) {                                                        \
      put(shared_by_all + (slot) * STAGE + mine * CHUNKS, there ? own + ((size_t)row * chunks + chunk) : own, there);    \
    }                                                                                                                    \
  }

float sums[SUMS];
Spans<EACH, SUMS> spans;
spans.begin(sums);

// Weights are on their way before activations are there. These come behind all of them, at first, so that they are not
// copied: who waits for a copy waits for all before it.
#pragma unroll
for (int stage = 0; stage < STAGES - 1; ++stage) {
  if (stage < turns) {
    FETCH(stage, stage)
  }
  end_copies();
}
AFTER_OTHERS()
#pragma unroll
for (int stage = 0; stage < STAGES - 1; ++stage) {
  if (stage < turns) {
    MEET(stage, stage, put_chunk)
  }
}
int left = span, slot = 0, free_slot = STAGES - 1;
for (int turn = 0; turn < turns; ++turn) {
  wait_for_copies<STAGES - 2>();
  group_barrier();
  if (turn + STAGES - 1 < turns) {
    FETCH(free_slot, turn + STAGES - 1)
    MEET(free_slot, turn + STAGES - 1, copy_chunk)
  }
  end_copies();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    uint4 held[LINES], met[EIGHTS];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      held[i] = *(const SHARED uint4*)(weights + slot * STAGE + (i * HALVES + half) * CHUNKS);
    }
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      met[e] = *(const SHARED uint4*)(shared_by_all + slot * STAGE + (e * HALVES + half) * CHUNKS);
    }
#pragma unroll
    for (int i = 0; i < TILES * EIGHTS; ++i) {
      const uint4 high = held[i / EIGHTS * 2], low = held[i / EIGHTS * 2 + 1], x = met[i % EIGHTS];
      multiply_tiles<T>(sums + i * 4, high.x, low.x, high.y, low.y, x.x, x.y);
    }
#pragma unroll
    for (int i = 0; i < TILES * EIGHTS; ++i) {
      const uint4 high = held[i / EIGHTS * 2], low = held[i / EIGHTS * 2 + 1], x = met[i % EIGHTS];
      multiply_tiles<T>(sums + i * 4, high.z, low.z, high.w, low.w, x.z, x.w);
    }
  }
  slot = slot + 1 == STAGES ? 0 : slot + 1;
  free_slot = free_slot + 1 == STAGES ? 0 : free_slot + 1;
  if (EACH > 1 && --left == 0) {
    spans.end(sums);
    left = span;
  }
}
#undef FETCH
#undef MEET

#pragma unroll
for (int i = 0; i < SUMS; ++i) {
  const int row = i / 4 % EIGHTS * 8 + across * 2 + i % 2;
  const int output = first_output + i / (EIGHTS * 4) * (16 / PARTS) + (PARTS == 1 ? i / 2 % 2 * 8 : 0) + up;
  if (row < rows && output < outputs && (PARTS == 1 || i / 2 % 2 == 0)) {
    const size_t at = (size_t)row * outputs + output;
    float sum = sums[i];
#ifdef BIASED
    sum += float(bias[output]);
#endif
#ifdef ADDED
    sum = float(T(sum)) + float(residual[at]);
#endif
#ifdef GATED
    y[at] = gated(T(sum), T(sums[i + 2 < SUMS ? i + 2 : i]));
#elif defined(PARTED)
    y[(size_t)part * rows * outputs + at] = sum;
#else
    y[at] = T(sum);
#endif
  }
}
