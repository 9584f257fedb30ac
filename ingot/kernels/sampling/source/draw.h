// One threadgroup, of as many threads as there are bins: draws the token of a row, of those that its filters keep.
//
// Filters are a least weight: the weights are sorted into bins by their first ten bits, of the bin that the edge falls into by
// the next ten, and by the last, so that all that weigh the same are kept or dropped together.
//
// logits [rows, vocab], how [rows, 5]: a temperature (0: the likeliest is taken), top-k (0: all), top-p, min-p, and a number in
// [0, 1) -> tokens [rows]
constexpr int THREADS = 1024, LANES = 32, LEVEL = 10;
SHARED_FLOATS(binned, THREADS * 3);
SHARED_FLOATS(totals, THREADS * 2);
SHARED_FLOATS(firsts, THREADS * 2);
SHARED_FLOATS(told, 16);
SHARED Sum* const sums = (SHARED Sum*)totals;     // of each thread
SHARED Sum* const of_lanes = (SHARED Sum*)firsts;  // of 32 neighbours each, and how many
SHARED unsigned int* const counts_of_lanes = (SHARED unsigned int*)(of_lanes + LANES);
SHARED Sum* const sums_told = (SHARED Sum*)told;
SHARED int* const numbers_told = (SHARED int*)(sums_told + 2);
Bins bins;
bins.counts = (SHARED unsigned int*)binned;
bins.low = bins.counts + THREADS;
bins.high = bins.low + THREADS;

const int thread = int(simdgroup_index_in_threadgroup) * LANES + int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.x), vocab = logits_shape[1];
const DEVICE float* scores = logits + (size_t)row * vocab;
const float temperature = how[row * 5], top_p = how[row * 5 + 2], min_p = how[row * 5 + 3];
const int top_k = int(how[row * 5 + 1]);
const unsigned int at = (unsigned int)(how[row * 5 + 4] * 16777216.0f);

// The first of the likeliest.
float most = nothing();
int likeliest = vocab;
#pragma unroll 4
for (int i = thread; i < vocab; i += THREADS) {
  const float score = scores[i];
  if (score > most) {
    most = score;
    likeliest = i;
  }
}
totals[thread] = most;
((SHARED int*)firsts)[thread] = likeliest;
group_barrier();
for (int width = LANES; width > 0; width -= LANES - 1) {  // 32 threads look at 32 each, then one at those
  if (thread < width) {
    for (int i = 1; i < LANES; ++i) {
      const int other = width == 1 ? i * LANES : thread * LANES + i;
      const int mine = width == 1 ? 0 : thread * LANES;
      const bool earlier = ((SHARED int*)firsts)[other] < ((SHARED int*)firsts)[mine];
      if (totals[other] > totals[mine] || (totals[other] == totals[mine] && earlier)) {
        totals[mine] = totals[other];
        ((SHARED int*)firsts)[mine] = ((SHARED int*)firsts)[other];
      }
    }
  }
  group_barrier();
}
most = totals[0];
likeliest = ((SHARED int*)firsts)[0] < vocab ? ((SHARED int*)firsts)[0] : 0;
group_barrier();
if (temperature == 0.0f) {
  if (thread == 0) {
    tokens[row] = likeliest;
  }
  return;
}

// Of what is no number, nothing.
#define WEIGHT(weight, i)                                                               \
  float weight = power_of_two((scores[i] - most) / temperature * 1.44269504088896341f); \
  weight = weight > 0.0f ? weight : 0.0f;

// The least weight that stays, as its bits: that at which so many are counted, then that at which enough is added up.
unsigned int least = bits_of(min_p);
const bool counted = top_k > 0 && top_k < vocab;
Sum whole = 0;  // what top-p is a share of
for (int round = counted ? 0 : 1; round < (top_p < 1.0f ? 2 : 1); ++round) {
  unsigned int edge = 0;
  int count_above = 0;
  Sum sum_above = 0, goal = 0;
  for (int shift = 2 * LEVEL; shift >= 0; shift -= LEVEL) {
    bins.clear(thread);
    group_barrier();
#pragma unroll 4
    for (int i = thread; i < vocab; i += THREADS) {
      WEIGHT(weight, i)
      const unsigned int bits = bits_of(weight);
      if (bits >> (shift + LEVEL) == edge) {
        bins.add(bits >> shift & (THREADS - 1), whole_of(weight));
      }
    }
    group_barrier();
    if (thread < LANES) {
      Sum sum = 0;
      unsigned int count = 0;
      for (int i = 0; i < LANES; ++i) {
        sum += bins.sum(thread * LANES + i);
        count += bins.counts[thread * LANES + i];
      }
      of_lanes[thread] = sum;
      counts_of_lanes[thread] = count;
    }
    group_barrier();
    if (thread == 0) {
      if (round == 1 && shift == 2 * LEVEL) {
        for (int i = 0; i < LANES && !counted; ++i) {
          whole += of_lanes[i];
        }
        goal = share_of(whole, (unsigned int)(top_p * 16777216.0f));
        goal = goal > 0 ? goal : 1;
      }
#define FALLS_SHORT(count, sum) \
  (round == 0 ? count_above + int(count) < top_k : sum_above + (sum) < goal)
      int lanes = LANES - 1;
      while (lanes > 0 && FALLS_SHORT(counts_of_lanes[lanes], of_lanes[lanes])) {
        count_above += counts_of_lanes[lanes];
        sum_above += of_lanes[lanes--];
      }
      int bin = lanes * LANES + LANES - 1;
      while (bin > lanes * LANES && FALLS_SHORT(bins.counts[bin], bins.sum(bin))) {
        count_above += bins.counts[bin];
        sum_above += bins.sum(bin--);
      }
#undef FALLS_SHORT
      numbers_told[0] = int(edge << LEVEL | (unsigned int)bin);
    }
    group_barrier();
    edge = (unsigned int)numbers_told[0];
  }
  if (round == 0) {
    whole = sum_above + (Sum)(top_k - count_above) * whole_of(from_bits(edge));
  }
  if (round == 1 || top_p >= 1.0f) {
    least = edge > least ? edge : least;
  }
}

// Where the running sum of what stays passes the draw: in which of 32 pieces, then in which thread's part of that.
#define KEPT(sum, i)                                   \
  {                                                    \
    WEIGHT(weight, i)                                  \
    sum += bits_of(weight) < least ? 0 : whole_of(weight); \
  }
const int piece = (vocab + LANES - 1) / LANES;
int begin = thread / LANES * piece, step = LANES, first = begin + thread % LANES;
int end = begin + piece < vocab ? begin + piece : vocab;
Sum goal = 0, before = 0;
for (int level = 0; level < 2; ++level) {
  Sum sum = 0;
#pragma unroll 4
  for (int i = first; i < end; i += step) {
    KEPT(sum, i)
  }
  sums[thread] = sum;
  group_barrier();
  if (thread < LANES) {
    Sum together = 0;
    for (int i = 0; i < LANES; ++i) {
      together += sums[thread * LANES + i];
    }
    of_lanes[thread] = together;
  }
  group_barrier();
  if (thread == 0) {
    if (level == 0) {
      Sum all = 0;
      for (int i = 0; i < LANES; ++i) {
        all += of_lanes[i];
      }
      goal = share_of(all, at);
    }
    int lanes = 0;
    while (lanes < LANES - 1 && before + of_lanes[lanes] <= goal) {
      before += of_lanes[lanes++];
    }
    int found = lanes * LANES;
    while (level == 1 && found < lanes * LANES + LANES - 1 && before + sums[found] <= goal) {
      before += sums[found++];
    }
    numbers_told[0] = found;
    sums_told[0] = before;
    sums_told[1] = goal;
  }
  group_barrier();
  if (level == 0) {
    const int from = numbers_told[0] / LANES * piece, till = from + piece < vocab ? from + piece : vocab;
    const int each = (piece + THREADS - 1) / THREADS;
    first = from + thread * each;
    end = first + each < till ? first + each : till;
    step = 1;
  } else if (thread == numbers_told[0]) {
    before = sums_told[0];
    goal = sums_told[1];
    int token = likeliest;  // where nothing weighs anything
    for (int i = first; i < end; ++i) {
      KEPT(before, i)
      if (before > goal) {
        token = i;
        break;
      }
    }
    tokens[row] = token;
  }
  group_barrier();
}
#undef KEPT
#undef WEIGHT
