// A thread a number of a token's embedding, out of BITS, or as it is stored, where there are none.
//
// tokens [tokens], weight [VOCAB, ROW], scales, biases [VOCAB, SIZE / GROUP] -> embedded [tokens, SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int given = tokens[token];
const size_t id = given < 0 || given >= VOCAB ? 0 : given;
if (i < SIZE) {
  if (BITS == 0) {
    embedded[(size_t)token * SIZE + i] = T(weight[id * ROW + i]);
  } else {
    const DEVICE unsigned int* words = (const DEVICE unsigned int*)(weight + id * ROW);
    const int begin = i * BITS, from = begin % 32;
    unsigned int code = words[begin / 32] >> from;
    if (from + BITS > 32) {
      code |= words[begin / 32 + 1] << (32 - from);
    }
    const size_t group = id * (SIZE / GROUP) + i / GROUP;
    code &= (1u << BITS) - 1u;
    embedded[(size_t)token * SIZE + i] = T(multiply_add(float(scales[group]), float(code), float(biases[group])));
  }
}
