// What `attend` does, by matrix units: one threadgroup takes PART queries of one row that share a head of keys and values, in
// tiles of sixteen, over one stretch of places. Keys and values come to shared memory in pieces of KEYS places, K, V, K, V,
// into a ring of slots, and are on their way while earlier ones are multiplied. For the scores four warps share a piece's keys,
// for the values its columns; where there are more than EACH tiles, four further warps take the next of them. So neither which
// numbers a query's sums are made of nor their order depends on PART, EACH, SLOTS or how many queries a row has.
//
// queries [tokens, heads, KEY_SIZE], numbers [2 + heads], table [...], rows [rows, 6], after [1] -> partial [tokens, heads,
// stretches, VALUE_SIZE + 4]
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int TILES = PART / 16;
constexpr int TEAMS = TILES > EACH ? TILES / EACH : 1;  // of four warps
constexpr int OWN = TILES / TEAMS;                      // tiles of a warp
constexpr int THREADS = TEAMS * 128;
constexpr int UNIT = 64;                                // places that lie one behind another, whatever a page is
constexpr int KEY_CHUNKS = KEY_SIZE / 8, VALUE_CHUNKS = VALUE_SIZE / 8;  // of 16 bytes
constexpr int KEY_RUNS = KEYS / 32;                     // of a piece: eight keys for each of four warps
constexpr int COLUMNS = (VALUE_CHUNKS + 3) / 4;         // chunks of a value that a warp adds up
constexpr int CHUNK = 4;                                // floats that take as much memory

// Rows of an odd number of chunks begin in other banks of memory, one after another.
constexpr int KEY_LINE = (KEY_CHUNKS | 1) * CHUNK, VALUE_LINE = (VALUE_CHUNKS | 1) * CHUNK;
constexpr int WEIGHT_LINE = (KEYS / 8 | 1) * CHUNK;
constexpr int SLOT = KEYS * (KEY_LINE > VALUE_LINE ? KEY_LINE : VALUE_LINE);
SHARED_FLOATS(ring, SLOTS * SLOT);
SHARED_FLOATS(weights, PART * WEIGHT_LINE);
SHARED_FLOATS(maxima, 4 * PART);
SHARED_FLOATS(units, STRETCH / UNIT * 4);
const DEVICE T** found = (const DEVICE T**)units;  // keys and values of each unit

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup) % 4, team = int(simdgroup_index_in_threadgroup) / 4;
const int thread_number = int(simdgroup_index_in_threadgroup) * 32 + lane;
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int length = rows[row * 6], first_page = rows[row * 6 + 1], first_query = rows[row * 6 + 2];
const int count = rows[row * 6 + 3], first_entry = rows[row * 6 + 4];
const int chunks = (rows[row * 6 + 5] * GROUP + PART - 1) / PART;
const int first = int(threadgroup_position_in_grid.x) % chunks * PART;
const int stretches = int(threadgroups_per_grid.x) / chunks;

// Places are counted from the stretch's begin, from here on.
const int least = WINDOW > 0 && length - count + 1 > WINDOW ? length - count + 1 - WINDOW : 0;
const int number = int(threadgroup_position_in_grid.x) / chunks;
const int begin = (least / STRETCH + number) * STRETCH;
const int from = least > begin ? least - begin : 0;
const int to = length - begin < STRETCH ? length - begin : STRETCH;
if (from >= to || first >= count * GROUP) {
  return;
}
const int first_limit = length - count + 1 - begin;  // what a query sees lies before its limit
const float scale = numbers[0], cap = numbers[1];

for (int unit = thread_number; unit < STRETCH / UNIT; unit += THREADS) {
  if ((unit + 1) * UNIT > from && unit * UNIT < to) {
    const int place = begin + unit * UNIT, page = table[first_entry + place / PAGE - first_page];
    const DEVICE T* start;
    FIND_KEYS(start, page, head)
    found[unit * 2] = start + place % PAGE * KEY_SIZE;
    FIND_VALUES(start, page, head)
    found[unit * 2 + 1] = start + place % PAGE * VALUE_SIZE;
  }
}
group_barrier();

// The next piece to come: what is not there comes as zeros.
int next_key = from / KEYS * KEYS, next_slot = 0;
bool next_values = false;
const auto fetch_piece = [&]() {
  if (next_key < to) {
    const int size = next_values ? VALUE_SIZE : KEY_SIZE, line = next_values ? VALUE_LINE : KEY_LINE;
    const DEVICE T* source = found[next_key / UNIT * 2 + next_values] + next_key % UNIT * size;
    SHARED float* slot = ring + next_slot * SLOT;
    const auto copy = [&](const int columns) {
#pragma unroll
      for (int i = 0; i < (KEYS * columns + THREADS - 1) / THREADS; ++i) {
        const int at = i * THREADS + thread_number, key = at / columns, column = at % columns;
        if (KEYS * columns % THREADS == 0 || at < KEYS * columns) {
          const bool there = next_key + key >= from && next_key + key < to;
          copy_chunk(slot + key * line + column * CHUNK, source + key * size + column * 8, there);
        }
      }
    };
    if (next_values) {
      copy(VALUE_CHUNKS);
    } else {
      copy(KEY_CHUNKS);
    }
  }
  end_copies();
  next_slot = next_slot + 1 == SLOTS ? 0 : next_slot + 1;
  next_key += next_values ? KEYS : 0;
  next_values = !next_values;
};
#pragma unroll
for (int i = 0; i < SLOTS - 1; ++i) {
  fetch_piece();
}

unsigned int q[OWN][KEY_CHUNKS * 2];
#pragma unroll
for (int tile = 0; tile < OWN; ++tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first + (team * OWN + tile) * 16 + half * 8 + up;
    const size_t token = first_query + query / GROUP;
    const DEVICE T* numbers_of = queries + (token * HEADS + head * GROUP + query % GROUP) * KEY_SIZE + across * 2;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; ++i) {
      q[tile][i * 2 + half] = query < count * GROUP ? *(const DEVICE unsigned int*)(numbers_of + i * 8) : 0;
    }
  }
}

float sums[OWN][COLUMNS][4], largest[OWN][2], total[OWN][2];
#pragma unroll
for (int tile = 0; tile < OWN; ++tile) {
#pragma unroll
  for (int i = 0; i < COLUMNS * 4; ++i) {
    sums[tile][i / 4][i % 4] = 0.0f;
  }
  largest[tile][0] = largest[tile][1] = nothing();
  total[tile][0] = total[tile][1] = 0.0f;
}

int slot = 0;
for (int block = from / KEYS * KEYS; block < to; block += KEYS) {
  wait_for_copies<SLOTS - 2>();
  group_barrier();
  fetch_piece();

  // Scores: of each tile with the warp's own keys. Two chains of products are shorter than one.
  float scores[OWN][KEY_RUNS][4];
#pragma unroll
  for (int run = 0; run < KEY_RUNS; ++run) {
    float even[OWN][4], odd[OWN][4];
#pragma unroll
    for (int i = 0; i < OWN * 4; ++i) {
      even[i / 4][i % 4] = odd[i / 4][i % 4] = 0.0f;
    }
    const SHARED float* line = ring + slot * SLOT + ((warp * KEY_RUNS + run) * 8 + lane % 8) * KEY_LINE;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i += 4) {
      unsigned int k[4];
      load_tiles(k, line + (i + lane / 8 < KEY_CHUNKS ? i + lane / 8 : i) * CHUNK);
#pragma unroll
      for (int tile = 0; tile < OWN; ++tile) {
        const unsigned int* left = q[tile] + i * 2;
        multiply_tiles<T>(even[tile], left[0], left[1], left[2], left[3], k[0], k[1]);
        if (i + 2 < KEY_CHUNKS) {
          multiply_tiles<T>(odd[tile], left[4], left[5], left[6], left[7], k[2], k[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < OWN * 4; ++i) {
      scores[i / 4][run][i % 4] = (even[i / 4][i % 4] + odd[i / 4][i % 4]) * scale;
    }
  }
  if (CAPPED) {
#pragma unroll
    for (int i = 0; i < OWN * KEY_RUNS * 4; ++i) {
      LOCAL float& score = scores[i / 4 / KEY_RUNS][i / 4 % KEY_RUNS][i % 4];
      score = cap * tangent(score);
    }
  }
  const bool all_see = block + KEYS <= first_limit && block >= from && (WINDOW == 0 || block >= length - begin - WINDOW);
  if (!all_see) {
#pragma unroll
    for (int i = 0; i < OWN * KEY_RUNS * 4; ++i) {
      // A query sees what comes before those after it, and no more than its window.
      const int tile = i / 4 / KEY_RUNS, run = i / 4 % KEY_RUNS;
      const int query = first + (team * OWN + tile) * 16 + i % 4 / 2 * 8 + up;
      const int limit = first_limit + query / GROUP, key = block + (warp * KEY_RUNS + run) * 8 + across * 2 + i % 2;
      const bool seen = key < limit && key < to && key >= from && (WINDOW == 0 || key >= limit - WINDOW);
      scores[tile][run][i % 4] = seen ? scores[tile][run][i % 4] : nothing();
    }
  }
#pragma unroll
  for (int i = 0; i < OWN * 2; ++i) {
    const int tile = i / 2, half = i % 2;
    float most = nothing();
#pragma unroll
    for (int run = 0; run < KEY_RUNS; ++run) {
      most = larger(most, larger(scores[tile][run][half * 2], scores[tile][run][half * 2 + 1]));
    }
    most = larger(most, shuffle_xor(most, 1));
    most = larger(most, shuffle_xor(most, 2));
    if (across == 0) {
      maxima[warp * PART + (team * OWN + tile) * 16 + half * 8 + up] = most;
    }
  }
  group_barrier();
  fetch_piece();
  slot = slot + 1 == SLOTS ? 0 : slot + 1;

  // Weights, against the largest score of all warps until now. They are rounded as the units take them, and so is their sum.
#pragma unroll
  for (int i = 0; i < OWN * 2; ++i) {
    const int tile = i / 2, half = i % 2, query = (team * OWN + tile) * 16 + half * 8 + up;
    const float before = largest[tile][half];
    float most = before;
#pragma unroll
    for (int other = 0; other < 4; ++other) {
      most = larger(most, maxima[other * PART + query]);
    }
    const float factor = before > nothing() ? power_of_two(before - most) : 0.0f;
    largest[tile][half] = most;
    total[tile][half] *= factor;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      sums[tile][column][half * 2] *= factor;
      sums[tile][column][half * 2 + 1] *= factor;
    }
#pragma unroll
    for (int run = 0; run < KEY_RUNS; ++run) {
      const float low = scores[tile][run][half * 2], high = scores[tile][run][half * 2 + 1];
      const T left = T(low > nothing() ? power_of_two(low - most) : 0.0f);
      const T right = T(high > nothing() ? power_of_two(high - most) : 0.0f);
      total[tile][half] += float(left) + float(right);
      SHARED float* line = weights + query * WEIGHT_LINE + (warp * KEY_RUNS + run) * CHUNK;
      ((SHARED unsigned int*)line)[across] = bits_of(left) | bits_of(right) << 16;
    }
  }
  wait_for_copies<SLOTS - 1>();
  group_barrier();

  // Values: of each tile the warp's own columns.
#pragma unroll
  for (int run = 0; run < KEY_RUNS; ++run) {
    unsigned int w[OWN][8];
#pragma unroll
    for (int i = 0; i < OWN * 2; ++i) {
      const int query = (team * OWN + i / 2) * 16 + lane % 16;
      load_tiles(w[i / 2] + i % 2 * 4, weights + query * WEIGHT_LINE + (run * 4 + i % 2 * 2 + lane / 16) * CHUNK);
    }
    const SHARED float* line = ring + slot * SLOT + (run * 32 + lane) * VALUE_LINE;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = warp * COLUMNS + i;
      if (VALUE_CHUNKS % COLUMNS == 0 && VALUE_CHUNKS / COLUMNS == 4 || column < VALUE_CHUNKS) {
        unsigned int v[4];
        load_turned_tiles(v, line + column * CHUNK);
#pragma unroll
        for (int tile = 0; tile < OWN; ++tile) {
          const unsigned int* left = w[tile];
          multiply_tiles<T>(sums[tile][i], left[0], left[1], left[2], left[3], v[0], v[1]);
          multiply_tiles<T>(sums[tile][i], left[4], left[5], left[6], left[7], v[2], v[3]);
        }
      }
    }
  }
  slot = slot + 1 == SLOTS ? 0 : slot + 1;
}

// The sums of weights: of a warp's lanes, then of the warps in their order.
#pragma unroll
for (int i = 0; i < OWN * 2; ++i) {
  float sum = total[i / 2][i % 2];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  if (across == 0) {
    maxima[warp * PART + (team * OWN + i / 2) * 16 + i % 2 * 8 + up] = sum;
  }
}
group_barrier();
#pragma unroll
for (int i = 0; i < OWN * 2; ++i) {
  const int in_part = (team * OWN + i / 2) * 16 + i % 2 * 8 + up, query = first + in_part;
  if (query < count * GROUP) {
    const size_t token = first_query + query / GROUP;
    const size_t of = (token * HEADS + head * GROUP + query % GROUP) * stretches + number;
    DEVICE float* to_partial = partial + of * (VALUE_SIZE + 4);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int column = (warp * COLUMNS + j) * 8 + across * 2;
      if (column < VALUE_SIZE) {
        store_two(to_partial + column, sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]);
      }
    }
    if (warp == 0 && across == 0) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < 4; ++other) {
        sum += maxima[other * PART + in_part];
      }
      to_partial[VALUE_SIZE] = largest[i / 2][i % 2];
      to_partial[VALUE_SIZE + 1] = sum;
    }
  }
}
