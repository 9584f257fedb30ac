// A thread a number: what a token's adapter adds to a product, which may be of several layers one behind another.
//
// product [tokens, SIZE], inner [tokens, PARTS * RANK], matrices [adapters, SIZE, RANK], places [tokens]
// -> sums [tokens, SIZE]; the first layer ends at FIRST, the second at SECOND, the next at THIRD. At place 0 is no adapter.
// GATED: the first of two layers, or the first half of one, is a gate's -> silu(gate) * other [tokens, SIZE / 2]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int place = places[token];
const DEVICE T* given = product + (size_t)token * SIZE;
const DEVICE T* x = inner + (size_t)token * PARTS * RANK;
const DEVICE T* rows = matrices + (size_t)(place > 0 ? place : 0) * SIZE * RANK;
#define SUM(AT, PART)                                                                                           \
  (place > 0 ? T(float(given[AT]) + float(column<T, RANK>(x + (PART) * RANK, rows + (size_t)(AT) * RANK))) : given[AT])
#ifdef GATED
constexpr int HALF = SIZE / 2;
if (i < HALF) {
  sums[(size_t)token * HALF + i] = gated(T(SUM(i, 0)), T(SUM(HALF + i, PARTS - 1)));
}
#else
if (i < SIZE) {
  sums[(size_t)token * SIZE + i] = SUM(i, (i >= FIRST ? 1 : 0) + (i >= SECOND ? 1 : 0) + (i >= THIRD ? 1 : 0));
}
#endif
