// Matrix units on a CPU: every lane gives what it holds, and sums what is its own.
namespace emulator {
struct Tiles {
  unsigned given[2][WARP][6];  // of this product and of the one before, which slower lanes may still have to read
  int arrived;
  unsigned products;
};
static Tiles tiles[MOST_THREADS / WARP];

template <typename T>
inline float number(unsigned bits, int upper) {
  const uint16_t narrow = uint16_t(upper ? bits >> 16 : bits);
  T x;
  memcpy(&x, &narrow, 2);
  return float(x);
}
}  // namespace emulator

template <typename T>
inline void multiply_tiles(float* sums, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f) {
  using namespace emulator;
  const int lane = current->number % WARP;
  Tiles& mine = tiles[current->number / WARP];
  auto& given = mine.given[mine.products & 1];
  const unsigned held[6] = {a, b, c, d, e, f};
  memcpy(given[lane], held, sizeof(held));
  if (++mine.arrived == WARP) {
    mine.arrived = 0;
    ++mine.products;
    make_ready(current->number / WARP * WARP, WARP);
  }
  go_on();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float left = number<T>(given[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
      sums[i] = fmaf(left, number<T>(given[column * 4 + k % 8 / 2][4 + k / 8], k % 2), sums[i]);
    }
  }
}
inline unsigned bits_of(Brain x) { return x.bits; }
inline unsigned bits_of(Half x) {
  uint16_t bits;
  memcpy(&bits, &x, 2);
  return bits;
}
