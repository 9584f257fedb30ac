// What `attend` does, by matrix units: one threadgroup of four warps takes PART queries of one row that share a head of keys and
// values, in tiles of sixteen, over one stretch of places. Keys and values come to shared memory in pieces of KEYS places, K, V,
// K, V, into a ring of slots, and are on their way while earlier ones are multiplied. For the scores warps take tiles, and share
// a piece's keys where there are fewer tiles than warps; for the values they share its columns. Neither which numbers a query's
// sums are made of nor their order depends on PART, SLOTS or how many queries a row has.
//
// With CODED_PAGES a row's first pages may be in fewer bits, which a page's number below 0 says: their codes come to the ring as
// they are, and are unpacked from there. Values that are rotated (VALUE_GROUPS is 0) are summed up so, and the sums turned back
// once. Codes and scales lie as cache/page_form.py says; constants [16 + VALUE_SIZE] are levels and signs.
//
// queries [tokens, heads, KEY_SIZE], numbers [2 + heads], table [...], rows [rows, 6], after [1] -> partial [tokens, heads,
// stretches, VALUE_SIZE + 4], or where no row has more than one stretch -> attended [tokens, heads, VALUE_SIZE], as in `attend`
constexpr int HEADS = KV_HEADS * GROUP;
static_assert(WARPS == 4, "as many as share the columns of values");
constexpr int THREADS = WARPS * 32;
constexpr int TILES = PART / 16;
constexpr int SHARERS = WARPS / TILES;           // warps that share a tile's keys
constexpr int RUNS = KEYS / 8;                   // of eight keys in a piece
constexpr int OWN_RUNS = RUNS / SHARERS;         // of them a warp's own
constexpr int ADDED_RUNS = RUNS / WARPS;         // whose weights are added up one after another
constexpr int KEY_CHUNKS = KEY_SIZE / 8, VALUE_CHUNKS = VALUE_SIZE / 8;  // of 16 bytes
constexpr int COLUMNS = (VALUE_CHUNKS + WARPS - 1) / WARPS;              // chunks of a value that are a warp's own
constexpr int CHUNK = 4;                         // floats that take as much memory
constexpr int UNIT = 64;                         // places that lie one behind another, whatever a page is

// Rows of an odd number of chunks begin in other banks of memory, one after another.
constexpr int KEY_LINE = (KEY_CHUNKS | 1) * CHUNK, VALUE_LINE = (VALUE_CHUNKS | 1) * CHUNK, WEIGHT_LINE = (RUNS | 1) * CHUNK;
constexpr int SLOT = KEYS * (KEY_LINE > VALUE_LINE ? KEY_LINE : VALUE_LINE);
SHARED_FLOATS(ring, SLOTS * SLOT);
SHARED_FLOATS(weights, PART * WEIGHT_LINE);
SHARED_FLOATS(of_warps, WARPS * PART);  // largest scores, and in the end sums of weights
SHARED_FLOATS(factors, PART);           // of the sums until now, and in the end largest scores
SHARED_FLOATS(units, STRETCH / UNIT * 4);
#ifdef CODED_PAGES
constexpr int KEY_BYTES = KEY_SIZE * KEY_BITS / 8, VALUE_BYTES = VALUE_SIZE * VALUE_BITS / 8;      // of a vector's codes
constexpr int KEY_SCALES = KEY_GROUPS * 4, VALUE_SCALES = VALUE_GROUPS == 0 ? 2 : VALUE_GROUPS * 4;  // bytes
static_assert(KEYS * (KEY_BYTES + KEY_SCALES) + KEY_SIZE * 2 <= SLOT * 4 && KEYS * (VALUE_BYTES + VALUE_SCALES) <= SLOT * 4, "codes are smaller");
SHARED_FLOATS(plain, SLOT);  // a piece, unpacked
SHARED_FLOATS(levels, 16);
#endif
const DEVICE T** found = (const DEVICE T**)units;  // keys and values of each unit

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup), thread_number = warp * 32 + lane;
const int own_query = warp / SHARERS * 16, own_run = warp % SHARERS * OWN_RUNS;  // where those of a warp begin, for the scores
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
#ifdef CODED_PAGES
    if (page < 0) {
      const DEVICE unsigned char* slab = ((const DEVICE unsigned char* const DEVICE*)coded)[~page >> 20];
      found[unit * 2] = (const DEVICE T*)(slab + ((size_t)(~page & 0xfffff) * KV_HEADS + head) * HEAD_BYTES);
      found[unit * 2 + 1] = nullptr;
      continue;
    }
#endif
    FIND_KEYS(start, page, head)
    found[unit * 2] = start + place % PAGE * KEY_SIZE;
    FIND_VALUES(start, page, head)
    found[unit * 2 + 1] = start + place % PAGE * VALUE_SIZE;
  }
}
#ifdef CODED_PAGES
if (VALUE_GROUPS == 0 && thread_number < 16) {
  levels[thread_number] = constants[thread_number];
}
#endif
group_barrier();
#ifdef CODED_PAGES
const auto is_coded = [&](const int key) { return found[key / UNIT * 2 + 1] == nullptr; };

const auto copy_run = [&](SHARED float* to, const DEVICE unsigned char* source, const int bytes) {
  for (int at = thread_number * 16; at < bytes; at += THREADS * 16) {
    copy_chunk(to + at / 4, source + at, true);
  }
};

// A piece's codes in the ring become numbers.
const auto unpack_keys = [&](const SHARED float* piece) {
  const SHARED unsigned short* scales = (const SHARED unsigned short*)(piece + KEYS * KEY_BYTES / 4);
  const SHARED unsigned int* centre = (const SHARED unsigned int*)(piece + KEYS * (KEY_BYTES + KEY_SCALES) / 4);
  const auto scale = [&](const int key, const int column) {
    const int group = column / (KEY_SIZE / KEY_GROUPS);
    Scale own;
    own.step = brain_bits(scales[key * KEY_GROUPS * 2 + group]);
    own.least = brain_bits(scales[key * KEY_GROUPS * 2 + KEY_GROUPS + group]);
    return own;
  };
  const auto pair = [&](const Scale own, const int column, const unsigned int low, const unsigned int high) {
    const unsigned int common = centre[column / 2];
    return two_of<T>(multiply_add(counted(low), own.step, own.least + lower<T>(common)),
                     multiply_add(counted(high), own.step, own.least + upper<T>(common)));
  };
  unpack_codes<KEY_BITS, KEY_SIZE, KEY_LINE, KEYS, THREADS>(piece, plain, thread_number, scale, pair);
};
const auto unpack_values = [&](const SHARED float* piece) {
  constexpr int GROUPS = VALUE_GROUPS == 0 ? 1 : VALUE_GROUPS;
  const SHARED unsigned short* scales = (const SHARED unsigned short*)(piece + KEYS * VALUE_BYTES / 4);
  const auto scale = [&](const int key, const int column) {
    const int group = column / (VALUE_SIZE / GROUPS);
    Scale own;
    own.step = brain_bits(scales[VALUE_GROUPS == 0 ? key : key * GROUPS * 2 + group]);
    own.least = VALUE_GROUPS == 0 ? 0.0f : brain_bits(scales[key * GROUPS * 2 + GROUPS + group]);
    return own;
  };
  const auto pair = [&](const Scale own, const int column, const unsigned int low, const unsigned int high) {
    return VALUE_GROUPS == 0 ? two_of<T>(levels[low & 15] * own.step, levels[high & 15] * own.step)
                             : two_of<T>(multiply_add(counted(low), own.step, own.least), multiply_add(counted(high), own.step, own.least));
  };
  unpack_codes<VALUE_BITS, VALUE_SIZE, VALUE_LINE, KEYS, THREADS>(piece, plain, thread_number, scale, pair);
};
#endif

// The next piece to come, which is of values after one of keys: what is not there comes as zeros.
int next_key = from / KEYS * KEYS, next_slot = 0;
const auto fetch_piece = [&](const bool of_values) {
  const int size = of_values ? VALUE_SIZE : KEY_SIZE, line = of_values ? VALUE_LINE : KEY_LINE, columns = size / 8;
#ifdef CODED_PAGES
  if (next_key < to && is_coded(next_key)) {
    const DEVICE unsigned char* page = (const DEVICE unsigned char*)found[next_key / UNIT * 2];
    const int bytes = of_values ? VALUE_BYTES : KEY_BYTES, each = of_values ? VALUE_SCALES : KEY_SCALES, inside = next_key % UNIT;
    SHARED float* next = ring + next_slot * SLOT;
    copy_run(next, page + (of_values ? VALUE_CODES_AT : KEY_CODES_AT) + inside * bytes, KEYS * bytes);
    copy_run(next + KEYS * bytes / 4, page + (of_values ? VALUE_SCALES_AT : KEY_SCALES_AT) + inside * each, KEYS * each);
    if (!of_values) {
      copy_run(next + KEYS * (KEY_BYTES + KEY_SCALES) / 4, page + CENTRE_AT, KEY_SIZE * 2);
    }
  } else
#endif
  if (next_key < to) {
    const DEVICE T* source = found[next_key / UNIT * 2 + of_values] + next_key % UNIT * size;
    SHARED float* next = ring + next_slot * SLOT;
#pragma unroll
    for (int i = 0; i < (KEYS * columns + THREADS - 1) / THREADS; ++i) {
      const int at = i * THREADS + thread_number;
      const int key = THREADS % columns == 0 ? i * (THREADS / columns) + thread_number / columns : at / columns;
      const int column = THREADS % columns == 0 ? thread_number % columns : at % columns;
      if (KEYS * columns % THREADS == 0 || at < KEYS * columns) {
        const bool there = (unsigned int)(next_key - from + key) < (unsigned int)(to - from);
        copy_chunk(next + key * line + column * CHUNK, source + key * size + column * 8, there);
      }
    }
  }
  end_copies();
  next_slot = next_slot + 1 == SLOTS ? 0 : next_slot + 1;
  next_key += of_values ? KEYS : 0;
};
#pragma unroll
for (int i = 0; i < SLOTS - 1; ++i) {
  fetch_piece(i % 2 == 1);
}

unsigned int q[KEY_CHUNKS * 2];
#pragma unroll
for (int half = 0; half < 2; ++half) {
  const int query = first + own_query + half * 8 + up;
  const size_t token = first_query + query / GROUP;
  const DEVICE T* from_query = queries + (token * HEADS + head * GROUP + query % GROUP) * KEY_SIZE + across * 2;
#pragma unroll
  for (int i = 0; i < KEY_CHUNKS; ++i) {
    q[i * 2 + half] = query < count * GROUP ? *(const DEVICE unsigned int*)(from_query + i * 8) : 0;
  }
}

float largest[2], total[WARPS / SHARERS][2];  // of the warp's own tile, and of its own keys
float sums[TILES][COLUMNS][4];                // of all tiles and the warp's own columns
largest[0] = largest[1] = nothing();
#pragma unroll
for (int i = 0; i < 8 / SHARERS; ++i) {
  total[i / 2][i % 2] = 0.0f;
}
#pragma unroll
for (int i = 0; i < TILES * COLUMNS * 4; ++i) {
  sums[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] = 0.0f;
}

int slot = 0;
for (int block = from / KEYS * KEYS; block < to; block += KEYS) {
  wait_for_copies<SLOTS - 2>();
  group_barrier();
  fetch_piece(SLOTS % 2 == 0);

  const SHARED float* piece = ring + slot * SLOT;
#ifdef CODED_PAGES
  const bool coded_block = is_coded(block);
  if (coded_block) {
    unpack_keys(piece);
    group_barrier();
    piece = plain;
  }
#endif

  // Scores. Two chains of products are shorter than one.
  float scores[OWN_RUNS][4];
#pragma unroll
  for (int run = 0; run < OWN_RUNS; ++run) {
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const SHARED float* line = piece + ((own_run + run) * 8 + lane % 8) * KEY_LINE;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i += 4) {
      unsigned int k[4];
      load_tiles(k, line + (i + lane / 8 < KEY_CHUNKS ? i + lane / 8 : i) * CHUNK);
      multiply_tiles<T>(even, q[i * 2], q[i * 2 + 1], q[i * 2 + 2], q[i * 2 + 3], k[0], k[1]);
      if (i + 2 < KEY_CHUNKS) {
        multiply_tiles<T>(odd, q[i * 2 + 4], q[i * 2 + 5], q[i * 2 + 6], q[i * 2 + 7], k[2], k[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float score = (even[i] + odd[i]) * scale;
      scores[run][i] = CAPPED ? cap * tangent(score) : score;
    }
  }
  slot = slot + 1 == SLOTS ? 0 : slot + 1;

  // A query sees what comes before those after it, and no more than its window.
  const bool all_see = block + KEYS <= first_limit && block >= from && (WINDOW == 0 || block >= length - begin - WINDOW);
  if (!all_see) {
#pragma unroll
    for (int i = 0; i < OWN_RUNS * 4; ++i) {
      const int limit = first_limit + (first + own_query + i % 4 / 2 * 8 + up) / GROUP;
      const int key = block + (own_run + i / 4) * 8 + across * 2 + i % 2;
      const bool seen = key < limit && key < to && key >= from && (WINDOW == 0 || key >= limit - WINDOW);
      scores[i / 4][i % 4] = seen ? scores[i / 4][i % 4] : nothing();
    }
  }

  // Weights, against the largest score until now. They are rounded as the units take them, and so is their sum.
  float most[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = nothing();
#pragma unroll
    for (int run = 0; run < OWN_RUNS; ++run) {
      most[half] = larger(most[half], larger(scores[run][half * 2], scores[run][half * 2 + 1]));
    }
    most[half] = larger(most[half], shuffle_xor(most[half], 1));
    most[half] = larger(most[half], shuffle_xor(most[half], 2));
    if (SHARERS > 1 && across == 0) {
      of_warps[warp % SHARERS * PART + own_query + half * 8 + up] = most[half];
    }
  }
  if (SHARERS > 1) {
    group_barrier();
  }
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = own_query + half * 8 + up;
    const float before = largest[half];
    largest[half] = larger(before, most[half]);
#pragma unroll
    for (int sharer = 0; sharer < SHARERS && SHARERS > 1; ++sharer) {
      largest[half] = larger(largest[half], of_warps[sharer * PART + query]);
    }
    const float base = largest[half] > nothing() ? largest[half] : 0.0f;
    factor[half] = quick_power_of_two(before - base);
    if (TILES > 1 && warp % SHARERS == 0 && across == 0) {
      factors[query] = factor[half];
    }
#pragma unroll
    for (int run = 0; run < OWN_RUNS; ++run) {
      const float low = quick_power_of_two(scores[run][half * 2] - base);
      const float high = quick_power_of_two(scores[run][half * 2 + 1] - base);
      const unsigned int pair = two_of<T>(low, high);
      LOCAL float& sum = total[run / ADDED_RUNS][half];
      sum = (run % ADDED_RUNS == 0 ? sum * factor[half] : sum) + sum_of_two<T>(pair);
      ((SHARED unsigned int*)(weights + query * WEIGHT_LINE))[(own_run + run) * CHUNK + across] = pair;
    }
  }
  wait_for_copies<SLOTS - 2>();
  group_barrier();
  fetch_piece(SLOTS % 2 == 1);

  piece = ring + slot * SLOT;
#ifdef CODED_PAGES
  if (coded_block) {
    unpack_values(piece);
    group_barrier();
    piece = plain;
  }
#endif

  // Values.
#pragma unroll
  for (int i = 0; i < TILES * 2; ++i) {
    const int tile = i / 2, half = i % 2;
    const float changed = TILES == 1 ? factor[half] : factors[tile * 16 + half * 8 + up];
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      sums[tile][column][half * 2] *= changed;
      sums[tile][column][half * 2 + 1] *= changed;
    }
  }
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    unsigned int w[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      load_tiles(w[tile], weights + (tile * 16 + lane % 16) * WEIGHT_LINE + (step * 2 + lane / 16) * CHUNK);
    }
    const SHARED float* line = piece + (step * 16 + lane % 16) * VALUE_LINE;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
      const int column = warp * COLUMNS + i, loaded = column + lane / 16;
      if (COLUMNS * WARPS == VALUE_CHUNKS || column < VALUE_CHUNKS) {
        unsigned int v[4];
        load_turned_tiles(v, line + (loaded < VALUE_CHUNKS ? loaded : column) * CHUNK);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          multiply_tiles<T>(sums[tile][i], w[tile][0], w[tile][1], w[tile][2], w[tile][3], v[0], v[1]);
          if (i + 1 < COLUMNS) {
            multiply_tiles<T>(sums[tile][i + 1], w[tile][0], w[tile][1], w[tile][2], w[tile][3], v[2], v[3]);
          }
        }
      }
    }
  }
  slot = slot + 1 == SLOTS ? 0 : slot + 1;
#ifdef CODED_PAGES
  if (VALUE_GROUPS == 0 && coded_block && (block + KEYS >= to || !is_coded(block + KEYS))) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const auto place = [&](const int j, const int i) {
        return (i / 2 * 8 + up) * VALUE_SIZE + (warp * COLUMNS + j) * 8 + across * 2 + i % 2;
      };
      group_barrier();
#pragma unroll
      for (int i = 0; i < COLUMNS * 4; ++i) {
        plain[place(i / 4, i % 4)] = sums[tile][i / 4][i % 4];
      }
      group_barrier();
      for (int query = warp; query < 16; query += WARPS) {
        turn_back<VALUE_SIZE>(plain + query * VALUE_SIZE, constants + 16, lane);
      }
      group_barrier();
#pragma unroll
      for (int i = 0; i < COLUMNS * 4; ++i) {
        sums[tile][i / 4][i % 4] = plain[place(i / 4, i % 4)];
      }
    }
  }
#endif
}

// The sums of weights: of four lanes, then of all that were added up in other lanes, in the order of keys.
group_barrier();
#pragma unroll
for (int i = 0; i < 8 / SHARERS; ++i) {
  float sum = total[i / 2][i % 2];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  if (across == 0) {
    of_warps[(own_run / ADDED_RUNS + i / 2) * PART + own_query + i % 2 * 8 + up] = sum;
    factors[own_query + i % 2 * 8 + up] = largest[i % 2];
  }
}
group_barrier();
#pragma unroll
for (int i = 0; i < TILES * 2; ++i) {
  const int in_part = i * 8 + up, query = first + in_part;
  if (query < count * GROUP) {
    float sum = 0.0f, factor = 1.0f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
      sum += of_warps[other * PART + in_part];
    }
    const int head_of_query = head * GROUP + query % GROUP;
    const size_t of = (size_t)(first_query + query / GROUP) * HEADS + head_of_query;
    DEVICE float* to_partial = partial + (of * stretches + number) * (VALUE_SIZE + 4);
    if (stretches == 1) {
      const float sink = SINKS ? numbers[2 + head_of_query] : nothing(), most = larger(sink, factors[in_part]);
      factor = power_of_two(factors[in_part] - most);
      sum = multiply_add(factor, sum, SINKS ? power_of_two(sink - most) : 0.0f);
    } else if (warp == 0 && across == 0) {
      store_two(to_partial + VALUE_SIZE, factors[in_part], sum);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int column = (warp * COLUMNS + j) * 8 + across * 2;
      const float low = factor * sums[i / 2][j][i % 2 * 2], high = factor * sums[i / 2][j][i % 2 * 2 + 1];
      if (column < VALUE_SIZE && stretches == 1) {
        attended[of * VALUE_SIZE + column] = T(low / sum);
        attended[of * VALUE_SIZE + column + 1] = T(high / sum);
      } else if (column < VALUE_SIZE) {
        store_two(to_partial + column, low, high);
      }
    }
  }
}
