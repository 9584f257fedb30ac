// One threadgroup: some queries of one row that share a head of keys and values, over one split of places. Which keys a
// thread adds up, and in which order, depends on neither PART nor UNROLL, nor on how many queries a row has.
//
// queries [tokens, heads, KEY_SIZE], numbers [2 + heads], table [...], rows [rows, 6], after [1] -> partial [tokens, heads,
// splits, VALUE_SIZE + 4]: for each split the values, weighted; the largest score; the sum of weights. Where no row has
// more than one split -> attended [tokens, heads, VALUE_SIZE] instead, with the bits that merging would give.
constexpr int LINE_LANES_K = KEY_SIZE <= 16 ? 2 : KEY_SIZE <= 32 ? 4 : KEY_SIZE <= 64 ? 8 : KEY_SIZE <= 128 ? 16 : 32;
constexpr int LINE_LANES_V = VALUE_SIZE <= 16 ? 2 : VALUE_SIZE <= 32 ? 4 : VALUE_SIZE <= 64 ? 8 : VALUE_SIZE <= 128 ? 16 : 32;
constexpr int WARP_KEYS = 32 / LINE_LANES_K * UNROLL;    // keys that a warp looks at, at once
constexpr int WARP_VALUES = 32 / LINE_LANES_V * RUN;
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int SHARED_SIZE = SPLIT > WARPS / 2 * VALUE_SIZE ? SPLIT : WARPS / 2 * VALUE_SIZE;
SHARED_FLOATS(weights, PART * SHARED_SIZE);
SHARED_FLOATS(totals, PART * 2);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int length = rows[row * 6], first_page = rows[row * 6 + 1], first_query = rows[row * 6 + 2];
const int count = rows[row * 6 + 3], first_entry = rows[row * 6 + 4];
const int chunks = (rows[row * 6 + 5] * GROUP + PART - 1) / PART;
const int chunk = int(threadgroup_position_in_grid.x) % chunks;
const int splits = int(threadgroups_per_grid.x) / chunks;

// Places are counted from the split's begin, from here on.
const int least = WINDOW > 0 && length - count + 1 > WINDOW ? length - count + 1 - WINDOW : 0;
const int number = int(threadgroup_position_in_grid.x) / chunks;
const int begin = (least / SPLIT + number) * SPLIT;
const int from = least > begin ? least - begin : 0;
const int to = length - begin < SPLIT ? length - begin : SPLIT;
if (from >= to || chunk * PART >= count * GROUP) {
  return;
}

// Scores: a line of lanes holds a key, eight numbers a lane, and the same eight of each query.
{
  const int column = lane % LINE_LANES_K * 8;
  const int mine = warp * WARP_KEYS + lane / LINE_LANES_K * UNROLL;
  float q[PART * 8];
#pragma unroll
  for (int m = 0; m < PART; ++m) {
    const int query = chunk * PART + m;
    Eight<T> eight;
    clear_eight(eight);
    if (query < count * GROUP && column < KEY_SIZE) {
      const int token = first_query + query / GROUP;
      load_eight(eight, queries + ((size_t)token * HEADS + head * GROUP + query % GROUP) * KEY_SIZE + column);
    }
    widen(eight, q + m * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[m * 8 + i] *= numbers[0];
    }
  }

  Eight<T> ahead[UNROLL];
  const int skipped = from / (WARPS * WARP_KEYS) * (WARPS * WARP_KEYS);
#define FETCH_KEYS(key)                                                                                          \
  if ((key) + UNROLL > from && (key) < to) {                                                                     \
    const int place = begin + (key);                                                                             \
    const DEVICE T* page;                                                                                        \
    FIND_KEYS(page, table[first_entry + place / PAGE - first_page], head)                                        \
    fetch<T, UNROLL, KEY_SIZE>(ahead, page + place % PAGE * KEY_SIZE, key, from, to, column);                    \
  }
  FETCH_KEYS(skipped + mine)
  for (int at = skipped; at + warp * WARP_KEYS < to; at += WARPS * WARP_KEYS) {
    const int key = at + mine;
    float scores[UNROLL * PART];
    Eight<T> now[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      now[u] = ahead[u];
    }
    FETCH_KEYS(key + WARPS * WARP_KEYS)
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float k[8];
      widen(now[u], k);
#pragma unroll
      for (int m = 0; m < PART; ++m) {
        float sum = q[m * 8] * k[0];
#pragma unroll
        for (int i = 1; i < 8; ++i) {
          sum = multiply_add(q[m * 8 + i], k[i], sum);
        }
        scores[m * UNROLL + u] = sum;
      }
    }
    int held = 0, end = UNROLL * PART;
    bool sole = true;
    Fold<UNROLL * PART, LINE_LANES_K / 2>::sum(scores, lane, held, end, sole);
#pragma unroll
    for (int i = 0; i < Fold<UNROLL * PART, LINE_LANES_K / 2>::HELD; ++i) {
      const int m = (held + i) / UNROLL, at_key = key + (held + i) % UNROLL;
      if (sole && held + i < end && at_key < to) {
        // A query sees what comes before those after it, and no more than its window.
        const int limit = length - count + 1 + (chunk * PART + m) / GROUP - begin;
        const bool seen = at_key < limit && at_key >= from && (WINDOW == 0 || at_key >= limit - WINDOW);
        const float score = CAPPED ? numbers[1] * tangent(scores[i]) : scores[i];
        weights[m * SPLIT + at_key] = seen ? score : nothing();
      }
    }
  }
#undef FETCH_KEYS
}

// Values: a line of lanes holds a value, eight numbers a lane, and sums for each query: of RUN values one behind another,
// UNROLL at once. The first are fetched before anybody waits.
const int column = lane % LINE_LANES_V * 8;
const int mine = warp * WARP_VALUES + lane / LINE_LANES_V * RUN;
const int skipped = from / (WARPS * WARP_VALUES) * (WARPS * WARP_VALUES);
Eight<T> ahead[UNROLL];
#define FETCH_VALUES(key)                                                                                        \
  if ((key) + UNROLL > from && (key) < to) {                                                                     \
    const int place = begin + (key);                                                                             \
    const DEVICE T* page;                                                                                        \
    FIND_VALUES(page, table[first_entry + place / PAGE - first_page], head)                                      \
    fetch<T, UNROLL, VALUE_SIZE>(ahead, page + place % PAGE * VALUE_SIZE, key, from, to, column);                \
  }
FETCH_VALUES(skipped + mine)
group_barrier();

// Weights: a warp takes whole queries.
for (int m = warp; m < PART; m += WARPS) {
  SHARED float* scores = weights + m * SPLIT;
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
    const float weight = seen ? power_of_two(scores[key] - largest) : 0.0f;
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

float sums[PART * 8];
#pragma unroll
for (int i = 0; i < PART * 8; ++i) {
  sums[i] = 0.0f;
}
for (int key = skipped + mine, done = 0; key < to;) {
  Eight<T> now[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    now[u] = ahead[u];
  }
  const bool last = done + UNROLL == RUN;
  const int next = key + UNROLL + (last ? WARPS * WARP_VALUES - RUN : 0);
  FETCH_VALUES(next)
  if (key + UNROLL > from) {
#pragma unroll
    for (int u = 0; u < UNROLL; u += 4) {
      float v[32];
      widen(now[u], v);
      widen(now[u + 1], v + 8);
      widen(now[u + 2], v + 16);
      widen(now[u + 3], v + 24);
#pragma unroll
      for (int m = 0; m < PART; ++m) {
        float weight[4];
        read_four(weights + m * SPLIT + key + u, weight);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          sums[m * 8 + i % 8] = multiply_add(weight[i / 8], v[i], sums[m * 8 + i % 8]);
        }
      }
    }
  }
  key = next;
  done = last ? 0 : done + UNROLL;
}
#undef FETCH_VALUES

#pragma unroll
for (int step = LINE_LANES_V; step < 32; step *= 2) {
#pragma unroll
  for (int i = 0; i < PART * 8; ++i) {
    sums[i] += shuffle_xor(sums[i], step);
  }
}
const bool writes = lane < LINE_LANES_V && column < VALUE_SIZE;
for (int half_of = WARPS / 2; half_of > 0; half_of /= 2) {
  group_barrier();
  if (warp >= half_of && warp < 2 * half_of && writes) {
#pragma unroll
    for (int i = 0; i < PART * 8; ++i) {
      weights[((warp - half_of) * PART + i / 8) * VALUE_SIZE + column + i % 8] = sums[i];
    }
  }
  group_barrier();
  if (warp < half_of && writes) {
#pragma unroll
    for (int i = 0; i < PART * 8; ++i) {
      sums[i] += weights[(warp * PART + i / 8) * VALUE_SIZE + column + i % 8];
    }
  }
}
if (warp == 0 && writes) {
#pragma unroll
  for (int m = 0; m < PART; ++m) {
    const int query = chunk * PART + m;
    if (query < count * GROUP) {
      const int head_of_query = head * GROUP + query % GROUP;
      const size_t of = (size_t)(first_query + query / GROUP) * HEADS + head_of_query;
      if (splits == 1) {
        const float sink = SINKS ? numbers[2 + head_of_query] : nothing();
        const float largest = larger(sink, totals[m * 2]);
        const float factor = power_of_two(totals[m * 2] - largest);
        const float sum = multiply_add(factor, totals[m * 2 + 1], SINKS ? power_of_two(sink - largest) : 0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float value = multiply_add(factor, sums[m * 8 + i], 0.0f);
          attended[of * VALUE_SIZE + column + i] = T(value / sum);
        }
      } else {
        DEVICE float* to_partial = partial + (of * splits + number) * (VALUE_SIZE + 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          to_partial[column + i] = sums[m * 8 + i];
        }
        if (column == 0) {
          to_partial[VALUE_SIZE] = totals[m * 2];
          to_partial[VALUE_SIZE + 1] = totals[m * 2 + 1];
        }
      }
    }
  }
}
