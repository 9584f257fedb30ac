// What `attend` does, by matrix units: one threadgroup takes sixteen queries of one row that share a head of keys and values,
// over one stretch of places. Numbers of 16 bits go from memory into the units as they lie. Which of a key's numbers is which
// of a product's is free, as long as it is the same for queries and keys; and so is which of a value's is which column.
//
// queries [tokens, heads, KEY_SIZE], numbers [2 + heads], table [...], rows [rows, 6], after [1] -> partial [tokens, heads,
// stretches, VALUE_SIZE + 4]
constexpr int MOST = 16;
constexpr int KEY_PARTS = (KEY_SIZE + 31) / 32;     // of a key: four lanes hold eight numbers each
constexpr int VALUE_PARTS = (VALUE_SIZE + 63) / 64;  // of a value: eight lanes hold eight numbers each
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int LINE = STRETCH + 8;  // of a query's weights: rows of them begin in other banks of memory
constexpr int SHARED_SIZE = LINE > VALUE_SIZE ? LINE : VALUE_SIZE;
SHARED_FLOATS(weights, MOST * SHARED_SIZE);
SHARED_FLOATS(totals, MOST * 2);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int length = rows[row * 6], first_page = rows[row * 6 + 1], first_query = rows[row * 6 + 2];
const int count = rows[row * 6 + 3], first_entry = rows[row * 6 + 4];
const int chunks = (rows[row * 6 + 5] * GROUP + MOST - 1) / MOST;
const int chunk = int(threadgroup_position_in_grid.x) % chunks;
const int stretches = int(threadgroups_per_grid.x) / chunks;

// Places are counted from the stretch's begin, from here on.
const int least = WINDOW > 0 && length - count + 1 > WINDOW ? length - count + 1 - WINDOW : 0;
const int number = int(threadgroup_position_in_grid.x) / chunks;
const int begin = (least / STRETCH + number) * STRETCH;
const int from = least > begin ? least - begin : 0;
const int to = length - begin < STRETCH ? length - begin : STRETCH;
if (from >= to || chunk * MOST >= count * GROUP) {
  return;
}

// Scores: a warp takes eight keys at a time.
{
  Eight<T> q[KEY_PARTS * 2];
#pragma unroll
  for (int i = 0; i < KEY_PARTS * 2; ++i) {
    const int query = chunk * MOST + up + i % 2 * 8, column = i / 2 * 32 + across * 8;
    clear_eight(q[i]);
    if (query < count * GROUP && column < KEY_SIZE) {
      const int token = first_query + query / GROUP;
      load_eight(q[i], queries + ((size_t)token * HEADS + head * GROUP + query % GROUP) * KEY_SIZE + column);
    }
  }
  Eight<T> ahead[KEY_PARTS];
#define FETCH_KEY(key)                                                                               \
  _Pragma("unroll") for (int i = 0; i < KEY_PARTS; ++i) {                                            \
    clear_eight(ahead[i]);                                                                           \
  }                                                                                                  \
  if ((key) >= from && (key) < to) {                                                                 \
    const int place = begin + (key);                                                                 \
    const DEVICE T* page;                                                                            \
    FIND_KEYS(page, table[first_entry + place / PAGE - first_page], head)                            \
    _Pragma("unroll") for (int i = 0; i < KEY_PARTS; ++i) {                                          \
      if (i * 32 + across * 8 < KEY_SIZE) {                                                          \
        load_eight(ahead[i], page + place % PAGE * KEY_SIZE + i * 32 + across * 8);                  \
      }                                                                                              \
    }                                                                                                \
  }
  const int skipped = from / (WARPS * 8) * (WARPS * 8) + warp * 8;
  FETCH_KEY(skipped + up)
  for (int at = skipped; at < to; at += WARPS * 8) {
    Eight<T> now[KEY_PARTS];
#pragma unroll
    for (int i = 0; i < KEY_PARTS; ++i) {
      now[i] = ahead[i];
    }
    FETCH_KEY(at + WARPS * 8 + up)
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < KEY_PARTS; ++i) {
      const uint4 high = q[i * 2].raw, low = q[i * 2 + 1].raw, key = now[i].raw;
      multiply_tiles<T>(sums, high.x, low.x, high.y, low.y, key.x, key.y);
      multiply_tiles<T>(sums, high.z, low.z, high.w, low.w, key.z, key.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = up + i / 2 * 8, key = at + across * 2 + i % 2;
      if (key < to) {
        // A query sees what comes before those after it, and no more than its window.
        const int limit = length - count + 1 + (chunk * MOST + m) / GROUP - begin;
        const bool seen = key < limit && key >= from && (WINDOW == 0 || key >= limit - WINDOW);
        const float score = sums[i] * numbers[0];
        weights[m * LINE + key] = !seen ? nothing() : CAPPED ? numbers[1] * tangent(score) : score;
      }
    }
  }
#undef FETCH_KEY
}
group_barrier();

// Weights: a warp takes whole queries. They are rounded as the units take them, and so is their sum.
for (int m = warp; m < MOST; m += WARPS) {
  SHARED float* scores = weights + m * LINE;
  float largest = nothing();
  for (int key = from / 32 * 32 + lane; key < to; key += 32) {
    largest = key >= from ? larger(largest, scores[key]) : largest;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = larger(largest, shuffle_xor(largest, step));
  }
  float sum = 0.0f;
  for (int key = from / 32 * 32 + lane; key < (to + 31) / 32 * 32; key += 32) {
    const bool seen = key >= from && key < to && largest > nothing();
    const float weight = seen ? float(T(power_of_two(scores[key] - largest))) : 0.0f;
    scores[key] = weight;
    sum += weight;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum += shuffle_xor(sum, step);
  }
  if (lane == 0) {
    totals[m * 2] = largest;
    totals[m * 2 + 1] = sum;
  }
}
group_barrier();

// Values: a warp takes sixteen at a time, four of them a lane.
float sums[VALUE_PARTS * 32];
#pragma unroll
for (int i = 0; i < VALUE_PARTS * 32; ++i) {
  sums[i] = 0.0f;
}
for (int at = from / (WARPS * 16) * (WARPS * 16) + warp * 16; at < to; at += WARPS * 16) {
  if (at + 16 <= from) {
    continue;
  }
  Eight<T> v[VALUE_PARTS * 4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = at + across * 2 + i % 2 + i / 2 * 8, place = begin + key;
    const bool there = key >= from && key < to;
    const DEVICE T* page = 0;
    if (there) {
      FIND_VALUES(page, table[first_entry + place / PAGE - first_page], head)
    }
#pragma unroll
    for (int part = 0; part < VALUE_PARTS; ++part) {
      clear_eight(v[part * 4 + i]);
      if (there && part * 64 + up * 8 < VALUE_SIZE) {
        load_eight(v[part * 4 + i], page + place % PAGE * VALUE_SIZE + part * 64 + up * 8);
      }
    }
  }
  unsigned int w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const SHARED float* pair = weights + (up + i % 2 * 8) * LINE + at + across * 2 + i / 2 * 8;
    w[i] = two_of<T>(pair[0], pair[1]);
  }
#pragma unroll
  for (int part = 0; part < VALUE_PARTS; ++part) {
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      const unsigned int low = pair_of(v[part * 4].raw, v[part * 4 + 1].raw, column);
      const unsigned int high = pair_of(v[part * 4 + 2].raw, v[part * 4 + 3].raw, column);
      multiply_tiles<T>(sums + (part * 8 + column) * 4, w[0], w[1], w[2], w[3], low, high);
    }
  }
}

// The warps' sums, one after another.
for (int other = 1; other < WARPS; ++other) {
  group_barrier();
  if (warp == other) {
#pragma unroll
    for (int i = 0; i < VALUE_PARTS * 32; ++i) {
      const int column = i / 32 * 64 + (across * 2 + i % 2) * 8 + i / 4 % 8;
      if (column < VALUE_SIZE) {
        weights[(up + i / 2 % 2 * 8) * VALUE_SIZE + column] = sums[i];
      }
    }
  }
  group_barrier();
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < VALUE_PARTS * 32; ++i) {
      const int column = i / 32 * 64 + (across * 2 + i % 2) * 8 + i / 4 % 8;
      if (column < VALUE_SIZE) {
        sums[i] += weights[(up + i / 2 % 2 * 8) * VALUE_SIZE + column];
      }
    }
  }
}
if (warp == 0) {
#pragma unroll
  for (int i = 0; i < VALUE_PARTS * 32; ++i) {
    const int m = up + i / 2 % 2 * 8, column = i / 32 * 64 + (across * 2 + i % 2) * 8 + i / 4 % 8;
    const int query = chunk * MOST + m;
    if (query < count * GROUP && column < VALUE_SIZE) {
      const int token = first_query + query / GROUP;
      const size_t of = ((size_t)token * HEADS + head * GROUP + query % GROUP) * stretches + number;
      partial[of * (VALUE_SIZE + 4) + column] = sums[i];
      if (column == 0) {
        partial[of * (VALUE_SIZE + 4) + VALUE_SIZE] = totals[m * 2];
        partial[of * (VALUE_SIZE + 4) + VALUE_SIZE + 1] = totals[m * 2 + 1];
      }
    }
  }
}
