// One threadgroup: products of up to EIGHTS * 8 rows with BESIDE * TILES * 16 rows of weights, by matrix units.
//
// Columns are cut into SPANS spans. A span is summed from its first column to its last, then neighbouring spans are added,
// then neighbouring sums, until one is left: how a product is summed depends on nothing but its columns, so that a row's bits
// do not depend on how many rows there are. SHARERS warps share the spans, and BESIDE times as many take other outputs. Where
// outputs are few, SPLIT threadgroups share the spans first.
//
// Four lanes hold 32 columns of a row of weights, as they lie in memory, and the same columns of a row of activations: which
// column is which of a matrix unit's is free as long as it is the same for both. A stage is HALVES * 32 columns; DEPTH stages
// of weights are on their way to the registers of each warp. Activations come to registers, too, a stage ahead; or, where they
// are many, to shared memory, which holds SLOTS stages of them, for all warps that take the same columns.
//
// given [rows, columns], weight [outputs, columns] -> y [rows, outputs]
// BIASED: bias [outputs] is added before rounding. ADDED: residual [rows, outputs] is added to what was rounded.
// GATED: weight [2 * outputs, columns], of a gate and what it lets pass; a threadgroup takes half of its rows from each.
// PARTED: -> y [SPLIT, rows, outputs], sums that are still to be joined.
constexpr int LINES = TILES * 2;  // rows of weights that a lane holds numbers of
constexpr int OUTS = BESIDE * TILES * 16;
#ifdef GATED
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
constexpr int OWN = OUTS / PARTS;
constexpr int PITCH = OUTS + 4;                  // so that lanes write to different banks
constexpr int EACH = SPANS / (SHARERS * SPLIT);  // spans of a warp
static_assert(EACH * SHARERS * SPLIT == SPANS, "warps have as many spans each");
static_assert(SLOTS == 0 || SLOTS == 2 || SLOTS == 4, "stages are counted off by powers of two");
constexpr int SUMS = TILES * EIGHTS * 4;
constexpr int SLOT = EIGHTS * HALVES * 32 * 4;
constexpr int BLOCK = SHARERS * 8 * PITCH;  // sums of eight rows
constexpr int MOST = 12288;                 // that a threadgroup may have of shared memory
constexpr int AT_ONCE = EIGHTS * BLOCK <= MOST ? EIGHTS : EIGHTS * BLOCK <= 2 * MOST ? EIGHTS / 2 : EIGHTS / 4;
constexpr int FOUND = AT_ONCE * BLOCK, MET = SHARERS * SLOTS * SLOT;
SHARED_FLOATS(found, FOUND > MET ? FOUND : MET);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int share = warp / BESIDE, beside = warp % BESIDE;
const int rows = given_shape[0], outputs = weight_shape[0] / PARTS, chunks = weight_shape[1] / 8;
const int stages = (chunks + HALVES * 4 - 1) / (HALVES * 4);
const int span = ((chunks + 7) / 8 + SPANS - 1) / SPANS * (2 / HALVES);
const int part = int(threadgroup_position_in_grid.x) % SPLIT;
const int first_output = int(threadgroup_position_in_grid.x) / SPLIT * OWN;
const int first_stage = (part * SHARERS + share) * EACH * span, turns = EACH * span;

// Rows of weights beyond the last are read as the last, and their products thrown away.
const DEVICE uint4* lines[LINES];
#pragma unroll
for (int i = 0; i < LINES; ++i) {
  const int line = beside * TILES * 16 + i * 8 + up, output = first_output + line % OWN;
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

// Each lane fetches what stands where its own numbers do, so that whoever is that lane finds it there. Nothing is on its way
// to shared memory behind the last turn: sums lie there then.
constexpr int AHEAD = EIGHTS * HALVES <= 4 && DEPTH % 2 == 0 ? 2 : 1;
uint4 met[AHEAD][SLOTS > 0 ? 1 : EIGHTS * HALVES];
SHARED float* const slots = found + (share * SLOTS * SLOT + lane * 4);
#define MEET(to, stage)                                                                                                  \
  _Pragma("unroll") for (int i = 0; i < EIGHTS * HALVES; ++i) {                                                          \
    const int chunk = ((stage) * HALVES + i % HALVES) * 4, row = i / HALVES * 8;                                         \
    const bool there = row + up < rows && (ALIGNED || chunk + across < chunks);                                          \
    met[to][SLOTS > 0 ? 0 : i] = there ? own[(size_t)row * chunks + chunk] : no_bits();                                  \
  }
#define SHARE(to, turn)                                                                                                  \
  _Pragma("unroll") for (int i = 0; i < EIGHTS * HALVES && (turn) < turns; i += BESIDE) {                                \
    const int mine = i + beside, row = mine / HALVES * 8;                                                               \
    const int chunk = ((first_stage + (turn)) * HALVES + mine % HALVES) * 4;                                             \
    const bool there = row + up < rows && chunk + across < chunks;                                                       \
    if (EIGHTS * HALVES % BESIDE == 0 || mine < EIGHTS * HALVES) {                                                       \
      copy_chunk(slots + (to) * SLOT + mine * 128, there ? own + ((size_t)row * chunks + chunk) : own, there);           \
    }                                                                                                                    \
  }                                                                                                                      \
  end_copies();

float sums[SUMS];
Spans<EACH, SUMS> spans;
spans.begin(sums);
#define MULTIPLY(from, slot)                                                                                             \
  _Pragma("unroll") for (int half = 0; half < HALVES; ++half) {                                                          \
    _Pragma("unroll") for (int e = 0; e < EIGHTS; ++e) {                                                                 \
      const int number = e * HALVES + half;                                                                              \
      const uint4 x = SLOTS > 0 ? *(const SHARED uint4*)(slots + (slot) * SLOT + number * 128)                           \
                                : met[SLOTS > 0 ? 0 : (slot)][SLOTS > 0 ? 0 : number];                                   \
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
if (SLOTS > 0) {
#pragma unroll
  for (int s = 0; s + 1 < SLOTS; ++s) {
    SHARE(s, s)
  }
} else if (AHEAD > 1 && first_stage < stages) {
  MEET(0, first_stage)
}
int left = span;
for (int turn = 0; turn < turns; turn += DEPTH) {
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int stage = first_stage + turn + d;
    const bool is_turn = EVEN || turn + d < turns, is_stage = EVEN || (is_turn && stage < stages);
    if (SLOTS > 0 && is_turn) {
      wait_for_copies<SLOTS == 4 ? 2 : 0>();
      if (BESIDE > 1) group_barrier();
      SHARE((turn + d + SLOTS - 1) & (SLOTS - 1), turn + d + SLOTS - 1)
    }
    if (is_stage) {
      if (SLOTS == 0) {
        if (AHEAD == 1) {
          MEET(0, stage)
        } else if (turn + d + 1 < turns && (EVEN || stage + 1 < stages)) {
          MEET((d + 1) % AHEAD, stage + 1)
        }
      }
      MULTIPLY(d, SLOTS > 0 ? (turn + d) & (SLOTS - 1) : d % AHEAD)
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
#undef SHARE
#undef MULTIPLY

#pragma unroll
for (int begin = 0; begin < EIGHTS; begin += AT_ONCE) {
  if (SLOTS > 0 || begin > 0) group_barrier();  // sums lie where activations lay, or sums before
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int output = i / (EIGHTS * 4) * 16 + i / 2 % 2 * 8 + up, eight = i / 4 % EIGHTS - begin;
    if (eight >= 0 && eight < AT_ONCE) {
      const int row = eight * 8 + across * 2 + i % 2;
      found[(share * AT_ONCE * 8 + row) * PITCH + beside * TILES * 16 + output] = sums[i];
    }
  }
  group_barrier();
  const int end_row = (begin + AT_ONCE) * 8 < rows ? AT_ONCE * 8 : rows - begin * 8;
  for (int i = warp * 32 + lane; i < end_row * OWN; i += SHARERS * BESIDE * 32) {
    const int row = i / OWN, output = first_output + i % OWN;
    const SHARED float* const own_sums = found + row * PITCH + i % OWN;
    if (output < outputs) {
      float sum = Pairwise<SHARERS>::sum(own_sums, AT_ONCE * 8 * PITCH);
      const size_t at = (size_t)(begin * 8 + row) * outputs + output;
#ifdef BIASED
      sum += float(bias[output]);
#endif
#ifdef ADDED
      sum = float(T(sum)) + float(residual[at]);
#endif
#ifdef GATED
      y[at] = gated(T(sum), T(Pairwise<SHARERS>::sum(own_sums + OWN, AT_ONCE * 8 * PITCH)));
#elif defined(PARTED)
      y[(size_t)part * rows * outputs + at] = sum;
#else
      y[at] = T(sum);
#endif
    }
  }
}
