// The sums of each row's activations over groups of columns, which meet the groups' biases, in the order of multiply.h.
//
// given [rows, columns] -> totals [groups, rows or more]; those of rows that are not there mean nothing
constexpr int LOT = GROUP / 4;
typedef typename Pairs<T>::Number N;
typedef Packed<N, BITS, GROUP, FLOATS, Pairs<T>::EXACT> Numbers;
const int lane = int(thread_index_in_simdgroup), up = lane / 4, across = lane % 4;
const int number = int(threadgroup_position_in_grid.x) * WARPS + int(simdgroup_index_in_threadgroup);
const int rows = given_shape[0], groups = given_shape[1] / GROUP, group = number % groups, eight = number / groups;
if (eight < WIDTH / 8) {
  const int row = least(eight * 8 + up, rows - 1);
  float sums[4];
  clear_tile(sums);
#pragma unroll
  for (int i = 0; i < LOT / 8; ++i) {
    Eight<T> held;
    unsigned int pairs[1][4];
    load_eight(held, given + ((size_t)row * groups + group) * GROUP + across * LOT + i * 8);
    Pairs<T>::of(held, pairs);
#pragma unroll
    for (int two = 0; two < 4; two += 2) {
      multiply_tiles<N>(sums, Numbers::ONES, Numbers::ONES, Numbers::ONES, Numbers::ONES, pairs[0][two], pairs[0][two + 1]);
    }
  }
  if (up == 0) {
    totals[(size_t)group * WIDTH + eight * 8 + across * 2] = sums[0];
    totals[(size_t)group * WIDTH + eight * 8 + across * 2 + 1] = sums[1];
  }
}
