// One threadgroup: products of up to ROWS of the rows that chose one expert with rows of its packed weights, two times 64 of them
// for each four of its warps, of which there are FOURS. These stay packed until lanes hold them, and are dequantised as MLX does. How a product is summed depends on nothing but
// its columns.
//
// Rows of experts are cut where they begin: the cuts of expert e begin at number offsets[e] / ROWS + e, so that no two experts'
// meet, and those that are not there leave at once.
//
// given, arranged (see sort.h): [tokens, columns] that `order` names, or SORTED [pairs, columns]; weight [experts, outputs, ...],
// scales, biases [experts, outputs, columns / GROUP], bias_of [experts, outputs] -> y [pairs, outputs]: of a SORTED input each row
// where its pair is, else in order. With GATED weights each first 64 rows are the gate's, and each `other` 64 are multiplied by what
// is made of it; y is arranged.
constexpr int LINE = 8 * BITS;  // bytes of 64 columns of a row of weights
constexpr int PIECE = LINE % 16 == 0 ? 16 : 8, PIECES = LINE / PIECE;
constexpr int PAIRS = GROUP < 64 ? 64 / GROUP : 1;  // scales of 64 columns
constexpr int AHEAD = STAGES - 2;           // units read one stage, and may still read the one before
constexpr int THREADS = FOURS * 128;        // and as many rows of weights
constexpr int GIVEN = ROWS * 128, WEIGHT = THREADS * LINE, FACTORS = THREADS * PAIRS * 4;
constexpr int AT_ONCE = THREADS / 8, COPIES = (ROWS + AT_ONCE - 1) / AT_ONCE;  // rows that are copied
typedef Weights<T, BITS, FLOATS> Unpacked;
LENT_FLOATS(lent, (STAGES * (GIVEN + WEIGHT + FACTORS) + 1024) / 4);
SHARED_FLOATS(found, 4);
AFTER_OTHERS()

const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup), thread = warp * 32 + lane;
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int outputs = scales_shape[1], groups = scales_shape[2], columns = groups * GROUP;
const int experts = offsets_shape[0] - 1, pairs = order_shape[0];
#ifdef GATED
constexpr int WIDTH = FOURS * 64;
#else
constexpr int WIDTH = THREADS;
#endif
const int parts = (outputs + WIDTH - 1) / WIDTH;
const int part = int(threadgroup_position_in_grid.x) % parts, cut = int(threadgroup_position_in_grid.x) / parts;

SHARED int* const mine = (SHARED int*)found;  // expert, first row, rows
if (thread == 0) {
  mine[2] = 0;
}
group_barrier();
for (int expert = thread; expert < experts; expert += THREADS) {
  const int begin = offsets[expert], end = offsets[expert + 1], first = begin + (cut - begin / ROWS - expert) * ROWS;
  if (first >= begin && first < end) {
    mine[0] = expert;
    mine[1] = first;
    mine[2] = least(end - first, ROWS);
  }
}
group_barrier();
const int expert = mine[0], first = mine[1], rows = mine[2];
if (rows == 0) {
  return;
}

SHARED unsigned char* const givens = aligned_memory(lent);
SHARED unsigned char* const weights = givens + STAGES * GIVEN;
SHARED unsigned int* const factors = (SHARED unsigned int*)(weights + STAGES * WEIGHT);

// A thread copies the same chunk of some rows, and pieces of weights. What units make of rows that are not there is thrown away.
const int chunk = thread % 8, given_to = thread / 8 * 128 + (chunk ^ thread / 8 & 7) * 16;
const DEVICE T* given_from[COPIES];
#pragma unroll
for (int i = 0; i < COPIES; ++i) {
  const int row = least(thread / 8 + i * AT_ONCE, rows - 1);
#ifdef SORTED
  given_from[i] = given + (size_t)(first + row) * columns + chunk * 8;
#else
  given_from[i] = given + (size_t)(order[first + row] / (pairs / given_shape[0])) * columns + chunk * 8;
#endif
}
#ifdef GATED
#define OUTPUT_OF(row) least(part * WIDTH + (row) / 128 * 64 + (row) % 64, outputs - 1)
#define OF(row, name) ((row) % 128 < 64 ? name : other_##name)
#else
#define OUTPUT_OF(row) least(part * WIDTH + (row), outputs - 1)
#define OF(row, name) name
#endif
const DEVICE unsigned char* piece_from[PIECES];
#pragma unroll
for (int i = 0; i < PIECES; ++i) {
  const int piece = i * THREADS + thread, row = piece / PIECES;
  piece_from[i] = (const DEVICE unsigned char*)OF(row, weight) +
                  ((size_t)expert * outputs + OUTPUT_OF(row)) * (columns / 64 * LINE) + piece % PIECES * PIECE;
}
const size_t factor_at = ((size_t)expert * outputs + OUTPUT_OF(thread)) * groups;
const DEVICE Scale* const scales_from = OF(thread, scales) + factor_at;
const DEVICE Scale* const biases_from = OF(thread, biases) + factor_at;
#undef OF
#undef OUTPUT_OF

const int steps = columns / 64;
unsigned int fetched[PAIRS];
#define FETCH(step)                                                                                      \
  if ((step) < steps) {                                                                                  \
    load_pairs<T, GROUP>(fetched, scales_from + (step) * 64 / GROUP, biases_from + (step) * 64 / GROUP); \
  }
int copied_to = 0;
#define COPY(step)                                                                                           \
  if ((step) < steps) {                                                                                      \
    _Pragma("unroll") for (int i = 0; i < COPIES; ++i) {                                                     \
      if (i * AT_ONCE < rows && (ROWS % AT_ONCE == 0 || thread / 8 < ROWS)) {                                \
        SHARED unsigned char* to = givens + copied_to * GIVEN + given_to + i * (AT_ONCE * 128);              \
        copy_chunk((SHARED float*)to, given_from[i] + (step) * 64, true);                                    \
      }                                                                                                      \
    }                                                                                                        \
    _Pragma("unroll") for (int i = 0; i < PIECES; ++i) {                                                     \
      SHARED unsigned char* to = weights + copied_to * WEIGHT + (i * THREADS + thread) * PIECE;                  \
      if (PIECE == 16) {                                                                                     \
        pass_chunk((SHARED float*)to, piece_from[i] + (step) * LINE, true);                                  \
      } else {                                                                                               \
        copy_bytes<8>(to, piece_from[i] + (step) * LINE);                                                    \
      }                                                                                                      \
    }                                                                                                        \
    _Pragma("unroll") for (int i = 0; i < PAIRS; ++i) {                                                      \
      factors[(copied_to * THREADS + thread) * PAIRS + i] = fetched[i];                                          \
    }                                                                                                        \
  }                                                                                                          \
  end_copies();                                                                                              \
  copied_to = copied_to == STAGES - 1 ? 0 : copied_to + 1;                                                   \
  FETCH((step) + 1)

FETCH(0)
#pragma unroll
for (int early = 0; early < AHEAD; ++early) {
  COPY(early)
}
float sums[2][ROWS / 2];  // of which few rows take the first ones, and few units' time
#pragma unroll
for (int i = 0; i < ROWS; ++i) {
  sums[i % 2][i / 2] = 0.0f;
}
unsigned int held[2][2][2][4];
int stage = 0, step = 0;
#pragma unroll 1
do {  // at least once: units are still adding where this ends, and no sums may be moved there
  wait_for_copies<AHEAD - 1>();
  share_copies();
  group_barrier();  // all have copied this stage, and have done with the one that is overwritten now
  COPY(step + AHEAD)
  const SHARED unsigned char* const given_at = givens + stage * GIVEN;
  Lot<2 * BITS> lots[4];
  unsigned int scale[4], bias[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = warp / 4 * 128 + i / 2 * 64 + warp % 4 * 16 + i % 2 * 8 + up;
    load_lot(lots[i], weights + stage * WEIGHT + row * LINE + across * (2 * BITS));
    const unsigned int both = factors[(stage * THREADS + row) * PAIRS + across * PAIRS / 4];
    scale[i] = lower_halves(both, both);
    bias[i] = upper_halves(both, both);
  }
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    wait_for_units<1>();  // they have done with the registers that are written now
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int line = i / 8 * 2 + i % 2, half = i / 4 % 2, at = half * 2 + i / 2 % 2;
      held[eight][i / 8][half][i % 4] = Unpacked::of(two_at<BITS>(lots[line], eight, at), scale[line], bias[line]);
    }
    if (rows <= ROWS / 4) {
      multiply_columns<T, ROWS / 4>(sums, held[eight], given_at, eight * 2);
    } else if (rows <= ROWS / 2) {
      multiply_columns<T, ROWS / 2>(sums, held[eight], given_at, eight * 2);
    } else {
      multiply_columns<T, ROWS>(sums, held[eight], given_at, eight * 2);
    }
  }
  stage = stage == STAGES - 1 ? 0 : stage + 1;
} while (++step < steps);
#undef COPY
#undef FETCH
wait_for_units<0>();
settle<ROWS / 2>(sums[0]);
settle<ROWS / 2>(sums[1]);
wait_for_copies<0>();
group_barrier();  // all have done with the stages: products take their place

constexpr int PITCH = WIDTH + 8;
SHARED T* const products = (SHARED T*)givens;
#pragma unroll
for (int i = 0; i < ROWS / 2; ++i) {
  const int row = i / 4 * 8 + across * 2 + i % 2, below = i / 2 % 2;
  const int line = warp % 4 * 16 + below * 8 + up;  // of the 64
#ifdef BIASED
#define ADDED(number, output, name) \
  float(T(float(T(number)) + float(name[(size_t)expert * outputs + least(part * WIDTH + (output), outputs - 1)])))
#else
#define ADDED(number, output, name) (number)
#endif
#ifdef GATED
  const int output = warp / 4 * 64, to = below * 32 + up % 4 * 8 + warp % 4 * 2 + up / 4;
  const float gate = ADDED(sums[0][i], output + line, bias_of), other = ADDED(sums[1][i], output + line, other_bias_of);
  products[row * PITCH + output + to] = T(curve_of<CURVE>(gate, other));
#else
  const int output = warp / 4 * 128 + line;
  products[row * PITCH + output] = T(ADDED(sums[0][i], output, bias_of));
  products[row * PITCH + output + 64] = T(ADDED(sums[1][i], output + 64, bias_of));
#endif
#undef ADDED
}
group_barrier();
for (int i = thread; i < rows * (WIDTH / 8); i += THREADS) {
  const int row = i / (WIDTH / 8), output = part * WIDTH + i % (WIDTH / 8) * 8;
  if (output < outputs) {
#ifdef SORTED
    const size_t to = order[first + row];
#else
    const size_t to = first + row;
#endif
    *(DEVICE uint4*)(y + to * outputs + output) = *(const SHARED uint4*)(products + row * PITCH + i % (WIDTH / 8) * 8);
  }
}
