// Pages in fewer bits: codes become numbers as matrix units take them, and sums of what was rotated are turned back.
#define CODED_PAGES
#ifdef __CUDACC__
INLINE unsigned int to_bits(float x) { return __float_as_uint(x); }
// Four of eight bytes, as four digits say: those of `low` come first. A digit of 8 more asks for the first bit alone, eight times.
INLINE unsigned int picked(unsigned int low, unsigned int high, unsigned int digits) { return __byte_perm(low, high, digits); }
#else
struct uint2 {
  unsigned int x, y;
};
INLINE unsigned int to_bits(float x) {
  unsigned int bits;
  memcpy(&bits, &x, 4);
  return bits;
}
INLINE unsigned int picked(unsigned int low, unsigned int high, unsigned int digits) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned int made = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned int digit = digits >> i * 4 & 15, byte = both >> digit % 8 * 8 & 255;
    made |= (digit < 8 ? byte : byte / 128 * 255) << i * 8;
  }
  return made;
}
#endif

// Words that lie one behind another, in chunks of so many bytes that are read at once.
template <int BYTES, int CHUNK>
INLINE void read_words(LOCAL unsigned int* to, const DEVICE unsigned char* from) {
#pragma unroll
  for (int i = 0; i < BYTES / CHUNK; ++i) {
    if (CHUNK == 16) {
      const uint4 four = ((const DEVICE uint4*)from)[i];
      to[i * 4] = four.x; to[i * 4 + 1] = four.y; to[i * 4 + 2] = four.z; to[i * 4 + 3] = four.w;
    } else if (CHUNK == 8) {
      const uint2 two = ((const DEVICE uint2*)from)[i];
      to[i * 2] = two.x; to[i * 2 + 1] = two.y;
    } else {
      to[i] = ((const DEVICE unsigned int*)from)[i];
    }
  }
}

// A whole number below 2^23 as it is put together from bits: converting takes longer.
INLINE float counted(unsigned int code) { return from_bits(0x4b000000u | code) - 8388608.0f; }
INLINE float size_of(float x) { return larger(x, -x); }
// One of the two numbers in a word, as bfloat16.
INLINE float brain_bits(unsigned int two, int upper) { return from_bits(upper ? two & 0xffff0000u : two << 16); }

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

// Codes are put below numbers of 16 bits whose last bit counts as one: as many more than the code are they.
constexpr unsigned int HALVES_OF_1024 = 0x64006400u;
constexpr float MORE_IN_KEYS = 1024.0f;
template <typename T, int BITS>
struct Counting;
template <int BITS>
struct Counting<Half, BITS> {
  CONSTANT unsigned int ABOVE = HALVES_OF_1024;
  CONSTANT float MORE = 1024.0f;
};
template <int BITS>
struct Counting<Brain, BITS> {  // whose last bit counts as one from 128 on: that leaves room for four bits, not for eight
  CONSTANT unsigned int ABOVE = 0x43004300u;
  CONSTANT float MORE = BITS == 4 ? 128.0f : 0.0f;
};

// Codes of four neighbouring columns of a key, with four bits those of the lower or the upper halves of bytes, as halves: the
// first and third, then the second and fourth.
template <int BITS>
INLINE void count_keys(LOCAL unsigned int* made, unsigned int word, int upper) {
  if (BITS == 8) {
    made[0] = picked(word, HALVES_OF_1024, 0x5250u);
    made[1] = picked(word, HALVES_OF_1024, 0x5351u);
  } else {
    made[0] = (word >> upper * 4 & 0x000f000fu) | HALVES_OF_1024;
    made[1] = (word >> (upper * 4 + 8) & 0x000f000fu) | HALVES_OF_1024;
  }
}

// Codes of four neighbouring columns of two values: for each column, both as numbers.
template <typename T, int BITS>
INLINE void count_values(LOCAL unsigned int* made, unsigned int one, unsigned int other, int upper) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned int both = picked(one, other, 0x0400u + i * 0x1111u) >> upper * 4;
    if (BITS == 4) {
      made[i] = (both & 0x000f000fu) | Counting<T, 4>::ABOVE;
    } else if (Counting<T, 8>::MORE != 0.0f) {
      made[i] = (both & 0x00ff00ffu) | Counting<T, 8>::ABOVE;
    } else {
      made[i] = two_of<T>(counted(both & 0xffu), counted(both >> 16 & 0xffu));
    }
  }
}

// Sixteen levels, of which the lower eight are the upper ones below zero: the bytes of those, in registers.
struct Levels {
  unsigned int low[2], high[2];
};
template <typename T>
INLINE void keep_levels(LOCAL Levels& kept, const DEVICE float* levels) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const DEVICE float* four = levels + 8 + i * 4;
    const unsigned int one = two_of<T>(four[0], four[1]), other = two_of<T>(four[2], four[3]);
    kept.low[i] = picked(one, other, 0x6420u);
    kept.high[i] = picked(one, other, 0x7531u);
  }
}

// The same of codes of four bits that stand for levels. A code's place among the eight is its last three bits, or, below eight,
// what those lack of seven.
template <typename T>
INLINE void find_levels(LOCAL unsigned int* made, unsigned int one, unsigned int other, int upper, const LOCAL Levels& kept) {
  const unsigned int low_half = upper ? one >> 4 : one, high_half = upper ? other : other << 4;
  const unsigned int codes = high_half ^ ((low_half ^ high_half) & 0x0f0f0f0fu), of_one = codes << 4;
  const unsigned int positive = codes & 0x88888888u, places = (codes ^ ~(positive - (positive >> 3))) & 0x77777777u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned int own = i == 0 ? places : places >> 16, signs = picked(of_one, codes, i == 0 ? 0xd9c8u : 0xfbeau);
    const unsigned int low = picked(kept.low[0], kept.low[1], own);
    const unsigned int high = picked(kept.high[0], kept.high[1], own) ^ (~signs & 0x80808080u);
    made[i * 2] = picked(low, high, 0x5140u);
    made[i * 2 + 1] = picked(low, high, 0x7362u);
  }
}

// As `multiply_tiles`; where there is one half alone, nothing is below the first eight rows.
template <typename T, int HALVES>
INLINE void multiply_halves(LOCAL float* sums, const LOCAL unsigned int* first, const LOCAL unsigned int* second, unsigned int e,
                            unsigned int f) {
  if (HALVES == 2) {
    multiply_tiles<T>(sums, first[0], first[1], second[0], second[1], e, f);
  } else {
    float both[4] = {sums[0], sums[1], 0.0f, 0.0f};
    multiply_tiles<T>(both, first[0], 0u, second[0], 0u, e, f);
    sums[0] = both[0];
    sums[1] = both[1];
  }
}

// Of a scale, as it lies in memory.
INLINE float brain_at(const DEVICE unsigned char* scale) { return from_bits((unsigned int)*(const DEVICE unsigned short*)scale << 16); }

// Eight neighbouring numbers of a vector whose codes are evenly spaced, by groups of columns: steps, then leasts.
template <int BITS, int SIZE, int GROUPS>
INLINE void spread_eight(LOCAL float* to, const DEVICE unsigned char* codes, const DEVICE unsigned char* scales, int column) {
  const int upper = BITS == 4 && column >= SIZE / 2, group = column / (SIZE / GROUPS);
  const uint2 words = *(const DEVICE uint2*)(codes + (upper ? column - SIZE / 2 : column));
  const float step = size_of(brain_at(scales + group * 2)), least = brain_at(scales + (GROUPS + group) * 2);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned int word = (i < 4 ? words.x : words.y) >> (i % 4 * 8 + upper * 4);
    to[i] = counted(word & ((1u << BITS) - 1u)) * step + least;
  }
}

template <typename T>
INLINE void store_rounded(DEVICE T* to, const LOCAL float* from) {
  Eight<T> eight;
  eight.raw.x = two_of<T>(from[0], from[1]);
  eight.raw.y = two_of<T>(from[2], from[3]);
  eight.raw.z = two_of<T>(from[4], from[5]);
  eight.raw.w = two_of<T>(from[6], from[7]);
  store_eight(to, eight);
}

// A warp turns a vector back, of which lanes hold neighbours: a Hadamard transform, then the signs.
template <int EACH>
INLINE void turn_own_back(LOCAL float* own, const DEVICE float* signs, int lane) {
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
  const float even = 1.0f / root(float(EACH * 32));
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    own[i] = own[i] * even * signs[i * 32 + lane];
  }
}

// The same of a vector of sums.
template <int SIZE>
INLINE void turn_back(SHARED float* x, const DEVICE float* signs, int lane) {
  constexpr int EACH = SIZE / 32;
  float own[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    own[i] = x[i * 32 + lane];
  }
  turn_own_back<EACH>(own, signs, lane);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    x[i * 32 + lane] = own[i];
  }
}
