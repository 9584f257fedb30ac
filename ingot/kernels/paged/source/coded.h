// Pages in fewer bits: codes become numbers, and sums of what was rotated are turned back.
#define CODED_PAGES

// value(key, column, code) for the codes of KEYS vectors in shared memory, rounded, to lines of numbers: each thread takes
// sixteen bytes at a time. With four bits a byte's upper half is of a column SIZE / 2 further on.
template <typename T, int BITS, int SIZE, int LINE, int KEYS, int THREADS, typename Value>
INLINE void unpack_codes(const SHARED float* codes, SHARED float* to, int thread_number, const Value& value) {
  constexpr int BYTES = SIZE * BITS / 8, CHUNKS = KEYS * BYTES / 16;
#pragma unroll
  for (int first = 0; first < CHUNKS; first += THREADS) {
    const int at = first + thread_number;
    if (CHUNKS % THREADS == 0 || at < CHUNKS) {
      const int key = at / (BYTES / 16), column = at % (BYTES / 16) * 16;
      const SHARED unsigned int* words = (const SHARED unsigned int*)(codes + at * 4);
#pragma unroll
      for (int half = 0; half < 8 / BITS; ++half) {
        SHARED unsigned int* line = (SHARED unsigned int*)(to + key * LINE) + (column + half * (SIZE / 2)) / 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const unsigned int pair = words[i / 2] >> (i % 2 * 16 + half * BITS);
          const int low = int(pair & ((1 << BITS) - 1)), high = int(pair >> 8 & ((1 << BITS) - 1));
          const int place = column + half * (SIZE / 2) + i * 2;
          line[i] = two_of<T>(value(key, place, low), value(key, place + 1, high));
        }
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
