// One threadgroup: products of up to EIGHTS * 8 rows with TILES * 16 rows of weights, by matrix units.
//
// Columns are cut into SPANS spans. A span is summed from its first column to its last, then neighbouring spans are added,
// then neighbouring sums, until one is left: how a product is summed depends on nothing but its columns, so that a row's bits
// do not depend on how many rows there are. The threadgroup's warps share the spans.
//
// Four lanes hold 32 columns of a row of weights, as they lie in memory, and the same columns of a row of activations: which
// column is which of a matrix unit's is free as long as it is the same for both. A stage is 64 columns; DEPTH stages of weights
// are on their way to the registers of each warp, and activations a stage ahead.
//
// given [rows, columns], weight [outputs, columns] -> y [rows, outputs]
// BIASED: bias [outputs] is added before rounding. ADDED: residual [rows, outputs] is added to what was rounded.
// GATED: weight [2 * outputs, columns], of a gate and what it lets pass; a threadgroup takes half of its rows from each.
constexpr int HALVES = 2;
constexpr int LINES = TILES * 2;  // rows of weights that a lane holds numbers of
constexpr int OUTS = TILES * 16;
#ifdef GATED
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
constexpr int OWN = OUTS / PARTS;
constexpr int PITCH = OUTS + 4;          // so that lanes write to different banks
constexpr int EACH = SPANS / WARPS;      // spans of a warp
static_assert(EACH * WARPS == SPANS, "warps have as many spans each");
constexpr int SUMS = TILES * EIGHTS * 4;
SHARED_FLOATS(found, WARPS * EIGHTS * 8 * PITCH);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int rows = given_shape[0], outputs = weight_shape[0] / PARTS, chunks = weight_shape[1] / 8;
const int stages = (chunks + HALVES * 4 - 1) / (HALVES * 4);
const int span = (stages + SPANS - 1) / SPANS;
const int first_output = int(threadgroup_position_in_grid.x) * OWN;
const int first_stage = warp * EACH * span, turns = EACH * span;

// Rows of weights beyond the last are read as the last, and their products thrown away.
const DEVICE uint4* lines[LINES];
#pragma unroll
for (int i = 0; i < LINES; ++i) {
  const int line = i * 8 + up, output = first_output + line % OWN;
  const int row = (output < outputs ? output : outputs - 1) + line / OWN * outputs;
  lines[i] = (const DEVICE uint4*)weight + (size_t)row * chunks + across;
}
const DEVICE uint4* own = (const DEVICE uint4*)given + (size_t)up * chunks + across;

uint4 held[DEPTH][LINES * HALVES];
#define FETCH(to, stage)                                                                                                 \
  _Pragma("unroll") for (int i = 0; i < LINES * HALVES; ++i) {                                                           \
    const int chunk = ((stage) * HALVES + i % HALVES) * 4;                                                               \
    held[to][i] = ALIGNED || chunk + across < chunks ? pass_by(lines[i / HALVES] + chunk) : no_bits();                   \
  }

constexpr int AHEAD = EIGHTS * HALVES <= 4 && DEPTH % 2 == 0 ? 2 : 1;
uint4 met[AHEAD][EIGHTS * HALVES];
#define MEET(to, stage)                                                                                                  \
  _Pragma("unroll") for (int i = 0; i < EIGHTS * HALVES; ++i) {                                                          \
    const int chunk = ((stage) * HALVES + i % HALVES) * 4, row = i / HALVES * 8;                                         \
    const bool there = row + up < rows && (ALIGNED || chunk + across < chunks);                                          \
    met[to][i] = there ? own[(size_t)row * chunks + chunk] : no_bits();                                                  \
  }

float sums[SUMS];
Spans<EACH, SUMS> spans;
spans.begin(sums);
#define MULTIPLY(from, side)                                                                                             \
  _Pragma("unroll") for (int half = 0; half < HALVES; ++half) {                                                          \
    _Pragma("unroll") for (int e = 0; e < EIGHTS; ++e) {                                                                 \
      const uint4 x = met[side][e * HALVES + half];                                                                      \
      _Pragma("unroll") for (int tile = 0; tile < TILES; ++tile) {                                                       \
        const uint4 high = held[from][tile * 2 * HALVES + half], low = held[from][(tile * 2 + 1) * HALVES + half];       \
        LOCAL float* const to = sums + (tile * EIGHTS + e) * 4;                                                          \
        multiply_tiles<T>(to, high.x, low.x, high.y, low.y, x.x, x.y);                                                   \
        multiply_tiles<T>(to, high.z, low.z, high.w, low.w, x.z, x.w);                                                   \
      }                                                                                                                  \
    }                                                                                                                    \
  }

#pragma unroll
for (int d = 0; d < DEPTH; ++d) {
  if (EVEN || (d < turns && first_stage + d < stages)) {
    FETCH(d, first_stage + d)
  }
}
AFTER_OTHERS()
if (AHEAD > 1 && first_stage < stages) {
  MEET(0, first_stage)
}
int left = span;
for (int turn = 0; turn < turns; turn += DEPTH) {
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int stage = first_stage + turn + d;
    const bool is_turn = EVEN || turn + d < turns;
    if (EVEN || (is_turn && stage < stages)) {
      if (AHEAD == 1) {
        MEET(0, stage)
      } else if (turn + d + 1 < turns && (EVEN || stage + 1 < stages)) {
        MEET((d + 1) % AHEAD, stage + 1)
      }
      MULTIPLY(d, d % AHEAD)
      if (turn + d + DEPTH < turns && (EVEN || stage + DEPTH < stages)) {
        FETCH(d, stage + DEPTH)
      }
    }
    if (EACH > 1 && is_turn && --left == 0) {
      spans.end(sums);
      left = span;
    }
  }
}
#undef FETCH
#undef MEET
#undef MULTIPLY

#pragma unroll
for (int i = 0; i < SUMS; ++i) {
  const int output = i / (EIGHTS * 4) * 16 + i / 2 % 2 * 8 + up, row = i / 4 % EIGHTS * 8 + across * 2 + i % 2;
  found[(warp * EIGHTS * 8 + row) * PITCH + output] = sums[i];
}
group_barrier();
for (int i = warp * 32 + lane; i < rows * OWN; i += WARPS * 32) {
  const int row = i / OWN, output = first_output + i % OWN;
  const SHARED float* const own_sums = found + row * PITCH + i % OWN;
  if (output < outputs) {
    float sum = Pairwise<WARPS>::sum(own_sums, EIGHTS * 8 * PITCH);
    const size_t at = (size_t)row * outputs + output;
#ifdef BIASED
    sum += float(bias[output]);
#endif
#ifdef ADDED
    sum = float(T(sum)) + float(residual[at]);
#endif
#ifdef GATED
    y[at] = gated(T(sum), T(Pairwise<WARPS>::sum(own_sums + OWN, EIGHTS * 8 * PITCH)));
#else
    y[at] = T(sum);
#endif
  }
}
