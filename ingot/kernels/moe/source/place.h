// A thread a pair of a token and an expert: in which slot the expert lies. One that is in none weighs nothing, as though in the first.
//
// chosen, weights [pairs], table: slots by expert, of several layers, below zero where there is none; begins [8]: where this layer's
// slots begin in the table, and its pairs in what is noted; noted: which experts were chosen, written in place -> places, kept [pairs]
const int pair = int(threadgroup_position_in_grid.x) * THREADS +
                 int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (pair < chosen_shape[0]) {
  const int expert = chosen[pair], slot = table[begins[0] + expert];
  places[pair] = slot < 0 ? 0 : slot;
  kept[pair] = slot < 0 ? 0.0f : weights[pair];
  ((DEVICE int*)noted)[begins[1] + pair] = expert;
}
