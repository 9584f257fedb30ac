// Pages in fewer bits: codes become numbers, and sums of what was rotated are turned back.
#define CODED_PAGES

// What the codes of sixteen neighbouring columns are worth: of steps and leasts, or of levels in `step` alone.
struct Scale {
  float step, least;
};

// A whole number below 2^23 as it is put together from bits: converting takes longer.
INLINE float counted(unsigned int code) { return from_bits(0x4b000000u | code) - 8388608.0f; }
INLINE float brain_bits(unsigned short bits) { return from_bits((unsigned int)bits << 16); }

template <typename T>
INLINE float lower(unsigned int two);
template <>
INLINE float lower<Brain>(unsigned int two) { return from_bits(two << 16); }
template <>
INLINE float lower<Half>(unsigned int two) { return from_half(two & 0xffffu); }
template <typename T>
INLINE float upper(unsigned int two);
template <>
INLINE float upper<Brain>(unsigned int two) { return from_bits(two & 0xffff0000u); }
template <>
INLINE float upper<Half>(unsigned int two) { return from_half(two >> 16); }

// pair(scale(key, column), column, code, the next one) of KEYS vectors in shared memory, to lines of numbers: each thread takes
// sixteen bytes at a time. With four bits a byte's upper half is of a column SIZE / 2 further on.
template <int BITS, int SIZE, int LINE, int KEYS, int THREADS, typename ScaleOf, typename Pair>
INLINE void unpack_codes(const SHARED float* codes, SHARED float* to, int thread_number, const ScaleOf& scale, const Pair& pair) {
  constexpr int BYTES = SIZE * BITS / 8, CHUNKS = KEYS * BYTES / 16;
  constexpr unsigned int MASK = (1u << BITS) - 1;
#pragma unroll
  for (int first = 0; first < CHUNKS; first += THREADS) {
    const int at = first + thread_number;
    if (CHUNKS % THREADS == 0 || at < CHUNKS) {
      const int key = at / (BYTES / 16), begin = at % (BYTES / 16) * 16;
      const uint4 four = *(const SHARED uint4*)(codes + at * 4);
      const unsigned int words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int half = 0; half < 8 / BITS; ++half) {
        const int column = begin + half * (SIZE / 2);
        const Scale own = scale(key, column);
        unsigned int made[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const unsigned int both = words[i / 2] >> (i % 2 * 16 + half * BITS);
          made[i] = pair(own, column + i * 2, both & MASK, both >> 8 & MASK);
        }
        SHARED uint4* line = (SHARED uint4*)(to + key * LINE + column / 2);
        uint4 low, high;
        low.x = made[0]; low.y = made[1]; low.z = made[2]; low.w = made[3];
        high.x = made[4]; high.y = made[5]; high.z = made[6]; high.w = made[7];
        line[0] = low;
        line[1] = high;
      }
    }
  }
}

// A warp turns a vector of sums back: a Hadamard transform, then the signs.
template <int SIZE>
INLINE void turn_back(SHARED float* x, const DEVICE float* signs, int lane) {
  constexpr int EACH = SIZE / 32;
  float own[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    own[i] = x[i * 32 + lane];
  }
#pragma unroll
  for (int apart = 1; apart < EACH; apart *= 2) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if ((i & apart) == 0) {
        const float one = own[i], other = own[i + apart];
        own[i] = one + other;
        own[i + apart] = one - other;
      }
    }
  }
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float other = shuffle_xor(own[i], apart);
      own[i] = (lane & apart) == 0 ? own[i] + other : other - own[i];
    }
  }
  const float even = 1.0f / root(float(SIZE));
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    x[i * 32 + lane] = own[i] * even * signs[i * 32 + lane];
  }
}
