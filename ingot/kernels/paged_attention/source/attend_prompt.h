// What `attend` does, for many queries a row, by matrix units: one threadgroup takes queries of one row that share a head of
// keys and values, sixteen a warp, and goes through all places that they see, block by block, the next block on its way while
// one is looked at. Blocks begin at the same places for whoever asks, so that a query's bits depend on its row alone. Where
// that makes too few threadgroups for the device, each row is cut into as many splits as the grid says, to be merged.
// Which of a key's numbers is which of a product's is free, as long as it is the same for queries and keys.
//
// queries [tokens, heads, KEY_SIZE], numbers [2 + heads], table [...], rows [rows, 6], after [1] -> partial [tokens, heads,
// splits, VALUE_SIZE + 4], or with one split -> attended [tokens, heads, VALUE_SIZE]
constexpr int QUERIES = WARPS * 16;
constexpr int KEY_LINE = (KEY_SIZE + 63) / 64 * 64;  // in memory that is shared: whole turns over its banks
constexpr int VALUE_LINE = (VALUE_SIZE + 63) / 64 * 64;
constexpr int KEY_PARTS = (KEY_SIZE + 31) / 32;  // of a key: four lanes hold eight numbers each
constexpr int TILES = BLOCK / 8;
constexpr int COLUMNS = VALUE_SIZE / 8;
constexpr int STAGE = BLOCK * (KEY_LINE + VALUE_LINE);
constexpr int HEADS = KV_HEADS * GROUP;
constexpr bool HELD = KEY_SIZE <= 128;  // queries stay in registers
SHARED_FLOATS(staged, STAGE);           // two of them, of numbers of 16 bits

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int thread = warp * 32 + lane;
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int length = rows[row * 6], first_page = rows[row * 6 + 1], first_query = rows[row * 6 + 2];
const int count = rows[row * 6 + 3], first_entry = rows[row * 6 + 4];
const int chunks = (rows[row * 6 + 5] * GROUP + QUERIES - 1) / QUERIES;
const int splits = int(threadgroups_per_grid.x) / chunks, split = int(threadgroup_position_in_grid.x) / chunks;
// The last queries, which see most, come first.
const int chunk = (count * GROUP + QUERIES - 1) / QUERIES - 1 - int(threadgroup_position_in_grid.x) % chunks;
if (chunk < 0) {
  return;
}

// A query sees the places before its limit, and no more than its window.
const int mine = chunk * QUERIES + warp * 16;  // this warp's first query
const int before = length - count + 1;
const int last = count * GROUP - 1;
const int warp_least = before + (mine < last ? mine : last) / GROUP;
const int warp_most = before + (mine + 15 < last ? mine + 15 : last) / GROUP;
const int group_last = chunk * QUERIES + QUERIES - 1;
const int seen = before + (group_last < last ? group_last : last) / GROUP;
const int least = before + chunk * QUERIES / GROUP - WINDOW;
const int first = WINDOW > 0 && least > 0 ? least / BLOCK * BLOCK : 0;
const int each = splits > 1 ? (length + splits * BLOCK - 1) / (splits * BLOCK) * BLOCK : length;  // places of a split
const int begin = first > split * each ? first : split * each;
const int end = splits > 1 && seen > (split + 1) * each ? (split + 1) * each : seen;

#define ASK_FOR_LINES(to, page, size, line, turn)                                                                     \
  _Pragma("unroll") for (int i = 0; i < (BLOCK * line / 8 + WARPS * 32 - 1) / (WARPS * 32); ++i) {                    \
    const int piece = thread + i * WARPS * 32, key = piece / (line / 8), part = piece % (line / 8);                   \
    if (piece < BLOCK * line / 8) {                                                                                   \
      const bool there = asked + key < length && part * 8 < size;                                                     \
      copy_chunk((SHARED float*)(to + key * line + (part ^ (turn)) * 8), page + (there ? key * size + part * 8 : 0), there);     \
    }                                                                                                                 \
  }
#define ASK_FOR_BLOCK(at, stage)                                                            \
  {                                                                                         \
    const int asked = (at);                                                                 \
    const int entry = table[first_entry + asked / PAGE - first_page];                       \
    SHARED T* to = (SHARED T*)staged + (stage) * STAGE;                                     \
    const DEVICE T* page;                                                                   \
    FIND_KEYS(page, entry, head)                                                            \
    page += asked % PAGE * KEY_SIZE;                                                        \
    ASK_FOR_LINES(to, page, KEY_SIZE, KEY_LINE, key % 2 * 4)                                \
    FIND_VALUES(page, entry, head)                                                          \
    page += asked % PAGE * VALUE_SIZE;                                                      \
    ASK_FOR_LINES(to + BLOCK * KEY_LINE, page, VALUE_SIZE, VALUE_LINE, key % 8)             \
  }
#define LOAD_QUERY(into, i)                                                                                       \
  {                                                                                                               \
    const int query = mine + up + (i) % 2 * 8, column = (i) / 2 * 32 + across * 8;                                \
    clear_eight(into);                                                                                            \
    if (query <= last && column < KEY_SIZE) {                                                                     \
      const int token = first_query + query / GROUP;                                                              \
      load_eight(into, queries + ((size_t)token * HEADS + head * GROUP + query % GROUP) * KEY_SIZE + column);     \
    }                                                                                                             \
  }

if (begin < end) {
  ASK_FOR_BLOCK(begin, 0)
}
end_copies();
Eight<T> q[HELD ? KEY_PARTS * 2 : 1];
if (HELD) {
#pragma unroll
  for (int i = 0; i < KEY_PARTS * 2; ++i) {
    LOAD_QUERY(q[HELD ? i : 0], i)
  }
}
float sums[COLUMNS * 4];
#pragma unroll
for (int i = 0; i < COLUMNS * 4; ++i) {
  sums[i] = 0.0f;
}
float largest[2], totals[2];
largest[0] = largest[1] = nothing();
totals[0] = totals[1] = 0.0f;

int stage = 0;
for (int at = begin; at < end; at += BLOCK) {
  if (at + BLOCK < end) {
    ASK_FOR_BLOCK(at + BLOCK, 1 - stage)
  }
  end_copies();
  wait_for_copies<1>();
  group_barrier();
  if (at < warp_most && (WINDOW == 0 || at + BLOCK > warp_least - WINDOW)) {
    const SHARED T* keys_here = (const SHARED T*)staged + stage * STAGE;
    const SHARED T* values_here = keys_here + BLOCK * KEY_LINE;
    float scores[TILES * 4];
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
      scores[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < KEY_PARTS; ++i) {
      Eight<T> one, two;
      if (HELD) {
        one = q[HELD ? i * 2 : 0];
        two = q[HELD ? i * 2 + 1 : 0];
      } else {
        LOAD_QUERY(one, i * 2)
        LOAD_QUERY(two, i * 2 + 1)
      }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const SHARED T* key = keys_here + (tile * 8 + up) * KEY_LINE + ((i * 4 + across) ^ (up % 2 * 4)) * 8;
        const uint4 eight = *(const SHARED uint4*)key;
        multiply_tiles<T>(scores + tile * 4, one.raw.x, two.raw.x, one.raw.y, two.raw.y, eight.x, eight.y);
        multiply_tiles<T>(scores + tile * 4, one.raw.z, two.raw.z, one.raw.w, two.raw.w, eight.z, eight.w);
      }
    }
    const bool all_seen = at + BLOCK <= warp_least && (WINDOW == 0 || at >= warp_most - WINDOW);
    float high[2];
    high[0] = high[1] = nothing();
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
      const int half = i / 2 % 2, place = at + i / 4 * 8 + across * 2 + i % 2;
      float score = scores[i] * numbers[0];
      score = CAPPED ? numbers[1] * tangent(score) : score;
      if (!all_seen) {
        const int limit = before + (mine + up + half * 8) / GROUP;
        score = place < limit && (WINDOW == 0 || place >= limit - WINDOW) ? score : nothing();
      }
      scores[i] = score;
      high[half] = larger(high[half], score);
    }
    // Weights are rounded as the units take them, and so is their sum.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      high[half] = larger(high[half], shuffle_xor(high[half], 1));
      high[half] = larger(high[half], shuffle_xor(high[half], 2));
      high[half] = larger(high[half], largest[half]);
      const float over = high[half] > nothing() ? high[half] : 0.0f;
      const float factor = power_of_two(largest[half] - over);
      largest[half] = high[half];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < TILES * 2; ++i) {
        const int of = i / 2 * 4 + half * 2 + i % 2;
        scores[of] = float(T(power_of_two(scores[of] - over)));
        sum += scores[of];
      }
      totals[half] = multiply_add(totals[half], factor, sum);
      if (factor != 1.0f) {
#pragma unroll
        for (int i = 0; i < COLUMNS * 2; ++i) {
          sums[i / 2 * 4 + half * 2 + i % 2] *= factor;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < BLOCK / 16; ++step) {
      unsigned int w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const LOCAL float* pair = scores + (step * 2 + i / 2) * 4 + i % 2 * 2;
        w[i] = two_of<T>(pair[0], pair[1]);
      }
      const int key = step * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) {
        unsigned int v[4];
        load_turned_tiles(v, (const SHARED float*)(values_here + key * VALUE_LINE + ((i * 2 + lane / 16) ^ (key % 8)) * 8));
        multiply_tiles<T>(sums + i * 8, w[0], w[1], w[2], w[3], v[0], v[1]);
        multiply_tiles<T>(sums + i * 8 + 4, w[0], w[1], w[2], w[3], v[2], v[3]);
      }
    }
  }
  group_barrier();
  stage = 1 - stage;
}
#undef ASK_FOR_LINES
#undef ASK_FOR_BLOCK
#undef LOAD_QUERY

#pragma unroll
for (int half = 0; half < 2; ++half) {
  const int query = mine + up + half * 8;
  float total = totals[half] + shuffle_xor(totals[half], 1);
  total += shuffle_xor(total, 2);
  if (splits > 1) {
    if (query <= last) {
      const size_t token = first_query + query / GROUP;
      DEVICE float* out =
          partial + ((token * HEADS + head * GROUP + query % GROUP) * splits + split) * (VALUE_SIZE + 4) + across * 2;
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        out[i * 8] = sums[i * 4 + half * 2];
        out[i * 8 + 1] = sums[i * 4 + half * 2 + 1];
      }
      if (across == 0) {
        out[VALUE_SIZE] = largest[half];
        out[VALUE_SIZE + 1] = total;
      }
    }
    continue;
  }
  float factor = 1.0f;
  if (SINKS) {
    const float sink = numbers[2 + head * GROUP + query % GROUP], most = larger(sink, largest[half]);
    factor = power_of_two(largest[half] - most);
    total = multiply_add(total, factor, power_of_two(sink - most));
  }
  factor = factor / total;
  if (query <= last) {
    const int token = first_query + query / GROUP;
    DEVICE T* out = attended + ((size_t)token * HEADS + head * GROUP + query % GROUP) * VALUE_SIZE + across * 2;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      *(DEVICE unsigned int*)(out + i * 8) = two_of<T>(sums[i * 4 + half * 2] * factor, sums[i * 4 + half * 2 + 1] * factor);
    }
  }
}
