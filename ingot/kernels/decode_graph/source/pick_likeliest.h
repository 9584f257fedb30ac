// One warp a row: the first of the likeliest tokens of all slices.
//
// found [rows, SLICES, 2], drafts [rows, ROW], whose number at AT is written -> tokens [rows]
const int row = int(threadgroup_position_in_grid.x);
if (thread_index_in_simdgroup == 0) {
  const DEVICE float* slices = found + (size_t)row * SLICES * 2;
  float most = slices[0], likeliest = slices[1];
  for (int slice = 1; slice < SLICES; ++slice) {
    if (slices[slice * 2] > most) {
      most = slices[slice * 2];
      likeliest = slices[slice * 2 + 1];
    }
  }
  tokens[row] = int(likeliest);
  ((DEVICE int*)drafts)[(size_t)row * ROW + AT] = int(likeliest);
}
