// What a lane holds of a row of packed weights: numbers of a few bits, one behind another as they lie in memory.
#ifdef __CUDACC__
// Read once, so that they do not push out of the first-level cache what is read again.
INLINE uint4 pass_by(const DEVICE uint4* from) {
  uint4 raw;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(from));
  return raw;
}
INLINE uint2 pass_by(const DEVICE uint2* from) {
  uint2 raw;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "l"(from));
  return raw;
}
#else
struct uint2 {
  unsigned int x, y;
};
INLINE uint4 pass_by(const DEVICE uint4* from) { return *from; }
INLINE uint2 pass_by(const DEVICE uint2* from) { return *from; }
#endif

template <int BYTES>
struct Lot {
  unsigned int words[(BYTES + 3) / 4];
};

template <int BYTES>
INLINE void clear_lot(LOCAL Lot<BYTES>& lot) {
#pragma unroll
  for (int i = 0; i < (BYTES + 3) / 4; ++i) {
    lot.words[i] = 0;
  }
}

// BYTES of which begin at a multiple of themselves, or of their largest power of two.
template <int BYTES>
INLINE void load_lot(LOCAL Lot<BYTES>& lot, const DEVICE unsigned char* from) {
  if (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 raw = pass_by((const DEVICE uint4*)from + i);
      lot.words[i * 4] = raw.x; lot.words[i * 4 + 1] = raw.y; lot.words[i * 4 + 2] = raw.z; lot.words[i * 4 + 3] = raw.w;
    }
  } else if (BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) {
      const uint2 raw = pass_by((const DEVICE uint2*)from + i);
      lot.words[i * 2] = raw.x; lot.words[i * 2 + 1] = raw.y;
    }
  } else if (BYTES % 4 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) {
      lot.words[i] = ((const DEVICE unsigned int*)from)[i];
    }
  } else {
    clear_lot(lot);
    constexpr int UNIT = BYTES % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < BYTES / UNIT; ++i) {
      const unsigned int raw = UNIT == 2 ? ((const DEVICE unsigned short*)from)[i] : from[i];
      lot.words[i * UNIT / 4] |= raw << i * UNIT % 4 * 8;
    }
  }
}

// The number at `bit`.
template <int BITS, int BYTES>
INLINE unsigned int number_at(const LOCAL Lot<BYTES>& lot, int bit) {
  const int word = bit / 32, shift = bit % 32;
  unsigned int raw = lot.words[word] >> shift;
  if (shift + BITS > 32) {
    raw |= lot.words[word + 1] << (32 - shift);
  }
  return raw & ((1u << BITS) - 1);
}

// Of the lot's next eight numbers, the ones at `i` and at `i` + 4, in the halves of a word.
template <int BITS, int BYTES>
INLINE unsigned int two_at(const LOCAL Lot<BYTES>& lot, int eight, int i) {
  if (BITS == 4) {
    return lot.words[eight] >> 4 * i & 0x000f000fu;
  }
  if (BITS == 2) {
    const unsigned int raw = lot.words[eight / 2] >> eight % 2 * 16;
    return (raw >> 2 * i & 0x3u) | (raw << 8 >> 2 * i & 0x30000u);
  }
  return number_at<BITS>(lot, (eight * 8 + i) * BITS) | number_at<BITS>(lot, (eight * 8 + i + 4) * BITS) << 16;
}

// Whole numbers as the matrix units take them. Bits that are put behind those of a power of two are added to it, which takes
// one instruction for two of them; the power is OFFSET, and what it adds to a sum has to be taken off. Where that would cost
// precision, or where a number has no room there, it is made as float32 first.
template <typename N, bool EXACT>
struct Whole {
  CONSTANT float OFFSET = 0.0f;
  CONSTANT unsigned int ONES = 0x3f803f80u;
  static INLINE unsigned int of(unsigned int two) {
    const float low = from_bits((two & 0xffu) | 0x4b000000u) - 8388608.0f;
    const float high = from_bits(two >> 16 | 0x4b000000u) - 8388608.0f;
    return two_of<N>(low, high);
  }
};
template <>
struct Whole<Brain, false> {
  CONSTANT float OFFSET = 128.0f;
  CONSTANT unsigned int ONES = 0x3f803f80u;
  static INLINE unsigned int of(unsigned int two) { return two | 0x43004300u; }
};
template <>
struct Whole<Half, false> {
  CONSTANT float OFFSET = 1024.0f;
  CONSTANT unsigned int ONES = 0x3c003c00u;
  static INLINE unsigned int of(unsigned int two) { return two | 0x64006400u; }
};

// Scales and biases of neighbouring groups, of which there are so many.
template <typename T, int DEPTH, bool ALIGNED>
INLINE void load_factors(LOCAL Lot<DEPTH * int(sizeof(T))>& lot, const DEVICE T* from, int there) {
  constexpr int UNIT = int(sizeof(T)), BYTES = DEPTH * UNIT;
  if (ALIGNED && BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 raw = ((const DEVICE uint4*)from)[i];
      lot.words[i * 4] = raw.x; lot.words[i * 4 + 1] = raw.y; lot.words[i * 4 + 2] = raw.z; lot.words[i * 4 + 3] = raw.w;
    }
  } else if (ALIGNED && BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) {
      const uint2 raw = ((const DEVICE uint2*)from)[i];
      lot.words[i * 2] = raw.x; lot.words[i * 2 + 1] = raw.y;
    }
  } else if (UNIT == 4 || (ALIGNED && BYTES % 4 == 0)) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) {
      lot.words[i] = ALIGNED || i < there ? ((const DEVICE unsigned int*)from)[i] : 0;
    }
  } else {
    clear_lot(lot);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const unsigned int raw = ALIGNED || i < there ? ((const DEVICE unsigned short*)from)[i] : 0;
      lot.words[i / 2] |= raw << i % 2 * 16;
    }
  }
}

template <int DEPTH>
INLINE float factor_at(const LOCAL Lot<DEPTH * 2>& lot, int i, Brain) {
  return from_bits(i % 2 == 0 ? lot.words[i / 2] << 16 : lot.words[i / 2] & 0xffff0000u);
}
template <int DEPTH>
INLINE float factor_at(const LOCAL Lot<DEPTH * 2>& lot, int i, Half) {
  return from_half(i % 2 == 0 ? lot.words[i / 2] & 0xffffu : lot.words[i / 2] >> 16);
}
template <int DEPTH>
INLINE float factor_at(const LOCAL Lot<DEPTH * 4>& lot, int i, float) {
  return from_bits(lot.words[i]);
}

// Bits that fit behind a power of two.
template <typename N>
struct Room {
  CONSTANT int BITS = 7;
};
template <>
struct Room<Half> {
  CONSTANT int BITS = 10;
};

// Eight activations as pairs that fit those of weights, in so many parts, each of which is one that matrix units take.
template <typename T>
struct Pairs {
  typedef T Number;
  CONSTANT bool EXACT = false;
  CONSTANT int PARTS = 1;
  static INLINE void of(const LOCAL Eight<T>& e, LOCAL unsigned int (&pairs)[1][4]) {
    pairs[0][0] = (e.raw.x & 0xffffu) | e.raw.z << 16;
    pairs[0][1] = e.raw.x >> 16 | (e.raw.z & 0xffff0000u);
    pairs[0][2] = (e.raw.y & 0xffffu) | e.raw.w << 16;
    pairs[0][3] = e.raw.y >> 16 | (e.raw.w & 0xffff0000u);
  }
};
template <>
struct Pairs<float> {
  typedef Brain Number;
  CONSTANT bool EXACT = true;
  CONSTANT int PARTS = 3;  // of 8 bits each
  static INLINE void of(const LOCAL Eight<float>& e, LOCAL unsigned int (&pairs)[3][4]) {
    float rest[8];
    widen(e, rest);
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      float taken[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        taken[i] = float(Brain(rest[i]));
        rest[i] -= taken[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[part][i] = two_of<Brain>(taken[i], taken[i + 4]);
      }
    }
  }
};

// Eight numbers, rounded and stored at once.
template <typename T>
INLINE void store_several(DEVICE T* to, const LOCAL float* numbers) {
  Eight<T> eight;
  eight.raw.x = two_of<T>(numbers[0], numbers[1]);
  eight.raw.y = two_of<T>(numbers[2], numbers[3]);
  eight.raw.z = two_of<T>(numbers[4], numbers[5]);
  eight.raw.w = two_of<T>(numbers[6], numbers[7]);
  store_eight(to, eight);
}
INLINE void store_several(DEVICE float* to, const LOCAL float* numbers) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i] = numbers[i];
  }
}
