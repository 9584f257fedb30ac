// One threadgroup a token: how a router scores experts, which of them are the token's, and what these are multiplied by.
//
// logits [tokens, ROW], of which the first EXPERTS are read; bias [EXPERTS], added to scores where the best are chosen, and not
// where they are weights; factors [EXPERTS], which the experts' weights are multiplied by; numbers [8] (what is added to a sum
// of scores, what all weights are multiplied by); slots [tokens or more, 2] for keys: those of tokens that are not there are
// negative, and their experts those of the first token, whose weights are read anyway -> chosen, weights [tokens * TOP], the
// best first
//
// SCORES 0: softmax of all logits, rounded like them; 1: sigmoids; 2: logits. SHARES 0: scores are the weights; 1: they are
// divided by the sum of those chosen; 2: softmax of those chosen. With GROUPS, only members of the TOP_GROUPS best keep their
// scores, by the two best of each. Of equals the LATER are better, or the earlier.
constexpr int THREADS = WARPS * 32, EACH = (EXPERTS + THREADS - 1) / THREADS, PADDED = (EXPERTS + 3) / 4 * 4;
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup), thread = warp * 32 + lane;
const int token = int(threadgroup_position_in_grid.x);
SHARED_FLOATS(ranked, PADDED);
SHARED_FLOATS(parts, 2 * WARPS);
SHARED_FLOATS(group_scores, GROUPS);
SHARED_FLOATS(best, TOP);
SHARED_FLOATS(numbers_of_best, TOP);
SHARED int* const best_experts = (SHARED int*)numbers_of_best;
#define SUM_OF_LANES(of, JOIN)                  \
  for (int step = 16; step > 0; step /= 2) {    \
    const float other = shuffle_xor(of, step);  \
    of = JOIN;                                  \
  }
float biases[EACH];
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  biases[n] = BIASED && n * THREADS + thread < EXPERTS ? bias[n * THREADS + thread] : 0.0f;
}
AFTER_OTHERS()
const DEVICE T* const own = logits + (size_t)(slots[2 * token] < 0 ? 0 : token) * ROW;
float scores[EACH], most = nothing();
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * THREADS + thread;
  scores[n] = i < EXPERTS ? float(own[i]) : nothing();
  most = larger(most, scores[n]);
}
if (SCORES == 0) {
  SUM_OF_LANES(most, larger(most, other))
  if (lane == 0) {
    parts[warp] = most;
  }
  group_barrier();
  for (int i = 0; i < WARPS; ++i) {
    most = larger(most, parts[i]);
  }
  float sum = 0.0f, whole = 0.0f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    scores[n] = power_of_two(1.44269504f * (scores[n] - most));
    sum += scores[n];
  }
  SUM_OF_LANES(sum, sum + other)
  if (lane == 0) {
    parts[WARPS + warp] = sum;
  }
  group_barrier();
  for (int i = 0; i < WARPS; ++i) {
    whole += parts[WARPS + i];
  }
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    scores[n] = float(T(scores[n] / whole));
  }
} else if (SCORES == 1) {
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    scores[n] = 1.0f / (1.0f + power_of_two(-1.44269504f * scores[n]));
  }
}

// What is no number is the least, so that experts have an order whatever they are scored.
constexpr float LEAST = -3.4028235e38f;
#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * THREADS + thread;
  const float score = scores[n] + biases[n];
  if (i < PADDED) {
    ranked[i] = i >= EXPERTS ? nothing() : score > LEAST ? score : LEAST;
  }
}
group_barrier();
if (GROUPS > 1) {
  constexpr int MEMBERS = EXPERTS / GROUPS;
  if (thread < GROUPS) {
    float first = nothing(), second = nothing();
    for (int i = thread * MEMBERS; i < (thread + 1) * MEMBERS; ++i) {
      const float score = ranked[i];
      second = score > first ? first : larger(second, score);
      first = larger(first, score);
    }
    group_scores[thread] = MEMBERS > 1 ? first + second : first;
  }
  group_barrier();
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = n * THREADS + thread, group = i / MEMBERS;
    int better = 0;
    for (int other = 0; i < EXPERTS && other < GROUPS; ++other) {
      better += group_scores[other] > group_scores[group] || (group_scores[other] == group_scores[group] && other > group);
    }
    if (i < EXPERTS && better >= TOP_GROUPS) {
      ranked[i] = 0.0f;
    }
  }
  group_barrier();
}

#pragma unroll
for (int n = 0; n < EACH; ++n) {
  const int i = n * THREADS + thread;
  const float score = i < EXPERTS ? ranked[i] : nothing();
  int better = 0;
  for (int j = 0; j < PADDED; j += 4) {
    float others[4];
    read_four(ranked + j, others);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      better += others[m] > score || (others[m] == score && (LATER ? j + m > i : j + m < i));
    }
  }
  if (i < EXPERTS && better < TOP) {
    best[better] = scores[n];
    best_experts[better] = i;
  }
}
group_barrier();
if (thread < TOP) {
  float weight = best[thread], sum = 0.0f;
  for (int i = 0; SHARES > 0 && i < TOP; ++i) {
    sum += SHARES == 1 ? best[i] : power_of_two(1.44269504f * (best[i] - best[0]));
  }
  if (SHARES == 2) {
    weight = power_of_two(1.44269504f * (weight - best[0]));
  }
  if (SHARES > 0) {
    weight = weight / (sum + numbers[0]);
  }
  weight *= FACTORED ? numbers[1] * factors[best_experts[thread]] : numbers[1];
  chosen[token * TOP + thread] = best_experts[thread];
  weights[token * TOP + thread] = weight;
}
#undef SUM_OF_LANES
