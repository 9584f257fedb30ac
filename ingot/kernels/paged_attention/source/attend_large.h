// What `attend_wide` does, for heads larger than 256 and for latents. Eight warps: for the scores a warp takes a quarter of the
// numbers of half of a piece's keys, and the quarters are added in shared memory; for the values it takes an eighth of their
// columns. The values of one piece are multiplied beside the keys of the next. With LATENT a key is what is stored as a key and,
// behind it, as a value, and values are the stored keys: a piece comes once, for both. Neither which numbers a query's sums are
// made of nor their order depends on PART, SLOTS or how many queries a row has. With SPLIT 0 a threadgroup goes through all
// places that its queries see.
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int Q_SIZE = LATENT ? KEY_SIZE + VALUE_SIZE : KEY_SIZE, OUT_SIZE = LATENT ? KEY_SIZE : VALUE_SIZE;
constexpr int THREADS = WARPS * 32;
static_assert(WARPS == 8 && PART <= 32, "four quarters of two halves, and eight threads for the weights of a query");
constexpr int KEYS = 32;                            // in a piece
constexpr int TILES = PART / 16;
constexpr int STEPS = (Q_SIZE / 16 + 3) / 4;        // of sixteen numbers, in a quarter
constexpr int KEY_CHUNKS = Q_SIZE / 8, VALUE_CHUNKS = OUT_SIZE / 8;  // of 16 bytes
constexpr int COLUMNS = (VALUE_CHUNKS / 2 + WARPS - 1) / WARPS * 2;  // chunks of a value that are a warp's own
constexpr int CHUNK = 4;                            // floats that take as much memory
constexpr int FETCHES = LATENT ? 1 : 2;             // of a piece: its keys, and its values

// Rows of an odd number of chunks begin in other banks of memory, one after another.
constexpr int KEY_LINE = (KEY_CHUNKS | 1) * CHUNK, VALUE_LINE = LATENT ? KEY_LINE : (VALUE_CHUNKS | 1) * CHUNK;
constexpr int WEIGHT_LINE = (KEYS / 8 | 1) * CHUNK, SCORE_LINE = KEYS + 8;
constexpr int SLOT = KEYS * (KEY_LINE > VALUE_LINE ? KEY_LINE : VALUE_LINE);
LENT_FLOATS(ring, SLOTS * SLOT);
SHARED_FLOATS(quarters, 4 * PART * SCORE_LINE);
SHARED_FLOATS(weights, PART * WEIGHT_LINE);
SHARED_FLOATS(factors, PART);  // of the sums until now, and in the end largest scores
SHARED_FLOATS(totals, PART);

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup), thread_number = warp * 32 + lane;
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int length = rows[row * 6], first_page = rows[row * 6 + 1], first_query = rows[row * 6 + 2];
const int count = rows[row * 6 + 3], first_entry = rows[row * 6 + 4];
const int chunks = (rows[row * 6 + 5] * GROUP + PART - 1) / PART;
const int in_grid = int(threadgroup_position_in_grid.x);
// Where there are many, the last ones, which see most, come first.
const int first = (SPLIT > 0 ? in_grid % chunks : chunks - 1 - in_grid) * PART;
const int splits = int(threadgroups_per_grid.x) / chunks, number = in_grid / chunks;
const int queries_of_row = count * GROUP;
if (first >= queries_of_row) {
  return;
}

// A query sees the places before its limit, and no more than its window. Places are counted from the split's begin.
const int before = length - count + 1;
const int last = first + PART < queries_of_row ? first + PART - 1 : queries_of_row - 1;
const int of_first = SPLIT > 0 ? before : before + first / GROUP;
const int least = WINDOW > 0 && of_first > WINDOW ? of_first - WINDOW : 0;
const int begin = SPLIT > 0 ? (least / (SPLIT + !SPLIT) + number) * SPLIT : 0;
const int from = least > begin ? least - begin : 0;
const int to = SPLIT == 0 ? before + last / GROUP : length - begin < SPLIT ? length - begin : SPLIT;
if (from >= to) {
  return;
}
const int first_limit = before - begin;
const float scale = numbers[0], cap = numbers[1];

// The next piece to come. Its page is looked up a piece earlier, and what the table says of it two.
int next_key = from / KEYS * KEYS, next_slot = 0, entry = 0;
const DEVICE T* next_keys = nullptr;
const DEVICE T* next_values = nullptr;
const auto look_up = [&](const int key) {
  if (key < to) {
    entry = table[first_entry + (begin + key) / PAGE - first_page];
  }
};
const auto find_page = [&](const int key) {
  if (key < to) {
    const DEVICE T* start;
    const int place = (begin + key) % PAGE;
    FIND_KEYS(start, entry, head)
    next_keys = start + place * KEY_SIZE;
    FIND_VALUES(start, entry, head)
    next_values = start + place * VALUE_SIZE;
  }
};
look_up(next_key);
find_page(next_key);
look_up(next_key + KEYS);

// What is not there comes as zeros.
const auto fetch_piece = [&](const bool of_values) {
  const int columns = of_values ? VALUE_CHUNKS : KEY_CHUNKS, line = of_values ? VALUE_LINE : KEY_LINE;
  if (next_key < to) {
    SHARED float* next = ring + next_slot * SLOT;
#pragma unroll
    for (int i = 0; i < (KEYS * columns + THREADS - 1) / THREADS; ++i) {
      const int at = i * THREADS + thread_number, key = at / columns, column = at % columns;
      if (KEYS * columns % THREADS == 0 || at < KEYS * columns) {
        const bool there = (unsigned int)(next_key - from + key) < (unsigned int)(to - from);
        const bool second = of_values || (LATENT && column >= KEY_SIZE / 8);
        const int in_line = LATENT && second ? column - KEY_SIZE / 8 : column;
        const DEVICE T* source = (second ? next_values + key * VALUE_SIZE : next_keys + key * KEY_SIZE) + in_line * 8;
        copy_chunk(next + key * line + column * CHUNK, source, there);
      }
    }
  }
  end_copies();
  next_slot = next_slot + 1 == SLOTS ? 0 : next_slot + 1;
  if (LATENT || of_values) {
    next_key += KEYS;
    find_page(next_key);
    look_up(next_key + KEYS);
  }
};
#pragma unroll
for (int i = 0; i < SLOTS - 1 - FETCHES; ++i) {
  fetch_piece(!LATENT && i % 2 == 1);
}

const int quarter = warp / 2, half_of_keys = warp % 2 * 16;
unsigned int q[TILES][STEPS][4];
#pragma unroll
for (int i = 0; i < TILES * STEPS * 4; ++i) {
  const int query = first + i / 4 / STEPS * 16 + i % 2 * 8 + up;
  const int column = (quarter * STEPS + i / 4 % STEPS) * 16 + i % 4 / 2 * 8 + across * 2;
  const size_t of = (size_t)(first_query + query / GROUP) * HEADS + head * GROUP + query % GROUP;
  const bool there = query < queries_of_row && column < Q_SIZE;
  q[i / 4 / STEPS][i / 4 % STEPS][i % 4] = there ? *(const DEVICE unsigned int*)(queries + of * Q_SIZE + column) : 0;
}

// Eight threads have the weights of a query, four keys each.
const int own_query = thread_number / 8, own_keys = thread_number % 8 * 4;
float largest = nothing(), total = 0.0f;
float sums[TILES][COLUMNS][4];
#pragma unroll
for (int i = 0; i < TILES * COLUMNS * 4; ++i) {
  sums[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] = 0.0f;
}

int slot = 0, slot_before = SLOTS - 1;  // of the keys, and of the values before them
const int first_block = from / KEYS * KEYS;
for (int block = first_block; block < to + KEYS; block += KEYS) {
  wait_for_copies<SLOTS - 2 - FETCHES>();
  group_barrier();
  fetch_piece(!LATENT && SLOTS % 2 == 0);
  if (!LATENT) {
    fetch_piece(SLOTS % 2 == 1);
  }

  if (block < to) {
    float scores[TILES][2][4];
#pragma unroll
    for (int i = 0; i < TILES * 8; ++i) {
      scores[i / 8][i / 4 % 2][i % 4] = 0.0f;
    }
    const SHARED float* line = ring + slot * SLOT + (half_of_keys + lane / 16 * 8 + lane % 8) * KEY_LINE;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int step = quarter * STEPS + i;
      if (STEPS * 64 == Q_SIZE || step * 16 < Q_SIZE) {
        unsigned int k[4];
        load_tiles(k, line + (step * 2 + lane / 8 % 2) * CHUNK);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const LOCAL unsigned int* own = q[tile][i];
          multiply_tiles<T>(scores[tile][0], own[0], own[1], own[2], own[3], k[0], k[1]);
          multiply_tiles<T>(scores[tile][1], own[0], own[1], own[2], own[3], k[2], k[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
      const int query = i / 4 * 16 + i % 2 * 8 + up, key = half_of_keys + i / 2 % 2 * 8 + across * 2;
      SHARED float* to_quarter = quarters + (quarter * PART + query) * SCORE_LINE + key;
      to_quarter[0] = scores[i / 4][i / 2 % 2][i % 2 * 2];
      to_quarter[1] = scores[i / 4][i / 2 % 2][i % 2 * 2 + 1];
    }
  }

  if (block > first_block) {
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
      const float changed = factors[i * 8 + up];
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) {
        sums[i / 2][column][i % 2 * 2] *= changed;
        sums[i / 2][column][i % 2 * 2 + 1] *= changed;
      }
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      unsigned int w[TILES][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        load_tiles(w[tile], weights + (tile * 16 + lane % 16) * WEIGHT_LINE + (step * 2 + lane / 16) * CHUNK);
      }
      const SHARED float* line = ring + slot_before * SLOT + (step * 16 + lane % 16) * VALUE_LINE;
#pragma unroll
      for (int i = 0; i < COLUMNS; i += 2) {
        const int column = warp * COLUMNS + i;
        if (COLUMNS * WARPS == VALUE_CHUNKS || column < VALUE_CHUNKS) {
          unsigned int v[4];
          load_turned_tiles(v, line + (column + lane / 16) * CHUNK);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            multiply_tiles<T>(sums[tile][i], w[tile][0], w[tile][1], w[tile][2], w[tile][3], v[0], v[1]);
            multiply_tiles<T>(sums[tile][i + 1], w[tile][0], w[tile][1], w[tile][2], w[tile][3], v[2], v[3]);
          }
        }
      }
    }
  }
  slot = slot + FETCHES >= SLOTS ? slot + FETCHES - SLOTS : slot + FETCHES;
  slot_before = slot == 0 ? SLOTS - 1 : slot - 1;
  group_barrier();

  // Weights, against the largest score until now. They are rounded as the units take them, and so is their sum.
  if (block < to && own_query < PART) {
    float scores[4];
    const SHARED float* of_query = quarters + own_query * SCORE_LINE + own_keys;
    read_four(of_query, scores);
#pragma unroll
    for (int other = 1; other < 4; ++other) {
      float more[4];
      read_four(of_query + other * PART * SCORE_LINE, more);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[i] += more[i];
      }
    }
    const int limit = first_limit + (first + own_query) / GROUP;
    float most = nothing();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = block + own_keys + i;
      const bool seen = key < limit && key < to && key >= from && (WINDOW == 0 || key >= limit - WINDOW);
      const float score = scores[i] * scale;
      scores[i] = seen ? CAPPED ? cap * tangent(score) : score : nothing();
      most = larger(most, scores[i]);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      most = larger(most, shuffle_xor(most, step));
    }
    most = larger(most, largest);
    const float base = most > nothing() ? most : 0.0f;
    const float factor = quick_power_of_two(largest - base);
    largest = most;
    SHARED unsigned int* to_weights = (SHARED unsigned int*)(weights + own_query * WEIGHT_LINE) + own_keys / 2;
    const unsigned int low = two_of<T>(quick_power_of_two(scores[0] - base), quick_power_of_two(scores[1] - base));
    const unsigned int high = two_of<T>(quick_power_of_two(scores[2] - base), quick_power_of_two(scores[3] - base));
    total = total * factor + (sum_of_two<T>(low) + sum_of_two<T>(high));
    to_weights[0] = low;
    to_weights[1] = high;
    if (own_keys == 0) {
      factors[own_query] = factor;
    }
  }
}

#pragma unroll
for (int step = 1; step < 8; step *= 2) {
  total += shuffle_xor(total, step);
}
if (own_keys == 0 && own_query < PART) {
  factors[own_query] = largest;
  totals[own_query] = total;
}
group_barrier();
#pragma unroll
for (int i = 0; i < TILES * 2; ++i) {
  const int in_part = i * 8 + up, query = first + in_part;
  if (query < queries_of_row) {
    float sum = totals[in_part], factor = 1.0f;
    const int head_of_query = head * GROUP + query % GROUP;
    const size_t of = (size_t)(first_query + query / GROUP) * HEADS + head_of_query;
    DEVICE float* to_partial = partial + (of * splits + number) * (OUT_SIZE + 4);
    if (splits == 1) {
      const float sink = SINKS ? numbers[2 + head_of_query] : nothing(), most = larger(sink, factors[in_part]);
      factor = power_of_two(factors[in_part] - most);
      sum = multiply_add(factor, sum, SINKS ? power_of_two(sink - most) : 0.0f);
    } else if (warp == 0 && across == 0) {
      store_two(to_partial + OUT_SIZE, factors[in_part], sum);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int column = (warp * COLUMNS + j) * 8 + across * 2;
      const float low = factor * sums[i / 2][j][i % 2 * 2], high = factor * sums[i / 2][j][i % 2 * 2 + 1];
      if (column < OUT_SIZE && splits == 1) {
        attended[of * OUT_SIZE + column] = T(low / sum);
        attended[of * OUT_SIZE + column + 1] = T(high / sum);
      } else if (column < OUT_SIZE) {
        store_two(to_partial + column, low, high);
      }
    }
  }
}
