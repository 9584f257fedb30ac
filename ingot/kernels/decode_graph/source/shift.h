// A thread a number: a bias is added to a product.
//
// product [tokens, SIZE], bias [SIZE] -> shifted [tokens, SIZE]
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  const size_t at = (size_t)threadgroup_position_in_grid.y * SIZE + i;
  shifted[at] = T(float(product[at]) + float(bias[i]));
}
