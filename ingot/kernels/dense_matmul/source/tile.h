// One threadgroup: products of ROW_WARPS * EIGHTS * 8 rows with OUT_WARPS * TILES * 16 rows of weights, by matrix units, for prompts:
// each warp multiplies a part of both, so that what comes to shared memory is read by several.
//
// Numbers are summed as where rows are few (multiply.h): columns are cut into SPANS spans, each summed from its first column to
// its last, then neighbouring spans are added, then neighbouring sums. So a row's bits are those that it has alone.
//
// Weights and activations come to shared memory in stages of HALVES * 32 columns, all but one of STAGES on their way. There a
// lane's chunk of each eight rows lies where that lane reads it. A lane holds the columns that it holds where rows are few, but
// activations are the sixteen rows that units take, and weights the eight: what is multiplied is the same.
//
// given [rows, columns], and arranged (arrange.h), weight [outputs, columns] -> y [rows, outputs]; BIASED, ADDED and GATED as in stream.h
#ifdef GATED
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
constexpr int WARPS = OUT_WARPS * ROW_WARPS;
constexpr int LINES = TILES * 2;         // rows of weights that a lane holds numbers of
static_assert(EIGHTS % 2 == 0, "units take sixteen rows");
constexpr int OWN = TILES * 16 / PARTS;  // outputs of a warp
constexpr int SUMS = TILES * EIGHTS * 4;
constexpr int CHUNKS = 32 * 4;  // floats that hold a chunk of each lane
constexpr int ALL_LINES = OUT_WARPS * TILES * 16, ALL_ROWS = ROW_WARPS * EIGHTS * 8;
constexpr int WEIGHTS = ALL_LINES / 8 * HALVES * CHUNKS, GIVEN = ALL_ROWS / 8 * HALVES * CHUNKS, STAGE = WEIGHTS + GIVEN;
constexpr int ROW_CHUNKS = HALVES * 4, AT_ONCE = WARPS * 32 / ROW_CHUNKS;  // rows that all threads copy at once
constexpr int LINE_COPIES = (ALL_LINES + AT_ONCE - 1) / AT_ONCE;
constexpr int BLOCK_QUADS = HALVES * 64, QUADS = ALL_ROWS / 16 * BLOCK_QUADS, QUAD_COPIES = (QUADS + WARPS * 32 - 1) / (WARPS * 32);
LENT_FLOATS(ring, STAGES * STAGE);
AFTER_OTHERS()

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int rows = given_shape[0], outputs = weight_shape[0] / PARTS, chunks = weight_shape[1] / 8;
const int span = ((chunks + 7) / 8 + SPANS - 1) / SPANS * (2 / HALVES), turns = SPANS * span;
const int lots = (rows + ALL_ROWS - 1) / ALL_ROWS;  // neighbours read the same weights
const int first_row = int(threadgroup_position_in_grid.x) % lots * ALL_ROWS;
const int first_output = int(threadgroup_position_in_grid.x) / lots * (ALL_LINES / PARTS);
const int out_warp = warp % OUT_WARPS, row_warp = warp / OUT_WARPS;

// Neighbours copy the chunks of a row. Rows beyond the last are read as the last, and their products thrown away.
const int copied_chunk = lane % ROW_CHUNKS, copied_row = (warp * 32 + lane) / ROW_CHUNKS;
const DEVICE uint4* lines[LINE_COPIES];
#pragma unroll
for (int i = 0; i < LINE_COPIES; ++i) {
  const int line = i * AT_ONCE + copied_row, tile = line / 16;
  const int output = first_output + (PARTS == 2 ? tile * 8 + line % 8 : line);
  const int row = (output < outputs ? output : outputs - 1) + (PARTS == 2 ? line % 16 / 8 * outputs : 0);
  lines[i] = (const DEVICE uint4*)weight + (size_t)row * chunks + copied_chunk;
}
const int halves = (chunks + 3) / 4, thread = warp * 32 + lane;
const DEVICE uint4* const blocks = (const DEVICE uint4*)arranged + (size_t)(first_row / 16) * halves * 64;
const int copied_to = (copied_chunk / 4 * 32 + copied_row % 8 * 4 + copied_chunk % 4) * 4;

#define COPY(slot, turn)                                                                                                 \
  {                                                                                                                      \
    const bool there = (turn) * ROW_CHUNKS + copied_chunk < chunks;                                                               \
    SHARED float* const to = ring + (slot) * STAGE + copied_to;                                                          \
    _Pragma("unroll") for (int i = 0; i < LINE_COPIES; ++i) {                                                            \
      const int line = i * AT_ONCE + copied_row;                                                                         \
      if (ALL_LINES % AT_ONCE == 0 || line < ALL_LINES) {                                                                \
        copy_chunk(to + line / 8 * (HALVES * CHUNKS), there ? lines[i] + (turn) * ROW_CHUNKS : lines[i] - copied_chunk, there);   \
      }                                                                                                                  \
    }                                                                                                                    \
    _Pragma("unroll") for (int i = 0; i < QUAD_COPIES; ++i) {                                                            \
      const int quad = i * (WARPS * 32) + thread, own = quad % BLOCK_QUADS;                                              \
      const bool is_there = (turn) * HALVES + own / 64 < halves;                                                         \
      if (QUADS % (WARPS * 32) == 0 || quad < QUADS) {                                                                   \
        const size_t place = ((size_t)(quad / BLOCK_QUADS) * halves + (turn) * HALVES) * 64 + own;                       \
        copy_chunk(ring + (slot) * STAGE + WEIGHTS + quad * 4, blocks + (is_there ? place : 0), is_there);               \
      }                                                                                                                  \
    }                                                                                                                    \
  }

// Sums of spans that wait for their neighbours. They are rarely met: registers are for what is multiplied.
static_assert(SPANS == 8, "three levels of neighbours");
constexpr int HELD = SUMS <= 64 ? SUMS : 1;
float sums[SUMS], first[HELD];
volatile float kept[SUMS <= 64 ? 2 : 3][SUMS];
#pragma unroll
for (int i = 0; i < SUMS; ++i) {
  sums[i] = 0.0f;
}
#pragma unroll
for (int stage = 0; stage < STAGES - 1; ++stage) {
  if (stage < turns) {
    COPY(stage, stage)
  }
  end_copies();
}
const SHARED float* const weights = ring + out_warp * LINES * (HALVES * CHUNKS) + lane * 4;
const SHARED float* const activations = ring + WEIGHTS + row_warp * (EIGHTS / 2) * (BLOCK_QUADS * 4) + lane * 4;
int left = span, slot = 0, free_slot = STAGES - 1, ended = 0;
for (int turn = 0; turn < turns; ++turn) {
  wait_for_copies<STAGES - 2>();
  group_barrier();
  if (turn + STAGES - 1 < turns) {
    COPY(free_slot, turn + STAGES - 1)
  }
  end_copies();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    uint4 held[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      held[i] = *(const SHARED uint4*)(weights + slot * STAGE + (i * HALVES + half) * CHUNKS);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint4 met[EIGHTS / 2];
#pragma unroll
      for (int i = 0; i < EIGHTS / 2; ++i) {
        met[i] = *(const SHARED uint4*)(activations + slot * STAGE + i * (BLOCK_QUADS * 4) + (half * 2 + step) * CHUNKS);
      }
#pragma unroll
      for (int i = 0; i < SUMS / 4; ++i) {
        const uint4 x = met[i / LINES], own = held[i % LINES];
        multiply_tiles<T>(sums + i * 4, x.x, x.y, x.z, x.w, step == 0 ? own.x : own.z, step == 0 ? own.y : own.w);
      }
    }
  }
  slot = slot + 1 == STAGES ? 0 : slot + 1;
  free_slot = free_slot + 1 == STAGES ? 0 : free_slot + 1;
  if (--left == 0) {
    left = span;
    if (SUMS <= 64) {
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        if (ended % 2 == 1) sums[i] = first[i] + sums[i];
        if (ended % 2 == 0) first[i] = sums[i];
      }
    }
    bool is_added = SUMS > 64 || ended % 2 == 1;
#pragma unroll
    for (int level = SUMS > 64 ? 0 : 1; level < 3; ++level) {
      volatile float* const waiting = kept[SUMS > 64 ? level : level - 1];
      const bool is_second = (ended >> level & 1) != 0;
      if (is_added && is_second) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          sums[i] = waiting[i] + sums[i];
        }
      } else if (is_added) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          waiting[i] = sums[i];
        }
      }
      is_added = is_added && is_second;
    }
    if (++ended < SPANS) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        sums[i] = 0.0f;
      }
    }
  }
}
#undef COPY

#pragma unroll
for (int i = 0; i < SUMS; ++i) {
  const int line = i / 4 % LINES, row = first_row + (row_warp * EIGHTS + i / (LINES * 4) * 2 + i / 2 % 2) * 8 + up;
  const int output = first_output + out_warp * OWN + line / PARTS * 8 + across * 2 + i % 2;
  if (row < rows && output < outputs && (PARTS == 1 || line % 2 == 0)) {
    const size_t at = (size_t)row * outputs + output;
    float sum = sums[i];
#ifdef BIASED
    sum += float(bias[output]);
#endif
#ifdef ADDED
    sum = float(T(sum)) + float(residual[at]);
#endif
#ifdef GATED
    y[at] = gated(T(sum), T(sums[i + 4 < SUMS ? i + 4 : i]));
#else
    y[at] = T(sum);
#endif
  }
}
