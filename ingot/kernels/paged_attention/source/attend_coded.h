// Those of a split's first pages that are in fewer bits, between `split` and `attend_wide`, which goes on from what is found
// here. A warp takes whole pages, AT_ONCE keys at a time, and waits for no other: codes come from memory to registers just as
// matrix units take them, in whichever order of columns that is. They are multiplied as they are, and what they count in
// afterwards:
//
//   query . key = step * (query . codes) + least * (sum of query) + query . centre, by groups of columns
//
// Steps of values, or lengths where they are rotated (VALUE_GROUPS is 0), are multiplied to the weights. Sums of what is rotated
// are turned back once. Codes and scales lie as cache/coded_pages.py says; constants [16 + VALUE_SIZE] are levels and signs. All
// queries see all that is coded. With HALVES of 1 there are no more than eight of them.
int coded_units = 0;
#pragma unroll
for (int unit = 0; unit < MOST_SPLIT / UNIT; ++unit) {
  coded_units += unit * UNIT < to && found[unit * 2 + 1] == nullptr;
}
if (coded_units > 0) {
  static_assert(PART == 16 && WINDOW == 0 && MOST_SPLIT / UNIT <= 2 * WARPS, "a warp has one tile, and two pages at most");
  constexpr int KEY_BYTES = KEY_SIZE * KEY_BITS / 8, VALUE_BYTES = VALUE_SIZE * VALUE_BITS / 8;  // of a vector's codes
  constexpr int KEY_READ = KEY_BYTES % 64 == 0 ? 16 : KEY_BYTES % 32 == 0 ? 8 : 4;  // by a lane at once; four lanes read neighbours
  constexpr int VALUE_READ = VALUE_GROUPS == 0 ? VALUE_BYTES / 8 : 4;               // eight lanes do
  constexpr int STEPS = KEY_SIZE / 16, KEY_WORDS = KEY_BYTES / 16, VALUE_WORDS = VALUE_BYTES / 32;  // of a lane
  constexpr int CHAINS = KEY_GROUPS == 1 ? 2 : KEY_GROUPS;
  constexpr int SCALED = VALUE_GROUPS == 0 ? 1 : VALUE_GROUPS;
  constexpr int VALUE_SCALES = VALUE_GROUPS == 0 ? 2 : VALUE_GROUPS * 4;  // bytes
  constexpr int EIGHTS = AT_ONCE / 8, BLOCKS = UNIT / AT_ONCE;            // eight keys are a tile's columns
  constexpr int OUT = VALUE_SIZE + 2;
  constexpr float MORE = Counting<T, VALUE_BITS>::MORE;
  static_assert(KEY_SIZE / KEY_GROUPS % (KEY_READ * 4) == 0 && VALUE_SIZE / SCALED % (VALUE_GROUPS == 0 ? 1 : 32) == 0, "whole reads in a group");
  static_assert(WARPS * HALVES * 8 * OUT <= SLOTS * SLOT && WARPS * PART <= PART * WEIGHT_LINE, "sums of all warps");

  // The first of a lane's four columns in a product, less what differs from lane to lane.
  const auto column_of = [](const int step) {
    const int byte = step % KEY_WORDS * 4;
    return byte / KEY_READ * KEY_READ * 4 + byte % KEY_READ + step / KEY_WORDS * (KEY_SIZE / 2);
  };
  const auto group_of = [&](const int step) { return column_of(step) / (KEY_SIZE / KEY_GROUPS); };
  // Likewise of a tile's columns.
  const auto value_column = [](const int word, const int upper) {
    const int byte = word * 4;
    return byte / VALUE_READ * VALUE_READ * 8 + byte % VALUE_READ + upper * (VALUE_SIZE / 2);
  };

  const int own_units = warp < coded_units ? warp + WARPS < coded_units ? 2 : 1 : 0;
  const auto page_of = [&](const int unit) {
    const DEVICE unsigned char* page = (const DEVICE unsigned char*)found[(warp + unit * WARPS) * 2];
    IN_DEVICE_MEMORY(page)
    return page;
  };

  // What a lane holds of keys and values at a time.
  struct Block {
    unsigned int keys[EIGHTS][KEY_WORDS], key_scales[EIGHTS][KEY_GROUPS * 2];
    unsigned int values[EIGHTS * 2][VALUE_WORDS], value_scales[EIGHTS][VALUE_GROUPS == 0 ? 1 : VALUE_GROUPS * 2];
  };
  const auto fetch_block = [&](LOCAL Block& block, const int number) {
    const DEVICE unsigned char* page = page_of(number / BLOCKS);
    const int inside = number % BLOCKS * AT_ONCE;
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
      const int key = inside + eight * 8 + up, two = inside + eight * 8 + across * 2;
#pragma unroll
      for (int i = 0; i < KEY_WORDS * 4 / KEY_READ; ++i) {
        const DEVICE unsigned char* codes = page + KEY_CODES_AT + key * KEY_BYTES + i * KEY_READ * 4 + across * KEY_READ;
        read_words<KEY_READ, KEY_READ>(block.keys[eight] + i * KEY_READ / 4, codes);
      }
      read_words<KEY_GROUPS * 8, KEY_GROUPS % 2 == 0 ? 16 : 8>(block.key_scales[eight], page + KEY_SCALES_AT + two * KEY_GROUPS * 4);
      read_words<VALUE_SCALES * 2, VALUE_GROUPS == 0 ? 4 : 8>(block.value_scales[eight], page + VALUE_SCALES_AT + two * VALUE_SCALES);
#pragma unroll
      for (int i = 0; i < 2 * VALUE_WORDS * 4 / VALUE_READ; ++i) {
        const int other = i % 2, part = i / 2;
        const DEVICE unsigned char* codes = page + VALUE_CODES_AT + (two + other) * VALUE_BYTES + part * VALUE_READ * 8 + up * VALUE_READ;
        read_words<VALUE_READ, VALUE_READ>(block.values[eight * 2 + other] + part * VALUE_READ / 4, codes);
      }
    }
  };
  Block now, next;
  if (own_units > 0) {
    fetch_block(now, 0);
  }

  // Queries as halves, in the order of codes, less their power of two; and their products with what keys have in common, of the
  // warp's first page and of its second.
  unsigned int q[STEPS][4];
  float power[2], sum_of_query[KEY_GROUPS][2], common[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  {
    const DEVICE T* centre = (const DEVICE T*)(page_of(own_units == 2 ? up % 2 : 0) + CENTRE_AT) + across * KEY_READ;
    uint2 given[STEPS][2];
    float reach[2] = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first + half * 8 + up;
        const size_t token = first_query + query / GROUP;
        given[step][half].x = given[step][half].y = 0;
        if (half < HALVES && query < count * GROUP) {
          const DEVICE T* own = queries + (token * HEADS + head * GROUP + query % GROUP) * KEY_SIZE + across * KEY_READ;
          given[step][half] = *(const DEVICE uint2*)(own + column_of(step));
        }
        const uint2 four = given[step][half];
        reach[half] = larger(larger(reach[half], size_of(lower<T>(four.x))), size_of(upper<T>(four.x)));
        reach[half] = larger(larger(reach[half], size_of(lower<T>(four.y))), size_of(upper<T>(four.y)));
      }
      uint2 two_pairs;
      two_pairs.x = two_pairs.y = 0;
      if (own_units > 0) {
        two_pairs = *(const DEVICE uint2*)(centre + column_of(step));
      }
      multiply_tiles<T>(common, given[step][0].x, given[step][1].x, given[step][0].y, given[step][1].y, two_pairs.x, two_pairs.y);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reach[half] = larger(reach[half], shuffle_xor(reach[half], 1));
      reach[half] = larger(reach[half], shuffle_xor(reach[half], 2));
      const unsigned int exponent = to_bits(reach[half]) & 0x7f800000u;
      const float shrunk = from_bits(0x7f000000u - exponent);
      power[half] = from_bits(exponent);
#pragma unroll
      for (int group = 0; group < KEY_GROUPS; ++group) {
        sum_of_query[group][half] = 0.0f;
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint2 four = given[step][half];
        q[step][half] = two_of<Half>(lower<T>(four.x) * shrunk, lower<T>(four.y) * shrunk);
        q[step][half + 2] = two_of<Half>(upper<T>(four.x) * shrunk, upper<T>(four.y) * shrunk);
        sum_of_query[group_of(step)][half] += sum_of_two<Half>(q[step][half]) + sum_of_two<Half>(q[step][half + 2]);
      }
#pragma unroll
      for (int group = 0; group < KEY_GROUPS; ++group) {
        LOCAL float& sum = sum_of_query[group][half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
      }
    }
  }
  Levels levels;
  if (VALUE_GROUPS == 0) {
    keep_levels<T>(levels, constants);
  }

  float most[2] = {nothing(), nothing()}, weight[2] = {0.0f, 0.0f};
  float added[VALUE_CHUNKS][4];                // by words of a lane's codes, halves of bytes, and columns
  float besides[SCALED][2];                    // what is the same in all columns of a group
#pragma unroll
  for (int i = 0; i < VALUE_CHUNKS * 4; ++i) {
    added[i / 4][i % 4] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < SCALED * 2; ++i) {
    besides[i / 2][i % 2] = 0.0f;
  }
#pragma unroll 2
  for (int number = 0; number < own_units * BLOCKS; ++number) {
    if (number + 1 < own_units * BLOCKS) {
      fetch_block(next, number + 1);
    }

    float scores[EIGHTS][4], largest_now[2] = {nothing(), nothing()};
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
      float products[CHAINS][4];
#pragma unroll
      for (int i = 0; i < CHAINS * 4; ++i) {
        products[i / 4][i % 4] = 0.0f;
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unsigned int codes[2];
        count_keys<KEY_BITS>(codes, now.keys[eight][step % KEY_WORDS], step / KEY_WORDS);
        LOCAL float* chain = products[KEY_GROUPS == 1 ? step % 2 : group_of(step)];
        multiply_halves<Half, HALVES>(chain, q[step], q[step] + 2, codes[0], codes[1]);
      }
#pragma unroll
      for (int i = 0; i < HALVES * 2; ++i) {
        const int half = i / 2, key = i % 2;
        float sum = 0.0f;
#pragma unroll
        for (int group = 0; group < KEY_GROUPS; ++group) {
          const int at = key * KEY_GROUPS * 2 + group;
          const float step = brain_bits(now.key_scales[eight][at / 2], at % 2);
          const float least = brain_bits(now.key_scales[eight][(at + KEY_GROUPS) / 2], (at + KEY_GROUPS) % 2);
          const float counts = KEY_GROUPS == 1 ? products[0][i] + products[1][i] : products[group][i];
          sum = multiply_add(step, counts, sum);
          sum = multiply_add(multiply_add(step, -MORE_IN_KEYS, least), sum_of_query[group][half], sum);
        }
        const float score = multiply_add(sum, power[half], number < BLOCKS ? common[half * 2] : common[half * 2 + 1]) * scale;
        scores[eight][i] = CAPPED ? cap * tangent(score) : score;
        largest_now[half] = larger(largest_now[half], scores[eight][i]);
      }
    }

    unsigned int weighed[SCALED][EIGHTS][2];
#pragma unroll
    for (int i = 0; i < SCALED * EIGHTS * 2; ++i) {
      weighed[i / 2 / EIGHTS][i / 2 % EIGHTS][i % 2] = 0;
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      largest_now[half] = larger(largest_now[half], shuffle_xor(largest_now[half], 1));
      largest_now[half] = larger(largest_now[half], shuffle_xor(largest_now[half], 2));
      const float base = larger(most[half], largest_now[half]), factor = quick_power_of_two(most[half] - base);
      most[half] = base;
      weight[half] *= factor;
#pragma unroll
      for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk) {
        added[chunk][half * 2] *= factor;
        added[chunk][half * 2 + 1] *= factor;
      }
#pragma unroll
      for (int group = 0; group < SCALED; ++group) {
        besides[group][half] *= factor;
      }
#pragma unroll
      for (int eight = 0; eight < EIGHTS; ++eight) {
        const float low = quick_power_of_two(scores[eight][half * 2] - base);
        const float high = quick_power_of_two(scores[eight][half * 2 + 1] - base);
        weight[half] += low + high;
#pragma unroll
        for (int group = 0; group < SCALED; ++group) {
          const LOCAL unsigned int* scales = now.value_scales[eight];
          const int other = VALUE_GROUPS == 0 ? 1 : group + VALUE_GROUPS * 2;
          const float one = brain_bits(scales[group / 2], group % 2), next_one = brain_bits(scales[other / 2], other % 2);
          const unsigned int two = two_of<T>(low * one, high * next_one);
          weighed[group][eight][half] = two;
          if (VALUE_GROUPS > 0) {
            const int at = group + VALUE_GROUPS, after_it = group + VALUE_GROUPS * 3;
            LOCAL float& sum = besides[group][half];
            sum = multiply_add(low, brain_bits(scales[at / 2], at % 2), sum);
            sum = multiply_add(high, brain_bits(scales[after_it / 2], after_it % 2), sum);
            sum = multiply_add(-MORE, sum_of_two<T>(two), sum);
          }
        }
      }
    }

#pragma unroll
    for (int sixteen = 0; sixteen < EIGHTS / 2; ++sixteen) {
#pragma unroll
      for (int i = 0; i < VALUE_WORDS * (8 / VALUE_BITS); ++i) {
        const int word = i % VALUE_WORDS, upper = i / VALUE_WORDS;
        unsigned int made[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const LOCAL unsigned int* one = now.values[(sixteen * 2 + j) * 2], *other = now.values[(sixteen * 2 + j) * 2 + 1];
          if (VALUE_GROUPS == 0) {
            find_levels<T>(made[j], one[word], other[word], upper, levels);
          } else {
            count_values<T, VALUE_BITS>(made[j], one[word], other[word], upper);
          }
        }
        const int group = VALUE_GROUPS == 0 ? 0 : value_column(word, upper) / (VALUE_SIZE / SCALED);
        const LOCAL unsigned int* first_eight = weighed[group][sixteen * 2];
#pragma unroll
        for (int column = 0; column < 4; ++column) {
          multiply_halves<T, HALVES>(added[i * 4 + column], first_eight, first_eight + 2, made[0][column], made[1][column]);
        }
      }
    }
    now = next;
  }

  // What warps have found, together.
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    weight[half] += shuffle_xor(weight[half], 1);
    weight[half] += shuffle_xor(weight[half], 2);
#pragma unroll
    for (int group = 0; group < SCALED; ++group) {
      besides[group][half] += shuffle_xor(besides[group][half], 1);
      besides[group][half] += shuffle_xor(besides[group][half], 2);
    }
    const int query = half * 8 + up;
    if (across == 0) {
      of_warps[warp * PART + query] = most[half];
      weights[warp * PART + query] = weight[half];
    }
    if (first + query < count * GROUP) {
#pragma unroll
      for (int i = 0; i < VALUE_CHUNKS * 2; ++i) {
        const int chunk = i / 2, word = chunk / 4 % VALUE_WORDS, upper = chunk / 4 / VALUE_WORDS;
        const int begin_of = value_column(word, upper), column = begin_of + chunk % 4 + (across * 2 + i % 2) * VALUE_READ;
        const float besides_it = VALUE_GROUPS == 0 ? 0.0f : besides[VALUE_GROUPS == 0 ? 0 : begin_of / (VALUE_SIZE / SCALED)][half];
        ring[(warp * HALVES * 8 + query) * OUT + column] = added[chunk][half * 2 + i % 2] + besides_it;
      }
    }
  }
  group_barrier();
  const int those = count * GROUP - first < HALVES * 8 ? count * GROUP - first : HALVES * 8;
  for (int query = 0; query < those; ++query) {
    float all = nothing();
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
      all = larger(all, of_warps[other * PART + query]);
    }
    for (int column = thread_number; column < VALUE_SIZE; column += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) {
        const float factor = quick_power_of_two(of_warps[other * PART + query] - all);
        sum = multiply_add(factor, ring[(other * HALVES * 8 + query) * OUT + column], sum);
      }
      ring[query * OUT + column] = sum;
    }
  }
  group_barrier();
  if (VALUE_GROUPS == 0) {
    for (int query = warp; query < those; query += WARPS) {
      turn_back<VALUE_SIZE>(ring + query * OUT, constants + 16, lane);
    }
    group_barrier();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = half * 8 + up;
    if (query < those) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) {
        largest[half] = larger(largest[half], of_warps[other * PART + query]);
      }
#pragma unroll
      for (int other = 0; other < WARPS; ++other) {
        sum = multiply_add(quick_power_of_two(of_warps[other * PART + query] - largest[half]), weights[other * PART + query], sum);
      }
      total[0][half] = warp == 0 && across == 0 ? sum : 0.0f;
#pragma unroll
      for (int i = 0; i < COLUMNS * 2; ++i) {
        const int column = (warp * COLUMNS + i / 2) * 8 + across * 2 + i % 2;
        sums[0][i / 2][half * 2 + i % 2] = column < VALUE_SIZE ? ring[query * OUT + column] : 0.0f;
      }
    }
  }
  group_barrier();
  from = coded_units * UNIT;
}
