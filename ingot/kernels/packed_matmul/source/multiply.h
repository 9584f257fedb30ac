// One threadgroup: products of up to EIGHTS * 8 rows with TILES * 16 rows of packed weights, by matrix units. Each of its warps
// takes a span of columns, and their sums are added in the warps' order: how a product is summed depends on nothing but its
// columns, so that a row's bits do not depend on how many rows there are.
//
// Weights come to shared memory as they lie in memory, in stages of DEPTH groups of columns, with their scales and biases where
// these are COPIED, all but one of a warp's STAGES on their way at a time; no warp waits for another before all are done. Four
// lanes hold a group of one row of weights, and the same columns of a row of activations: which column is which of a matrix
// unit's is free as long as it is the same for both. Weights are multiplied as the whole numbers that they are packed as, which
// is exact; a group's sums meet its scale, and the activations' sum its bias, in float32. So are FLOATS, which have no biases; of
// groups of sixteen columns two are held as one, whose weights meet their scales before.
//
// given [rows, columns], weight [outputs, columns * BITS / 32], scales, biases [outputs, columns / GROUP] -> y [rows, outputs]
//
// With GATHERED weights there are those of many experts, [experts, outputs, ...], and each threadgroup multiplies one row by
// one of them: chosen [products], so many of which in turn are of one given row -> y [products, outputs]
// With a RESIDUAL [rows, outputs] that is added to what was rounded. With GATED weights their first half is a gate's, and
// silu(gate) * other half is given, each step of it rounded -> y [rows, outputs / 2]
// GATED and GATHERED: the other half are arrays of their own, up_weight, up_scales, up_biases, and the curve is one of several,
// with two numbers [2] -> y [products, outputs]; BIASED: gate_bias, up_bias [experts, outputs] are added to rounded products.
// SQUARED: what is above zero is squared, the rest is zero.
constexpr int HELD = GROUP < 32 ? 32 : GROUP, SCALES = HELD / GROUP;  // columns that are held at once, and their scales
constexpr int LOT = HELD / 4;
constexpr int LOT_BYTES = LOT * BITS / 8;
constexpr int BYTES = HELD * BITS / 8;  // of a group of a row
constexpr int FACTOR_BYTES = DEPTH * SCALES * int(sizeof(Scale));
constexpr int LINES = TILES * 2;  // rows of weights that a lane holds numbers of
constexpr int WIDTH = EIGHTS * 8;
constexpr int PARTS = Pairs<T>::PARTS;
constexpr int STAGE = TILES * 16 * DEPTH * BYTES;
constexpr int OF_TILE = (FLOATS ? 16 : 32) * FACTOR_BYTES;  // its scales and biases
constexpr int FACTORS = COPIED ? TILES * OF_TILE : 0, WHOLE = STAGE + FACTORS;
constexpr int RING = WARPS * STAGES * WHOLE / 4, FOUND = WARPS * TILES * 16 * WIDTH;
typedef typename Pairs<T>::Number N;
typedef Packed<N, BITS, GROUP, FLOATS, Pairs<T>::EXACT> Numbers;
typedef Places<TILES * 16, DEPTH, BYTES> Placed;
SHARED_FLOATS(ring, RING > FOUND ? RING : FOUND);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
#ifdef GATHERED
AFTER_OTHERS()
const int outputs = scales_shape[1], groups = scales_shape[2] / SCALES;
const int lots = chosen_shape[0];
const int to_row = int(threadgroup_position_in_grid.x) % lots;
const int first_row = to_row / (lots / given_shape[0]), rows = first_row + 1;
const unsigned int first_line = chosen[to_row] * outputs;
#else
const int rows = given_shape[0], outputs = scales_shape[0], groups = scales_shape[1] / SCALES;
const int lots = (rows + WIDTH - 1) / WIDTH;
const int to_row = int(threadgroup_position_in_grid.x) % lots * WIDTH, first_row = to_row;
const unsigned int first_line = 0;
#endif
const int part = int(threadgroup_position_in_grid.x) / lots;
const int span = (groups + WARPS * DEPTH - 1) / (WARPS * DEPTH) * DEPTH, first_group = warp * span;
const int last_group = first_group + span < groups ? first_group + span : groups;
const int steps = first_group < last_group ? (last_group - first_group + DEPTH - 1) / DEPTH : 0;

// The row of weights that is `row` of the threadgroup's: of gated ones eight of the gate, then eight of the other half. Those
// beyond the last are read as the last, and their products thrown away.
#if defined(GATED) && defined(GATHERED)
#define LINE_OF(row) (first_line + least(part * (TILES * 8) + (row) / 16 * 8 + (row) % 8, outputs - 1))
#define OF_ROW(row, own) ((row) % 16 < 8 ? own : up_##own)
#elif defined(GATED)
#define LINE_OF(row) \
  ((row) % 16 / 8 * (outputs / 2) + least(part * (TILES * 8) + (row) / 16 * 8 + (row) % 8, outputs / 2 - 1))
#else
#define LINE_OF(row) (first_line + least(part * (TILES * 16) + (row), outputs - 1))
#endif
#ifndef OF_ROW
#define OF_ROW(row, own) own
#endif

// A stage is copied in pieces of sixteen bytes, or, where rows do not begin at multiples of those, in words.
constexpr int PIECE = PIECES ? 16 : 4;
constexpr int ROW_PIECES = DEPTH * BYTES / PIECE, STAGE_PIECES = STAGE / PIECE, LANE_PIECES = (STAGE_PIECES + 31) / 32;
SHARED unsigned char* const stages = (SHARED unsigned char*)ring + warp * STAGES * WHOLE;
const DEVICE unsigned char* piece_from[LANE_PIECES];
#pragma unroll
for (int i = 0; i < LANE_PIECES; ++i) {
  const int piece = i * 32 + lane, row = least(piece / ROW_PIECES, TILES * 16 - 1);
  const size_t byte = ((size_t)LINE_OF(row) * groups + first_group) * BYTES + piece % ROW_PIECES * PIECE;
  piece_from[i] = (const DEVICE unsigned char*)OF_ROW(row, weight) + byte;
}
// Half of the lanes copy a tile's scales, half its biases.
const DEVICE Scale* factor_from[TILES];
#pragma unroll
for (int tile = 0; tile < TILES; ++tile) {
  const DEVICE Scale* const own = lane < 16 ? OF_ROW(lane % 16, scales) : OF_ROW(lane % 16, biases);
  factor_from[tile] = own + ((size_t)LINE_OF(tile * 16 + lane % 16) * groups + first_group) * SCALES;
}
int copied = 0, copied_to = 0;  // steps, and where the next one's stage begins
#define COPY()                                                                                                             \
  if (copied < steps) {                                                                                                    \
    _Pragma("unroll") for (int i = 0; i < LANE_PIECES; ++i) {                                                              \
      const int byte = (i * 32 + lane) % ROW_PIECES * PIECE;                                                               \
      const bool there = ALIGNED || first_group + copied * DEPTH + byte / BYTES < groups;                                  \
      SHARED unsigned char* to = stages + copied_to + Placed::template piece_at<PIECE>(lane, i);                           \
      if (STAGE_PIECES % 32 != 0 && i * 32 + lane >= STAGE_PIECES) {                                                       \
      } else if (PIECES) {                                                                                                 \
        pass_chunk((SHARED float*)to, there ? piece_from[i] : (const DEVICE unsigned char*)weight, there);                 \
      } else {                                                                                                             \
        *(SHARED unsigned int*)to = there ? *(const DEVICE unsigned int*)piece_from[i] : 0;                                \
      }                                                                                                                    \
      piece_from[i] += DEPTH * BYTES;                                                                                      \
    }                                                                                                                      \
    _Pragma("unroll") for (int tile = 0; COPIED && tile < TILES; ++tile) {                                                 \
      if (!FLOATS || lane < 16) {                                                                                          \
        SHARED unsigned char* to = stages + copied_to + STAGE + tile * OF_TILE + lane * FACTOR_BYTES;                      \
        copy_bytes<COPIED ? FACTOR_BYTES : 4>(to, factor_from[tile]);                                                      \
      }                                                                                                                    \
      factor_from[tile] += DEPTH * SCALES;                                                                                 \
    }                                                                                                                      \
    ++copied;                                                                                                              \
    copied_to = copied_to == (STAGES - 1) * WHOLE ? 0 : copied_to + WHOLE;                                                 \
  }                                                                                                                        \
  end_copies();

// Scales and biases of a step. Where they are not copied, those of the next one are fetched before these are met: they are small,
// and asked for before weights that they would have to wait behind.
Lot<FACTOR_BYTES> scales_held[LINES], biases_held[LINES], next_scales[LINES], next_biases[LINES];
unsigned int lines[LINES];
#pragma unroll
for (int i = 0; i < LINES; ++i) {
  lines[i] = LINE_OF(i / 2 * 16 + i % 2 * 8 + up) * groups + first_group;
}
#define FETCH_FACTOR(to, from, there) \
  load_factors<FACTOR_BYTES, UNIT, ALIGNED>(to, (const DEVICE unsigned char*)(from), there);
#define FETCH_FACTORS(step)                                                                                            \
  _Pragma("unroll") for (int i = 0; i < LINES; ++i) {                                                                  \
    const int there = (groups - first_group - (step) * DEPTH) * SCALES * int(sizeof(Scale));                           \
    FETCH_FACTOR(next_scales[i], OF_ROW(i * 8, scales) + (lines[i] + (step) * DEPTH) * SCALES, there)                  \
    if (!FLOATS) {                                                                                                     \
      FETCH_FACTOR(next_biases[i], OF_ROW(i * 8, biases) + (lines[i] + (step) * DEPTH) * SCALES, there)                \
    }                                                                                                                  \
  }
if (!COPIED && steps > 0) {
  FETCH_FACTORS(0)
}
#pragma unroll
for (int early = 0; early < STAGES - 1; ++early) {
  COPY()
}

// Activations of a group, and, where there are registers for it, those of the next one AHEAD.
constexpr int MET = EIGHTS * (LOT / 8);
Eight<T> given_held[AHEAD + 1][MET];
const DEVICE T* given_from[EIGHTS];
#pragma unroll
for (int i = 0; i < EIGHTS; ++i) {
  const int row = first_row + i * 8 + up;
  given_from[i] = given + (((size_t)least(row, rows - 1) * groups + first_group) * 4 + across) * LOT;
}
#pragma unroll
for (int i = 0; i < MET * (AHEAD + 1); ++i) {
  clear_eight(given_held[i / MET][i % MET]);  // and so stay those of rows that are not there
}
#define FETCH_GIVEN(side, group)                                                                                       \
  _Pragma("unroll") for (int i = 0; i < MET; ++i) {                                                                    \
    if (!ALIGNED && (group) >= groups) {                                                                               \
      clear_eight(given_held[side][i]);                                                                                \
    } else if (first_row + i % EIGHTS * 8 + up < rows) {                                                               \
      load_eight(given_held[side][i], given_from[i % EIGHTS] + ((group) - first_group) * HELD + i / EIGHTS * 8);       \
    }                                                                                                                  \
  }

float sums[TILES * EIGHTS * 4];
#pragma unroll
for (int i = 0; i < TILES * EIGHTS * 4; ++i) {
  sums[i] = 0.0f;
}
int lots_at[DEPTH];
#pragma unroll
for (int d = 0; d < DEPTH; ++d) {
  lots_at[d] = Placed::at(up, d * BYTES + across * LOT_BYTES);
}
// None of these numbers has this bit, which the compiler does not know: what is made with it stays in registers of its own, and
// is not made anew at each use.
#define NO_BIT(number) ((unsigned int)(number) & 0x80000000u)
const unsigned int ones[4] = {Numbers::ONES | NO_BIT(groups), Numbers::ONES | NO_BIT(outputs), Numbers::ONES | NO_BIT(rows),
                              Numbers::ONES | NO_BIT(lots)};
const unsigned int by = Numbers::by(0.0f) | NO_BIT(groups);
#undef NO_BIT
int stage_at = 0;
#ifndef GATHERED
AFTER_OTHERS()
#endif
if (AHEAD && steps > 0) {
  FETCH_GIVEN(0, first_group)
}
for (int step = 0; step < steps; ++step) {
#pragma unroll
  for (int i = 0; !COPIED && i < LINES; ++i) {
    scales_held[i] = next_scales[i];
    biases_held[i] = next_biases[i];
  }
  if (!COPIED && step + 1 < steps) {
    FETCH_FACTORS(step + 1)
  }
  wait_for_copies<STAGES - 2>();
  warp_barrier();  // all lanes' copies are there, and all have done with the stage before, which is overwritten now
  COPY()
  const SHARED unsigned char* stage = stages + stage_at;
  stage_at = stage_at == (STAGES - 1) * WHOLE ? 0 : stage_at + WHOLE;
#pragma unroll
  for (int i = 0; COPIED && i < LINES; ++i) {
    const SHARED unsigned char* own = stage + STAGE + i / 2 * OF_TILE + (i % 2 * 8 + up) * FACTOR_BYTES;
    load_lot(scales_held[i], own);
    if (!FLOATS) {
      load_lot(biases_held[i], own + 16 * FACTOR_BYTES);
    }
  }
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int fetched = first_group + step * DEPTH + d + AHEAD;
    if (!AHEAD || d + 1 < DEPTH || step + 1 < steps) {
      FETCH_GIVEN(AHEAD * (d + 1) % 2, fetched)
    }
    unsigned int pairs[MET][PARTS][4];
#pragma unroll
    for (int i = 0; i < MET; ++i) {
      Pairs<T>::of(given_held[AHEAD * d % 2][i], pairs[i]);
    }
    float totals[EIGHTS * 4];
#pragma unroll
    for (int e = 0; !FLOATS && e < EIGHTS; ++e) {
      clear_tile(totals + e * 4);
#pragma unroll
      for (int i = 0; i < LOT / 8 * 2 * PARTS; ++i) {
        const LOCAL unsigned int* two = pairs[i / (2 * PARTS) * EIGHTS + e][i % PARTS] + i / PARTS % 2 * 2;
        multiply_tiles<N>(totals + e * 4, ones[0], ones[1], ones[2], ones[3], two[0], two[1]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      Lot<LOT_BYTES> high, low;
      load_lot(high, stage + lots_at[d] + Placed::STEP * (tile * 16));
      load_lot(low, stage + lots_at[d] + Placed::STEP * (tile * 16 + 8));
      float scales_of[2];
      unsigned int by_of[2];
#pragma unroll
      for (int line = 0; line < 2; ++line) {
        const int next = SCALES == 2 ? across / 2 : 0;
        scales_of[line] = factor_at<GROUP>(scales_held[tile * 2 + line], d * SCALES, next, Scale());
        by_of[line] = SCALES == 2 ? Numbers::by(scales_of[line]) : by;
      }
      float products[EIGHTS * 4];
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) {
        clear_tile(products + e * 4);
      }
#pragma unroll
      for (int half = 0; half < LOT / 4; ++half) {
        const int eight = half / 2, at = half % 2 * 2;
        const unsigned int one = Numbers::of(two_at<BITS>(high, eight, at), by_of[0]);
        const unsigned int two = Numbers::of(two_at<BITS>(low, eight, at), by_of[1]);
        const unsigned int three = Numbers::of(two_at<BITS>(high, eight, at + 1), by_of[0]);
        const unsigned int four = Numbers::of(two_at<BITS>(low, eight, at + 1), by_of[1]);
#pragma unroll
        for (int i = 0; i < EIGHTS * PARTS; ++i) {
          const LOCAL unsigned int* met = pairs[eight * EIGHTS + i / PARTS][i % PARTS] + at;
          multiply_tiles<N>(products + i / PARTS * 4, one, two, three, four, met[0], met[1]);
        }
      }
#pragma unroll
      for (int line = 0; line < 2; ++line) {
        const float scale = SCALES == 2 ? Numbers::LEFT : scales_of[line] * Numbers::LEFT;
        const float own = FLOATS ? 0.0f : factor_at<GROUP>(biases_held[tile * 2 + line], d, 0, Scale());
        const float bias = multiply_add(scale, -Numbers::OFFSET, own);
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; ++i) {
          const int at = i / 2 * 4 + line * 2 + i % 2, to = tile * EIGHTS * 4 + at;
          sums[to] = multiply_add(scale, products[at], FLOATS ? sums[to] : multiply_add(bias, totals[at], sums[to]));
        }
      }
    }
  }
  if (AHEAD && DEPTH % 2 != 0) {
#pragma unroll
    for (int i = 0; i < MET; ++i) {
      given_held[0][i] = given_held[AHEAD][i];
    }
  }
}
#undef COPY
#undef FETCH_FACTORS
#undef FETCH_FACTOR
#undef FETCH_GIVEN
#undef LINE_OF
#undef OF_ROW

wait_for_copies<0>();
group_barrier();  // all have done with the stages: sums take their place
SHARED float* found = ring;
#pragma unroll
for (int i = 0; i < TILES * EIGHTS * 4; ++i) {
  const int output = i / (EIGHTS * 4) * 16 + i / 2 % 2 * 8 + up, row = i / 4 % EIGHTS * 8 + across * 2 + i % 2;
  found[(warp * WIDTH + row) * (TILES * 16) + output] = sums[i];
}
group_barrier();
#define SUM_AT(to, at)                                             \
  float to = 0.0f;                                                 \
  for (int from = 0; from < WARPS; ++from) {                       \
    to += found[from * WIDTH * TILES * 16 + (at)];                 \
  }
#ifdef GATED
constexpr int GIVEN = TILES * 8;  // outputs
#ifdef GATHERED
const int width = outputs;
#else
const int width = outputs / 2;
#endif
#else
constexpr int GIVEN = TILES * 16;
const int width = outputs;
#endif
const int count = least(rows - first_row, WIDTH) * GIVEN;
for (int i = warp * 32 + lane; i < count; i += WARPS * 32) {
  const int row = i / GIVEN, output = part * GIVEN + i % GIVEN;
  if (output < width) {
    const size_t to = (size_t)(to_row + row) * width + output;
#ifdef GATED
    const int at = row * (TILES * 16) + i % GIVEN / 8 * 16 + i % 8;
    SUM_AT(gate, at)
    SUM_AT(other, at + 8)
#ifdef BIASED
    gate = float(T(gate)) + float(gate_bias[first_line + output]);
    other = float(T(other)) + float(up_bias[first_line + output]);
#endif
#ifdef GATHERED
    y[to] = curved<CURVE>(T(gate), T(other), numbers[0], numbers[1]);
#else
    y[to] = gated(T(gate), T(other));
#endif
#else
    SUM_AT(sum, i)
#ifdef SQUARED
    const float above = sum > 0.0f ? float(T(sum)) : 0.0f;
    y[to] = T(above * above);
#elif defined(RESIDUAL)
    y[to] = T(float(T(sum)) + float(residual[to]));
#else
    y[to] = T(sum);
#endif
#endif
  }
}
#undef SUM_AT
