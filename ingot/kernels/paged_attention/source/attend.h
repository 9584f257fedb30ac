// One threadgroup: some queries of one row that share a head of keys and values, over one split of places. Which keys a
// thread adds up, and in which order, depends on neither PART nor UNROLL, nor on how many queries a row has.
//
// With LATENT a key is what is stored as a key and, behind it, as a value, and values are the stored keys.
//
// queries [tokens, heads, Q_SIZE], numbers [2 + heads], table [...], rows [rows, 6], after [1] -> partial [tokens, heads,
// splits, OUT_SIZE + 4]: for each split the values, weighted; the largest score; the sum of weights. Where no row has
// more than one split -> attended [tokens, heads, OUT_SIZE] instead, with the bits that merging would give.
constexpr int Q_SIZE = LATENT ? KEY_SIZE + VALUE_SIZE : KEY_SIZE, OUT_SIZE = LATENT ? KEY_SIZE : VALUE_SIZE;
constexpr int LINE_LANES_K = Q_SIZE <= 16 ? 2 : Q_SIZE <= 32 ? 4 : Q_SIZE <= 64 ? 8 : Q_SIZE <= 128 ? 16 : 32;
constexpr int LINE_LANES_V = OUT_SIZE <= 16 ? 2 : OUT_SIZE <= 32 ? 4 : OUT_SIZE <= 64 ? 8 : OUT_SIZE <= 128 ? 16 : 32;
constexpr int TURNS_K = (Q_SIZE + 255) / 256, TURNS_V = (OUT_SIZE + 255) / 256;  // of a line over a key or a value
constexpr int WARP_KEYS = 32 / LINE_LANES_K * UNROLL;    // keys that a warp looks at, at once
constexpr int WARP_VALUES = 32 / LINE_LANES_V * RUN;
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int SHARED_SIZE = SPLIT > WARPS / 2 * OUT_SIZE ? SPLIT : WARPS / 2 * OUT_SIZE;
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

// Scores: a line of lanes holds a key, eight numbers a lane in each turn, and the same eight of each query.
{
  const int column = lane % LINE_LANES_K * 8;
  const int mine = warp * WARP_KEYS + lane / LINE_LANES_K * UNROLL;
  float q[TURNS_K * PART * 8];
#pragma unroll
  for (int i = 0; i < TURNS_K * PART; ++i) {
    const int query = chunk * PART + i % PART, in_key = i / PART * 256 + column;
    Eight<T> eight;
    clear_eight(eight);
    if (query < count * GROUP && in_key < Q_SIZE) {
      const int token = first_query + query / GROUP;
      load_eight(eight, queries + ((size_t)token * HEADS + head * GROUP + query % GROUP) * Q_SIZE + in_key);
    }
    widen(eight, q + i * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      q[i * 8 + j] *= numbers[0];
    }
  }

  Eight<T> ahead[UNROLL];
  const int skipped = from / (WARPS * WARP_KEYS) * (WARPS * WARP_KEYS);
#define FETCH_KEYS(key, turn)                                                                                    \
  if ((key) + UNROLL > from && (key) < to) {                                                                     \
    const int place = begin + (key), entry = table[first_entry + place / PAGE - first_page];                     \
    const int in_key = (turn) * 256 + column;                                                                    \
    const DEVICE T* page;                                                                                        \
    if (LATENT && in_key >= KEY_SIZE) {                                                                          \
      FIND_VALUES(page, entry, head)                                                                             \
      fetch<T, UNROLL, VALUE_SIZE>(ahead, page + place % PAGE * VALUE_SIZE, key, from, to, in_key - KEY_SIZE);   \
    } else {                                                                                                     \
      FIND_KEYS(page, entry, head)                                                                               \
      fetch<T, UNROLL, KEY_SIZE>(ahead, page + place % PAGE * KEY_SIZE, key, from, to, in_key);                  \
    }                                                                                                            \
  }
  FETCH_KEYS(skipped + mine, 0)
  for (int at = skipped; at + warp * WARP_KEYS < to; at += WARPS * WARP_KEYS) {
    const int key = at + mine;
    float scores[UNROLL * PART];
#pragma unroll
    for (int i = 0; i < UNROLL * PART; ++i) {
      scores[i] = 0.0f;
    }
#pragma unroll
    for (int turn = 0; turn < TURNS_K; ++turn) {
      Eight<T> now[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        now[u] = ahead[u];
      }
      const int next = turn + 1 < TURNS_K ? key : key + WARPS * WARP_KEYS;
      FETCH_KEYS(next, (turn + 1) % TURNS_K)
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        float k[8];
        widen(now[u], k);
#pragma unroll
        for (int m = 0; m < PART; ++m) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            scores[m * UNROLL + u] = multiply_add(q[(turn * PART + m) * 8 + i], k[i], scores[m * UNROLL + u]);
          }
        }
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

// Values: a line of lanes holds a value, eight numbers a lane in each turn, and sums for each query: of RUN values one behind
// another, UNROLL at once. The first are fetched before anybody waits.
const int column = lane % LINE_LANES_V * 8;
const int mine = warp * WARP_VALUES + lane / LINE_LANES_V * RUN;
const int skipped = from / (WARPS * WARP_VALUES) * (WARPS * WARP_VALUES);
Eight<T> ahead[UNROLL];
#define FETCH_VALUES(key, turn)                                                                                  \
  if ((key) + UNROLL > from && (key) < to) {                                                                     \
    const int place = begin + (key), entry = table[first_entry + place / PAGE - first_page];                     \
    const DEVICE T* page;                                                                                        \
    if (LATENT) {                                                                                                \
      FIND_KEYS(page, entry, head)                                                                               \
    } else {                                                                                                     \
      FIND_VALUES(page, entry, head)                                                                             \
    }                                                                                                            \
    fetch<T, UNROLL, OUT_SIZE>(ahead, page + place % PAGE * OUT_SIZE, key, from, to, (turn) * 256 + column);     \
  }
FETCH_VALUES(skipped + mine, 0)
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

float sums[TURNS_V * PART * 8];
#pragma unroll
for (int i = 0; i < TURNS_V * PART * 8; ++i) {
  sums[i] = 0.0f;
}
for (int key = skipped + mine, done = 0; key < to;) {
  const bool last = done + UNROLL == RUN;
  const int after_these = key + UNROLL + (last ? WARPS * WARP_VALUES - RUN : 0);
#pragma unroll
  for (int turn = 0; turn < TURNS_V; ++turn) {
    Eight<T> now[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      now[u] = ahead[u];
    }
    const int next = turn + 1 < TURNS_V ? key : after_these;
    FETCH_VALUES(next, (turn + 1) % TURNS_V)
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
          LOCAL float* own = sums + (turn * PART + m) * 8;
          float weight[4];
          read_four(weights + m * SPLIT + key + u, weight);
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            own[i % 8] = multiply_add(weight[i / 8], v[i], own[i % 8]);
          }
        }
      }
    }
  }
  key = after_these;
  done = last ? 0 : done + UNROLL;
}
#undef FETCH_VALUES

#pragma unroll
for (int step = LINE_LANES_V; step < 32; step *= 2) {
#pragma unroll
  for (int i = 0; i < TURNS_V * PART * 8; ++i) {
    sums[i] += shuffle_xor(sums[i], step);
  }
}
// A lane writes what it holds of a value, and no other lane holds.
#define WRITES(i) (lane < LINE_LANES_V && (i) / (PART * 8) * 256 + column < OUT_SIZE)
#define IN_VALUE(i) ((i) / (PART * 8) * 256 + column + (i) % 8)
for (int half_of = WARPS / 2; half_of > 0; half_of /= 2) {
  group_barrier();
  if (warp >= half_of && warp < 2 * half_of) {
#pragma unroll
    for (int i = 0; i < TURNS_V * PART * 8; ++i) {
      if (WRITES(i)) {
        weights[((warp - half_of) * PART + i / 8 % PART) * OUT_SIZE + IN_VALUE(i)] = sums[i];
      }
    }
  }
  group_barrier();
  if (warp < half_of) {
#pragma unroll
    for (int i = 0; i < TURNS_V * PART * 8; ++i) {
      if (WRITES(i)) {
        sums[i] += weights[(warp * PART + i / 8 % PART) * OUT_SIZE + IN_VALUE(i)];
      }
    }
  }
}
if (warp == 0) {
#pragma unroll
  for (int i = 0; i < TURNS_V * PART * 8; i += 8) {
    const int m = i / 8 % PART, query = chunk * PART + m;
    if (query < count * GROUP && WRITES(i)) {
      const int head_of_query = head * GROUP + query % GROUP;
      const size_t of = (size_t)(first_query + query / GROUP) * HEADS + head_of_query;
      if (splits == 1) {
        const float sink = SINKS ? numbers[2 + head_of_query] : nothing();
        const float largest = larger(sink, totals[m * 2]);
        const float factor = power_of_two(totals[m * 2] - largest);
        const float sum = multiply_add(factor, totals[m * 2 + 1], SINKS ? power_of_two(sink - largest) : 0.0f);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float value = multiply_add(factor, sums[i + j], 0.0f);
          attended[of * OUT_SIZE + IN_VALUE(i + j)] = T(value / sum);
        }
      } else {
        DEVICE float* to_partial = partial + (of * splits + number) * (OUT_SIZE + 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          to_partial[IN_VALUE(i + j)] = sums[i + j];
        }
        if (IN_VALUE(i) == 0) {
          to_partial[OUT_SIZE] = totals[m * 2];
          to_partial[OUT_SIZE + 1] = totals[m * 2 + 1];
        }
      }
    }
  }
}
#undef WRITES
#undef IN_VALUE
