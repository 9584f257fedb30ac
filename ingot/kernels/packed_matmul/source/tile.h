// One threadgroup: products of ROW_WARPS * EIGHTS * 8 rows with OUT_WARPS * TILES * 16 rows of packed weights, by matrix units,
// for prompts: each warp multiplies a part of both, so that what comes to shared memory is read by several.
//
// A product is summed as where rows are few (multiply.h): over the groups of a span of columns, which are those of one of
// SPAN_WARPS warps there, then over spans. So a row's bits are those that it has alone.
//
// A stage is one group of columns: activations, weights as they lie in memory, their scales and biases, and what these meet,
// which totals.h has summed. All but one of STAGES are on their way at a time.
//
// given, weight, scales, biases -> y as in multiply.h; totals [groups, rows or more]. RESIDUAL and GATED likewise
constexpr int LOT = GROUP / 4, LOT_BYTES = LOT * BITS / 8, BYTES = GROUP * BITS / 8, EACH = LOT / 8, ROW_CHUNKS = GROUP / 8;
constexpr int WARPS = OUT_WARPS * ROW_WARPS, THREADS = WARPS * 32;
constexpr int ALL_LINES = OUT_WARPS * TILES * 16, ALL_ROWS = ROW_WARPS * EIGHTS * 8, SUMS = TILES * EIGHTS * 4;
constexpr int PIECE = PIECES ? 16 : 4, LINE_PIECES = BYTES / PIECE, ALL_PIECES = ALL_LINES * LINE_PIECES;
constexpr int COPIES = (ALL_PIECES + THREADS - 1) / THREADS, CHUNKS = ALL_ROWS * ROW_CHUNKS;
constexpr int CHUNK_COPIES = (CHUNKS + THREADS - 1) / THREADS;
constexpr int FACTORS = ALL_LINES * (FLOATS ? 1 : 2), FACTOR_COPIES = (FACTORS + THREADS - 1) / THREADS;
constexpr int GIVEN_AT = ALL_LINES * BYTES, TOTALS_AT = GIVEN_AT + CHUNKS * 16, FACTORS_AT = TOTALS_AT + ALL_ROWS * 4;
constexpr int STAGE = FACTORS_AT + ALL_LINES * 8;
#ifdef GATED
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
constexpr int OWN = TILES * 16 / PARTS;  // outputs of a warp
typedef typename Pairs<T>::Number N;
typedef Packed<N, BITS, GROUP, FLOATS, Pairs<T>::EXACT> Numbers;
LENT_FLOATS(ring, STAGES * STAGE / 4);
AFTER_OTHERS()

const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup), thread = warp * 32 + lane;
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int out_warp = warp % OUT_WARPS, row_warp = warp / OUT_WARPS;
const int rows = given_shape[0], outputs = scales_shape[0] / PARTS, groups = scales_shape[1];
const int lots = (rows + ALL_ROWS - 1) / ALL_ROWS, width = lots * ALL_ROWS;  // neighbours read the same weights
const int first_row = int(threadgroup_position_in_grid.x) % lots * ALL_ROWS;
const int first_output = int(threadgroup_position_in_grid.x) / lots * (ALL_LINES / PARTS);
const int span = (groups + SPAN_WARPS * SPAN_DEPTH - 1) / (SPAN_WARPS * SPAN_DEPTH) * SPAN_DEPTH;
SHARED unsigned char* const stages = (SHARED unsigned char*)ring;

// The row of weights that is `row` of the threadgroup's: of gated ones eight of the gate, then eight of the other half. Those
// beyond the last are read as the last, and their products thrown away.
#ifdef GATED
#define LINE_OF(row) ((row) % 16 / 8 * outputs + least(first_output + (row) / 16 * 8 + (row) % 8, outputs - 1))
#else
#define LINE_OF(row) least(first_output + (row), outputs - 1)
#endif
const DEVICE unsigned char* piece_from[COPIES];
#pragma unroll
for (int i = 0; i < COPIES; ++i) {
  const int piece = least(i * THREADS + thread, ALL_PIECES - 1);
  piece_from[i] = (const DEVICE unsigned char*)weight + (size_t)LINE_OF(piece / LINE_PIECES) * groups * BYTES +
                  piece % LINE_PIECES * PIECE;
}
const DEVICE T* chunk_from[CHUNK_COPIES];
#pragma unroll
for (int i = 0; i < CHUNK_COPIES; ++i) {
  const int chunk = least(i * THREADS + thread, CHUNKS - 1), row = least(first_row + chunk / ROW_CHUNKS, rows - 1);
  chunk_from[i] = given + (size_t)row * groups * GROUP + chunk % ROW_CHUNKS * 8;
}
const DEVICE Scale* factor_from[FACTOR_COPIES];
#pragma unroll
for (int i = 0; i < FACTOR_COPIES; ++i) {
  const int factor = least(i * THREADS + thread, FACTORS - 1);
  factor_from[i] = (factor < ALL_LINES ? scales : biases) + (size_t)LINE_OF(factor % ALL_LINES) * groups;
}
#undef LINE_OF

#define COPY(slot, group)                                                                                                  \
  {                                                                                                                        \
    SHARED unsigned char* const to = stages + (slot) * STAGE;                                                              \
    _Pragma("unroll") for (int i = 0; i < COPIES; ++i) {                                                                   \
      const int piece = i * THREADS + thread;                                                                              \
      if (ALL_PIECES % THREADS == 0 || piece < ALL_PIECES) {                                                               \
        if (PIECES) {                                                                                                      \
          pass_chunk((SHARED float*)(to + piece * PIECE), piece_from[i] + (size_t)(group) * BYTES, true);                  \
        } else {                                                                                                           \
          copy_bytes<4>(to + piece * PIECE, piece_from[i] + (size_t)(group) * BYTES);                                      \
        }                                                                                                                  \
      }                                                                                                                    \
    }                                                                                                                      \
    _Pragma("unroll") for (int i = 0; i < CHUNK_COPIES; ++i) {                                                             \
      const int chunk = i * THREADS + thread, row = chunk / ROW_CHUNKS, part = chunk % ROW_CHUNKS;                         \
      if (CHUNKS % THREADS == 0 || chunk < CHUNKS) {                                                                       \
        const int place = ((row / 8 * EACH + part % EACH) * 32 + row % 8 * 4 + part / EACH) * 16;                          \
        copy_chunk((SHARED float*)(to + GIVEN_AT + place), chunk_from[i] + (size_t)(group) * GROUP, true);                 \
      }                                                                                                                    \
    }                                                                                                                      \
    if (!FLOATS && thread < ALL_ROWS / 4) {                                                                                \
      copy_chunk((SHARED float*)(to + TOTALS_AT) + thread * 4, totals + (size_t)(group) * width + first_row + thread * 4,  \
                 true);                                                                                                    \
    }                                                                                                                      \
  }
// Scales and biases are too small to be copied: they are fetched with the rest of a stage, and put there one stage later.
float fetched[FACTOR_COPIES];
#define FETCH(group)                                                                                                       \
  _Pragma("unroll") for (int i = 0; i < FACTOR_COPIES; ++i) { fetched[i] = scale_of<GROUP>(factor_from[i][group]); }
#define PUT(slot)                                                                                                          \
  _Pragma("unroll") for (int i = 0; i < FACTOR_COPIES; ++i) {                                                              \
    if (FACTORS % THREADS == 0 || i * THREADS + thread < FACTORS) {                                                        \
      ((SHARED float*)(stages + (slot) * STAGE + FACTORS_AT))[i * THREADS + thread] = fetched[i];                          \
    }                                                                                                                      \
  }

// What is rarely met is not in registers: these are for what is multiplied.
float sums[SUMS];
volatile float whole[SUMS];
#pragma unroll
for (int i = 0; i < SUMS; ++i) {
  sums[i] = 0.0f;
  whole[i] = 0.0f;
}
#pragma unroll
for (int stage = 0; stage < STAGES - 1; ++stage) {
  if (stage < groups) {
    COPY(stage, stage)
    FETCH(stage)
    PUT(stage)
  }
  end_copies();
}
int slot = 0, free_slot = STAGES - 1, put_slot = -1, left = span;
for (int group = 0; group < groups; ++group) {
  wait_for_copies<STAGES - 2>();
  group_barrier();
  if (put_slot >= 0) {
    PUT(put_slot)
  }
  put_slot = -1;
  if (group + STAGES - 1 < groups) {
    COPY(free_slot, group + STAGES - 1)
    FETCH(group + STAGES - 1)
    put_slot = free_slot;
  }
  end_copies();
  const SHARED unsigned char* const stage = stages + slot * STAGE;
  slot = slot + 1 == STAGES ? 0 : slot + 1;
  free_slot = free_slot + 1 == STAGES ? 0 : free_slot + 1;

  unsigned int pairs[EIGHTS * EACH][1][4];
  float met[EIGHTS * 2];
#pragma unroll
  for (int i = 0; i < EIGHTS * EACH; ++i) {
    Eight<T> held;
    held.raw = *(const SHARED uint4*)(stage + GIVEN_AT + (row_warp * EIGHTS * EACH + i) * 512 + lane * 16);
    Pairs<T>::of(held, pairs[i]);
  }
#pragma unroll
  for (int i = 0; i < EIGHTS * 2; ++i) {
    const SHARED float* const own = (const SHARED float*)(stage + TOTALS_AT) + (row_warp * EIGHTS + i / 2) * 8;
    met[i] = FLOATS ? 0.0f : own[across * 2 + i % 2];
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int line = (out_warp * TILES + tile) * 16 + up;
    Lot<LOT_BYTES> high, low;
    load_lot(high, stage + line * BYTES + across * LOT_BYTES);
    load_lot(low, stage + (line + 8) * BYTES + across * LOT_BYTES);
    const unsigned int by = Numbers::by(0.0f);
    float products[EIGHTS * 4];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      clear_tile(products + e * 4);
    }
#pragma unroll
    for (int half = 0; half < LOT / 4; ++half) {
      const int eight = half / 2, at = half % 2 * 2;
      const unsigned int one = Numbers::of(two_at<BITS>(high, eight, at), by);
      const unsigned int two = Numbers::of(two_at<BITS>(low, eight, at), by);
      const unsigned int three = Numbers::of(two_at<BITS>(high, eight, at + 1), by);
      const unsigned int four = Numbers::of(two_at<BITS>(low, eight, at + 1), by);
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) {
        const LOCAL unsigned int* own = pairs[e * EACH + eight][0] + at;
        multiply_tiles<N>(products + e * 4, one, two, three, four, own[0], own[1]);
      }
    }
#pragma unroll
    for (int under = 0; under < 2; ++under) {
      const SHARED float* const factors = (const SHARED float*)(stage + FACTORS_AT) + line + under * 8;
      const float scale = factors[0] * Numbers::LEFT;
      const float bias = multiply_add(scale, -Numbers::OFFSET, FLOATS ? 0.0f : factors[ALL_LINES]);
#pragma unroll
      for (int i = 0; i < EIGHTS * 2; ++i) {
        const int at = i / 2 * 4 + under * 2 + i % 2, to = tile * EIGHTS * 4 + at;
        sums[to] = multiply_add(scale, products[at], FLOATS ? sums[to] : multiply_add(bias, met[i], sums[to]));
      }
    }
  }
  if (--left == 0 || group + 1 == groups) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      whole[i] = whole[i] + sums[i];
      sums[i] = 0.0f;
    }
    left = span;
  }
}
#undef COPY
#undef FETCH
#undef PUT

#pragma unroll
for (int i = 0; i < SUMS; ++i) {
  const int row = first_row + (row_warp * EIGHTS + i / 4 % EIGHTS) * 8 + across * 2 + i % 2;
  const int output =
      first_output + out_warp * OWN + i / (EIGHTS * 4) * (16 / PARTS) + (PARTS == 1 ? i / 2 % 2 * 8 : 0) + up;
  if (row < rows && output < outputs && (PARTS == 1 || i / 2 % 2 == 0)) {
    const size_t at = (size_t)row * outputs + output;
#ifdef GATED
    y[at] = gated(T(whole[i]), T(whole[i + 2 < SUMS ? i + 2 : i]));
#elif defined(RESIDUAL)
    y[at] = T(float(T(whole[i])) + float(residual[at]));
#else
    y[at] = T(whole[i]);
#endif
  }
}
