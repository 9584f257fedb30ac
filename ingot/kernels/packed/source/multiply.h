// One threadgroup: products of up to EIGHTS * 8 rows with TILES * 16 rows of packed weights, by matrix units. Its warps take
// stretches of STRETCH groups of columns by turns, DEPTH groups of them at once, and their sums are added in the warps' order:
// how a product is summed depends on nothing but its columns, so that a row's bits do not depend on how many rows there are.
//
// Four lanes hold a group of one row of weights, as it lies in memory, and the same columns of a row of activations: which
// column is which of a matrix unit's is free as long as it is the same for both. Weights are multiplied as the whole numbers
// that they are packed as, which is exact; a group's sums meet its scale, and the activations' sum its bias, in float32.
//
// given [rows, columns], weight [outputs, columns * BITS / 32], scales, biases [outputs, columns / GROUP] -> y [rows, outputs]
//
// With GATHERED weights there are those of many experts, [experts, outputs, ...], and each threadgroup multiplies one row by
// one of them: chosen [products], so many of which in turn are of one given row -> y [products, outputs]
constexpr int LOT = GROUP / 4;
constexpr int LOT_BYTES = LOT * BITS / 8;
constexpr int FACTOR_BYTES = DEPTH * int(sizeof(T));
constexpr int LINES = TILES * 2;  // rows of weights that a lane holds numbers of
constexpr int WIDTH = EIGHTS * 8;
constexpr int PARTS = Pairs<T>::PARTS;
typedef typename Pairs<T>::Number N;
typedef Whole<N, Pairs<T>::EXACT || (BITS > Room<N>::BITS)> Numbers;
SHARED_FLOATS(found, WARPS * TILES * 16 * WIDTH);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
#ifdef GATHERED
const int outputs = scales_shape[1], groups = scales_shape[2];
const int lots = chosen_shape[0];
const int to_row = int(threadgroup_position_in_grid.x) % lots;
const int first_row = to_row / (lots / given_shape[0]), rows = first_row + 1;
const unsigned int first_line = chosen[to_row] * outputs;
#else
const int rows = given_shape[0], outputs = scales_shape[0], groups = scales_shape[1];
const int lots = (rows + WIDTH - 1) / WIDTH;
const int to_row = int(threadgroup_position_in_grid.x) % lots * WIDTH, first_row = to_row;
const unsigned int first_line = 0;
#endif
const int first_output = int(threadgroup_position_in_grid.x) / lots * (TILES * 16);
const int stretches = (groups + STRETCH - 1) / STRETCH;
const int steps = warp < stretches ? (stretches - warp + WARPS - 1) / WARPS * (STRETCH / DEPTH) : 0;
#define FIRST_GROUP(step) ((warp + (step) / (STRETCH / DEPTH) * WARPS) * STRETCH + (step) % (STRETCH / DEPTH) * DEPTH)

// Rows of weights beyond the last are read as the last, and their products thrown away.
unsigned int lines[LINES];
#pragma unroll
for (int i = 0; i < LINES; ++i) {
  const int line = first_output + i / 2 * 16 + i % 2 * 8 + up;
  lines[i] = (first_line + (line < outputs ? line : outputs - 1)) * groups;
}

// What a step multiplies, weights and activations, and what the next one will: fetched before the first is waited for.
constexpr int MET = DEPTH * EIGHTS * (LOT / 8);
Lot<LOT_BYTES> held[2][DEPTH * LINES];
Lot<FACTOR_BYTES> scales_held[2][LINES], biases_held[2][LINES];
Eight<T> given_held[2][MET];
#define FETCH(to, first)                                                                                                   \
  _Pragma("unroll") for (int i = 0; i < LINES; ++i) {                                                                      \
    const size_t group = lines[i] + (first);                                                                               \
    _Pragma("unroll") for (int d = 0; d < DEPTH; ++d) {                                                                    \
      if (ALIGNED || (first) + d < groups) {                                                                               \
        load_lot(held[to][d * LINES + i], (const DEVICE unsigned char*)weight + ((group + d) * 4 + across) * LOT_BYTES);   \
      } else {                                                                                                             \
        clear_lot(held[to][d * LINES + i]);                                                                                \
      }                                                                                                                    \
    }                                                                                                                      \
    load_factors<T, DEPTH, ALIGNED>(scales_held[to][i], scales + group, groups - (first));                                 \
    load_factors<T, DEPTH, ALIGNED>(biases_held[to][i], biases + group, groups - (first));                                 \
  }                                                                                                                        \
  _Pragma("unroll") for (int i = 0; i < MET; ++i) {                                                                        \
    const int row = first_row + i % EIGHTS * 8 + up, group = (first) + i / EIGHTS / (LOT / 8);                             \
    clear_eight(given_held[to][i]);                                                                                        \
    if ((ALIGNED || group < groups) && row < rows) {                                                                       \
      const size_t line = (size_t)row * groups + group;                                                                    \
      load_eight(given_held[to][i], given + (line * 4 + across) * LOT + i / EIGHTS % (LOT / 8) * 8);                       \
    }                                                                                                                      \
  }

float sums[TILES * EIGHTS * 4];
#pragma unroll
for (int i = 0; i < TILES * EIGHTS * 4; ++i) {
  sums[i] = 0.0f;
}
if (steps > 0) {
  FETCH(0, FIRST_GROUP(0))
}
for (int even = 0; even < steps; even += 2) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int step = even + side;
    if (step < steps) {
      if (step + 1 < steps) {
        const int next_group = FIRST_GROUP(step + 1);
        FETCH(1 - side, next_group)
      }
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        float totals[EIGHTS * 4], products[TILES * EIGHTS * 4];
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; ++i) {
          totals[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < TILES * EIGHTS * 4; ++i) {
          products[i] = 0.0f;
        }
#pragma unroll
        for (int eight = 0; eight < LOT / 8; ++eight) {
          unsigned int pairs[EIGHTS][PARTS][4];
#pragma unroll
          for (int e = 0; e < EIGHTS; ++e) {
            Pairs<T>::of(given_held[side][(d * (LOT / 8) + eight) * EIGHTS + e], pairs[e]);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
              for (int part = 0; part < PARTS; ++part) {
                multiply_tiles<N>(totals + e * 4, Numbers::ONES, Numbers::ONES, Numbers::ONES, Numbers::ONES,
                                  pairs[e][part][half * 2], pairs[e][part][half * 2 + 1]);
              }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
              const LOCAL Lot<LOT_BYTES>& high = held[side][d * LINES + tile * 2];
              const LOCAL Lot<LOT_BYTES>& low = held[side][d * LINES + tile * 2 + 1];
              const unsigned int one = Numbers::of(two_at<BITS>(high, eight, half * 2));
              const unsigned int two = Numbers::of(two_at<BITS>(low, eight, half * 2));
              const unsigned int three = Numbers::of(two_at<BITS>(high, eight, half * 2 + 1));
              const unsigned int four = Numbers::of(two_at<BITS>(low, eight, half * 2 + 1));
#pragma unroll
              for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                  multiply_tiles<N>(products + (tile * EIGHTS + e) * 4, one, two, three, four, pairs[e][part][half * 2],
                                    pairs[e][part][half * 2 + 1]);
                }
              }
            }
          }
        }
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
          const float scale = factor_at<DEPTH>(scales_held[side][line], d, T());
          const float bias = multiply_add(scale, -Numbers::OFFSET, factor_at<DEPTH>(biases_held[side][line], d, T()));
#pragma unroll
          for (int i = 0; i < EIGHTS * 2; ++i) {
            const int at = i / 2 * 4 + line % 2 * 2 + i % 2, to = line / 2 * EIGHTS * 4 + at;
            sums[to] = multiply_add(scale, products[to], multiply_add(bias, totals[at], sums[to]));
          }
        }
      }
    }
  }
}
#undef FETCH
#undef FIRST_GROUP

#pragma unroll
for (int i = 0; i < TILES * EIGHTS * 4; ++i) {
  const int output = i / (EIGHTS * 4) * 16 + i / 2 % 2 * 8 + up, row = i / 4 % EIGHTS * 8 + across * 2 + i % 2;
  found[(warp * WIDTH + row) * (TILES * 16) + output] = sums[i];
}
group_barrier();
for (int i = warp * 32 + lane; i < WIDTH * TILES * 16; i += WARPS * 32) {
  const int row = i / (TILES * 16), output = first_output + i % (TILES * 16);
  if (first_row + row < rows && output < outputs) {
    float sum = 0.0f;
    for (int other = 0; other < WARPS; ++other) {
      sum += found[other * WIDTH * TILES * 16 + i];
    }
    y[(size_t)(to_row + row) * outputs + output] = T(sum);
  }
}
