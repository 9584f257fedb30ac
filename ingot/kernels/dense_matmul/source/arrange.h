// Activations in the order in which lanes hold them in tile.h: of sixteen rows and 32 columns two quads each, a word of row
// lane / 4, one of the row eight below it, and their next words.
//
// given [rows, columns] -> arranged [WIDTH / 16, columns / 32, 2, 32, 8], with zeros where nothing is given
const int rows = given_shape[0], chunks = given_shape[1] / 8, halves = (chunks + 3) / 4;
const int number = int(threadgroup_position_in_grid.x) * WARPS + int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup), half = number % halves, block = number / halves;
AFTER_OTHERS()
if (block < WIDTH / 16) {
  const int row = block * 16 + lane / 4, chunk = half * 4 + lane % 4;
  const DEVICE uint4* const from = (const DEVICE uint4*)given + (size_t)row * chunks + chunk;
  const uint4 high = row < rows && chunk < chunks ? *from : no_bits();
  const uint4 low = row + 8 < rows && chunk < chunks ? from[8 * chunks] : no_bits();
  uint4 first, second;
  first.x = high.x; first.y = low.x; first.z = high.y; first.w = low.y;
  second.x = high.z; second.y = low.z; second.z = high.w; second.w = low.w;
  DEVICE uint4* const to = (DEVICE uint4*)arranged + (size_t)number * 64 + lane;
  to[0] = first;
  to[32] = second;
}
