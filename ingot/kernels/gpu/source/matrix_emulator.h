// Matrix units on a CPU: every lane gives what it holds, the last one multiplies, and each takes the sums that are its own.
namespace emulator {
typedef float Row __attribute__((vector_size(32)));  // a row of sums

struct Tiles {
  unsigned given[WARP][6];
  Row sums[2][16];  // of this product and of the one before, which slower lanes may still have to read
  int arrived;
  unsigned products;
};
static Tiles tiles[MOST_THREADS / WARP];

// Where lanes of a warp say that rows of tiles lie, as above.
struct Places {
  const uint16_t* given[2][WARP];
  int arrived;
  unsigned loads;
};
static Places places[MOST_THREADS / WARP];

// Copies of a thread that it has not waited for: they may be done at any time until then, or never.
struct Copy {
  void* to;
  const void* from;
  bool there;
  int bytes;
  unsigned batch;
};
struct Copies {
  Copy pending[1024];
  int count;
  unsigned batch;
};
static Copies copies[MOST_THREADS];

inline void copy_now(const Copy& copy);

static const bool as_on_cuda = [] {
  most_shared = 48 * 1024;  // a group has more of it there
  forget = [] {
    for (int warp = 0; warp < size / WARP; ++warp) tiles[warp].arrived = places[warp].arrived = 0;
    for (int thread = 0; thread < size; ++thread) copies[thread].count = 0;
  };
  arrive = [] {
    Copies& mine = copies[current->number];
    int kept = 0;
    for (int i = 0; i < mine.count; ++i) {
      if (state != 0 && drawn(2) == 0) copy_now(mine.pending[i]);
      else mine.pending[kept++] = mine.pending[i];
    }
    mine.count = kept;
  };
  return true;
}();

inline void copy_now(const Copy& copy) {
  if (copy.there) memcpy(copy.to, copy.from, copy.bytes);
  else memset(copy.to, 0, copy.bytes);
}

inline void copy_later(Copy copy) {
  Copies& mine = copies[current->number];
  copy.batch = mine.batch;
  if (state != 0 && drawn(2) == 0) copy_now(copy);
  else if (mine.count == 1024) fail("more copies on their way than are kept here");
  else mine.pending[mine.count++] = copy;
}

template <typename T>
inline float number(unsigned bits, int upper) {
  const uint16_t narrow = uint16_t(upper ? bits >> 16 : bits);
  T x;
  memcpy(&x, &narrow, 2);
  return float(x);
}
}  // namespace emulator

namespace emulator {
// Sums grow column by column of the left tile. A product of two numbers of 16 bits is exact, so nothing has to be fused.
template <typename T>
QUICK void multiply(Row* sums, const unsigned (&given)[WARP][6]) {
  Row right[16];
  for (int k = 0; k < 16; ++k)
    for (int column = 0; column < 8; ++column) right[k][column] = number<T>(given[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) sums[row] += number<T>(given[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * right[k];
}

// Where the lane's sums are, once the last lane has come.
template <typename T>
QUICK float* give_tiles(const float* sums, const unsigned (&held)[6]) {
  const int lane = current->number % WARP;
  Tiles& mine = tiles[current->number / WARP];
  Row* rows = mine.sums[mine.products & 1];
  memcpy(mine.given[lane], held, sizeof(held));
  float* own = reinterpret_cast<float*>(rows) + lane / 4 * 8 + lane % 4 * 2;
  for (int i = 0; i < 4; ++i) own[i / 2 * 64 + i % 2] = sums[i];
  if (++mine.arrived == WARP) {
    mine.arrived = 0;
    ++mine.products;
    multiply<T>(rows, mine.given);
    make_ready(current->number / WARP * WARP, WARP);
  }
  return own;
}
}  // namespace emulator

template <typename T>
MERGED void multiply_tiles(float* sums, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f) {
  const unsigned held[6] = {a, b, c, d, e, f};
  const float* own = emulator::give_tiles<T>(sums, held);
  emulator::go_on();
  for (int i = 0; i < 4; ++i) sums[i] = own[i / 2 * 64 + i % 2];
}

template <typename T>
inline unsigned bits_of(T x) {
  unsigned short bits;
  memcpy(&bits, &x, 2);
  return bits;
}
template <typename T>
inline unsigned two_of(float low, float high) {
  const T both[2] = {T(low), T(high)};
  unsigned two;
  memcpy(&two, both, 4);
  return two;
}
inline float quick_power_of_two(float x) {
  const float power = exp2f(x);
  return power < 1.1754944e-38f ? 0.0f : power;
}

inline void gather_tiles(unsigned* to, const float* row, bool turned) {
  using namespace emulator;
  const int lane = current->number % WARP;
  Places& mine = places[current->number / WARP];
  auto& given = mine.given[mine.loads & 1];
  given[lane] = reinterpret_cast<const uint16_t*>(row);
  if (++mine.arrived == WARP) {
    mine.arrived = 0;
    ++mine.loads;
    make_ready(current->number / WARP * WARP, WARP);
  }
  go_on();
  for (int tile = 0; tile < 4; ++tile) {
    const uint16_t* const* rows = given + tile * 8;
    const int line = lane / 4, pair = lane % 4 * 2;
    const unsigned low = turned ? rows[pair][line] : rows[line][pair];
    to[tile] = low | unsigned(turned ? rows[pair + 1][line] : rows[line][pair + 1]) << 16;
  }
}
inline void load_tiles(unsigned* to, const float* row) { gather_tiles(to, row, false); }
inline void load_turned_tiles(unsigned* to, const float* row) { gather_tiles(to, row, true); }

inline void copy_chunk(float* to, const void* from, bool there) { emulator::copy_later({to, from, there, 16, 0}); }
inline void pass_chunk(float* to, const void* from, bool there) { copy_chunk(to, from, there); }
template <int BYTES>
inline void copy_bytes(void* to, const void* from) {
  emulator::copy_later({to, from, true, BYTES, 0});
}
inline void end_copies() { ++emulator::copies[emulator::current->number].batch; }
template <int N>
inline void wait_for_copies() {
  using namespace emulator;
  Copies& mine = copies[current->number];
  int kept = 0;
  for (int i = 0; i < mine.count; ++i) {
    if (mine.pending[i].batch + N < mine.batch) copy_now(mine.pending[i]);
    else mine.pending[kept++] = mine.pending[i];
  }
  mine.count = kept;
}
inline void store_two(float* to, float low, float high) {
  to[0] = low;
  to[1] = high;
}

#define LENT_FLOATS(name, count) float* name = emulator::lent_floats(count)
