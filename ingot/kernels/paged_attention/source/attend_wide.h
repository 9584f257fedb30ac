// What `attend` does, by matrix units, behind `split`. Keys and values come to shared memory in pieces of KEYS places, K, V,
// K, V, into a ring of slots, and are on their way while earlier ones are multiplied. For the scores warps take tiles, and share
// a piece's keys where there are fewer tiles than warps; for the values they share its columns. Neither which numbers a query's
// sums are made of nor their order depends on PART, SLOTS or how many queries a row has.
const int own_query = warp / SHARERS * 16, own_run = warp % SHARERS * OWN_RUNS;  // where those of a warp begin, for the scores

// The next piece to come, which is of values after one of keys: what is not there comes as zeros.
int next_key = from / KEYS * KEYS, next_slot = 0;
const auto fetch_piece = [&](const bool of_values) {
  const int size = of_values ? VALUE_SIZE : KEY_SIZE, line = of_values ? VALUE_LINE : KEY_LINE, columns = size / 8;
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

int slot = 0;
for (int block = from / KEYS * KEYS; block < to; block += KEYS) {
  wait_for_copies<SLOTS - 2>();
  group_barrier();
  fetch_piece(SLOTS % 2 == 0);

  const SHARED float* piece = ring + slot * SLOT;

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
    DEVICE float* to_partial = partial + (of * splits + number) * (VALUE_SIZE + 4);
    if (splits == 1) {
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
      if (column < VALUE_SIZE && splits == 1) {
        attended[of * VALUE_SIZE + column] = T(low / sum);
        attended[of * VALUE_SIZE + column + 1] = T(high / sum);
      } else if (column < VALUE_SIZE) {
        store_two(to_partial + column, low, high);
      }
    }
  }
}
