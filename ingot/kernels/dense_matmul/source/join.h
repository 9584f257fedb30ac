// Adds up what SPLIT threadgroups found of each product, neighbours first, and does what becomes of it.
//
// sums [SPLIT, rows, lines] -> y [rows, lines]; BIASED, ADDED and GATED as where a product is not split
#ifdef GATED
const int outputs = sums_shape[2] / 2;
#else
const int outputs = sums_shape[2];
#endif
const int rows = sums_shape[1], lines = sums_shape[2];
const int number = (int(threadgroup_position_in_grid.x) * WARPS + int(simdgroup_index_in_threadgroup)) * 32 +
                   int(thread_index_in_simdgroup);
if (number < rows * outputs) {
  const int row = number / outputs, output = number % outputs;
  const DEVICE float* const own = sums + (size_t)row * lines + output;
  float sum = Pairwise<SPLIT>::sum(own, rows * lines);
#ifdef BIASED
  sum += float(bias[output]);
#endif
#ifdef ADDED
  sum = float(T(sum)) + float(residual[number]);
#endif
#ifdef GATED
  y[number] = gated(T(sum), T(Pairwise<SPLIT>::sum(own + outputs, rows * lines)));
#else
  y[number] = T(sum);
#endif
}
