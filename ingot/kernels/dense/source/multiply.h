// One threadgroup: products of up to EIGHTS * 8 rows with BESIDE * TILES * 16 rows of weights, by matrix units.
//
// Columns are cut into SPANS spans. A span is summed from its first column to its last, then neighbouring spans are added,
// then neighbouring sums, until one is left: how a product is summed depends on nothing but its columns, so that a row's bits
// do not depend on how many rows there are. SHARERS warps share the spans, and BESIDE times as many take other outputs.
//
// Four lanes hold 32 columns of a row of weights, as they lie in memory, and the same columns of a row of activations: which
// column is which of a matrix unit's is free as long as it is the same for both. A stage is HALVES * 32 columns; DEPTH stages
// of weights are on their way to each warp: to registers, or with a RING to shared memory, where each lane reads what it copied
// itself, so that nobody waits for others.
//
// given [rows, columns], weight [outputs, columns] -> y [rows, outputs]
// BIASED: bias [outputs] is added before rounding. ADDED: residual [rows, outputs] is added to what was rounded.
// GATED: weight [2 * outputs, columns], of a gate and what it lets pass; a threadgroup takes half of its rows from each.
constexpr int LINES = TILES * 2;  // rows of weights that a lane holds numbers of
constexpr int OUTS = BESIDE * TILES * 16;
#ifdef GATED
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
constexpr int OWN = OUTS / PARTS;
constexpr int PITCH = OUTS + 4;        // so that lanes write to different banks
constexpr int EACH = SPANS / SHARERS;  // spans of a warp
static_assert(SPANS % SHARERS == 0 && EACH <= 4, "a warp has one, two or four spans");
constexpr int TURNS = RING ? 2 : DEPTH;  // stages that are written out one behind another
constexpr int SUMS = TILES * EIGHTS * 4;
constexpr int SLOT = LINES * HALVES * 32 * 4;  // of the ring: a stage of a warp
constexpr int BLOCK = SHARERS * 8 * PITCH;  // sums of eight rows
constexpr int AT_ONCE = EIGHTS > 1 && EIGHTS * BLOCK > 12288 ? EIGHTS / 2 : EIGHTS;  // eights that there is room for
constexpr int FOUND = AT_ONCE * BLOCK, ON_THEIR_WAY = RING ? SHARERS * BESIDE * DEPTH * SLOT : 0;
SHARED_FLOATS(found, FOUND > ON_THEIR_WAY ? FOUND : ON_THEIR_WAY);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int share = warp / BESIDE, beside = warp % BESIDE;
const int rows = given_shape[0], outputs = weight_shape[0] / PARTS, chunks = weight_shape[1] / 8;
const int stages = (chunks + HALVES * 4 - 1) / (HALVES * 4);
const int span = ((chunks + 7) / 8 + SPANS - 1) / SPANS * (2 / HALVES);
const int first_output = int(threadgroup_position_in_grid.x) * OWN;
const int first_stage = share * EACH * span;
const int end_stage = first_stage + EACH * span < stages ? first_stage + EACH * span : stages;

// Rows of weights beyond the last are read as the last, and their products thrown away.
const DEVICE uint4* lines[LINES];
#pragma unroll
for (int i = 0; i < LINES; ++i) {
  const int line = beside * TILES * 16 + i * 8 + up, output = first_output + line % OWN;
  const int row = (output < outputs ? output : outputs - 1) + line / OWN * outputs;
  lines[i] = (const DEVICE uint4*)weight + (size_t)row * chunks + across;
}
const DEVICE uint4* own = (const DEVICE uint4*)given + (size_t)up * chunks + across;

uint4 held[RING ? 1 : DEPTH][LINES * HALVES];
SHARED float* const ring = found + (warp * DEPTH * SLOT + lane * 4);
#define FETCH(to, stage)                                                                                                 \
  _Pragma("unroll") for (int i = 0; i < LINES * HALVES; ++i) {                                                           \
    const int chunk = (stage) * HALVES * 4 + i % HALVES * 4;                                                             \
    const bool there = ALIGNED || chunk + across < chunks;                                                               \
    if (RING) copy_chunk(ring + (to) * SLOT + i * 128, lines[i / HALVES] + (there ? chunk : 0), there);                  \
    else held[RING ? 0 : (to)][i] = there ? pass_by(lines[i / HALVES] + chunk) : no_bits();                              \
  }
// What was fetched, where it is multiplied from.
#define TAKE(from)                                                                                                       \
  if (RING) {                                                                                                            \
    wait_for_copies<DEPTH - 1>();                                                                                        \
    _Pragma("unroll") for (int i = 0; i < LINES * HALVES; ++i) {                                                         \
      held[0][i] = *(const SHARED uint4*)(ring + (from) * SLOT + i * 128);                                               \
    }                                                                                                                    \
  }

// Activations are few, and near: the next stage's are enough, or none where registers are dear.
constexpr int AHEAD = EIGHTS * HALVES <= 4 && TURNS % 2 == 0 ? 2 : 1;
uint4 met[AHEAD][EIGHTS * HALVES];
#define MEET(to, stage)                                                                                                  \
  _Pragma("unroll") for (int i = 0; i < EIGHTS * HALVES; ++i) {                                                          \
    const int chunk = (stage) * HALVES * 4 + i % HALVES * 4, row = i / HALVES * 8;                                       \
    const bool there = row + up < rows && (ALIGNED || chunk + across < chunks);                                          \
    met[to][i] = there ? come_by(own + (size_t)row * chunks + chunk) : no_bits();                                        \
  }

float sums[SUMS], kept[EACH > 1 ? SUMS : 1], kept_before[EACH > 2 ? SUMS : 1];
#pragma unroll
for (int i = 0; i < SUMS; ++i) {
  sums[i] = 0.0f;
}

#define MULTIPLY(from, with)                                                                                             \
  _Pragma("unroll") for (int half = 0; half < HALVES; ++half) {                                                          \
    _Pragma("unroll") for (int e = 0; e < EIGHTS; ++e) {                                                                 \
      _Pragma("unroll") for (int tile = 0; tile < TILES; ++tile) {                                                       \
        const uint4 high = held[from][tile * 2 * HALVES + half], low = held[from][(tile * 2 + 1) * HALVES + half];       \
        const uint4 x = met[with][e * HALVES + half];                                                                    \
        multiply_tiles<T>(sums + (tile * EIGHTS + e) * 4, high.x, low.x, high.y, low.y, x.x, x.y);                       \
      }                                                                                                                  \
    }                                                                                                                    \
    _Pragma("unroll") for (int e = 0; e < EIGHTS; ++e) {                                                                 \
      _Pragma("unroll") for (int tile = 0; tile < TILES; ++tile) {                                                       \
        const uint4 high = held[from][tile * 2 * HALVES + half], low = held[from][(tile * 2 + 1) * HALVES + half];       \
        const uint4 x = met[with][e * HALVES + half];                                                                    \
        multiply_tiles<T>(sums + (tile * EIGHTS + e) * 4, high.z, low.z, high.w, low.w, x.z, x.w);                       \
      }                                                                                                                  \
    }                                                                                                                    \
  }

// A span has ended: it is added to its neighbour, or kept for that.
int ended = 0, left = span;
#define END_SPAN                                                                                                         \
  {                                                                                                                      \
    _Pragma("unroll") for (int i = 0; i < SUMS; ++i) {                                                                   \
      if (ended % 2 == 1) {                                                                                              \
        sums[i] = kept[EACH > 1 ? i : 0] + sums[i];                                                                      \
        if (EACH > 2 && ended % 4 == 3) sums[i] = kept_before[EACH > 2 ? i : 0] + sums[i];                               \
        if (EACH > 2 && ended % 4 == 1) kept_before[EACH > 2 ? i : 0] = sums[i];                                         \
      } else {                                                                                                           \
        kept[EACH > 1 ? i : 0] = sums[i];                                                                                \
      }                                                                                                                  \
      if (ended + 1 < EACH) sums[i] = 0.0f;                                                                              \
    }                                                                                                                    \
    ++ended;                                                                                                             \
    left = span;                                                                                                         \
  }

if (AHEAD > 1 && first_stage < end_stage) {
  MEET(0, first_stage)
}
#pragma unroll
for (int d = 0; d < DEPTH; ++d) {
  if (first_stage + d < end_stage) {
    FETCH(d, first_stage + d)
  }
  if (RING) end_copies();
}
int slot = 0;
for (int stage = first_stage; stage < end_stage; stage += TURNS) {
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int now = stage + turn;
    if (EVEN || now < end_stage) {
      TAKE(slot)
      if (AHEAD == 1) {
        MEET(0, now)
      } else if (now + 1 < end_stage) {
        MEET((turn + 1) % AHEAD, now + 1)
      }
      MULTIPLY(RING ? 0 : turn, turn % AHEAD)
      if (now + DEPTH < end_stage) {
        FETCH(RING ? slot : turn, now + DEPTH)
      }
      if (RING) {
        end_copies();
        slot = slot + 1 < DEPTH ? slot + 1 : 0;
      }
      if (EACH > 1 && --left == 0) END_SPAN
    }
  }
}
if (EACH > 1) {
  while (ended < EACH) END_SPAN
}
#undef FETCH
#undef TAKE
#undef MEET
#undef MULTIPLY
#undef END_SPAN

#pragma unroll
for (int begin = 0; begin < EIGHTS; begin += AT_ONCE) {
  if (RING || begin > 0) group_barrier();  // sums lie where others' weights lay, or sums before
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
#else
      y[at] = T(sum);
#endif
    }
  }
}
