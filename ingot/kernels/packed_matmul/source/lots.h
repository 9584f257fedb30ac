// What a lane holds of a row of packed weights: numbers of a few bits, one behind another as they lie in memory.
#ifdef __CUDACC__
INLINE void warp_barrier() { __syncwarp(); }
// The lower halves of two words in one, and the upper ones.
template <unsigned int POWER>
INLINE unsigned int behind(unsigned int bits, unsigned int mask) {
  unsigned int both;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(both) : "r"(bits), "r"(mask), "n"(POWER));
  return both;
}
INLINE unsigned int lower_halves(unsigned int a, unsigned int b) { return __byte_perm(a, b, 0x5410); }
INLINE unsigned int upper_halves(unsigned int a, unsigned int b) { return __byte_perm(a, b, 0x7632); }
#else
struct uint2 {
  unsigned int x, y;
};
INLINE void warp_barrier() { shuffle_xor(0.0f, 1); }
template <unsigned int POWER>
INLINE unsigned int behind(unsigned int bits, unsigned int mask) {
  return (bits & mask) | POWER;
}
INLINE unsigned int lower_halves(unsigned int a, unsigned int b) { return (a & 0xffffu) | b << 16; }
INLINE unsigned int upper_halves(unsigned int a, unsigned int b) { return a >> 16 | (b & 0xffff0000u); }
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
      const uint4 raw = ((const DEVICE uint4*)from)[i];
      lot.words[i * 4] = raw.x; lot.words[i * 4 + 1] = raw.y; lot.words[i * 4 + 2] = raw.z; lot.words[i * 4 + 3] = raw.w;
    }
  } else if (BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) {
      const uint2 raw = ((const DEVICE uint2*)from)[i];
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

// Of the lot's next eight numbers, the ones at `i` and at `i` + 4, in the halves of a word, with whatever else is there.
template <int BITS, int BYTES>
INLINE unsigned int two_at(const LOCAL Lot<BYTES>& lot, int eight, int i) {
  if (BITS == 4) {
    return lot.words[eight] >> 4 * i;
  }
  if (BITS == 2) {
    const unsigned int raw = lot.words[eight / 2] >> eight % 2 * 16;
    return (raw >> 2 * i & 0x3u) | (raw << 8 >> 2 * i & 0x30000u);
  }
  return number_at<BITS>(lot, (eight * 8 + i) * BITS) | number_at<BITS>(lot, (eight * 8 + i + 4) * BITS) << 16;
}

// Whole numbers as the matrix units take them. Bits that are put behind those of a power of two are added to it, which takes
// one instruction for two of them, and takes the bits of `mask` alone; the power is OFFSET, and what it adds to a sum has to be taken off. Where that would cost
// precision, or where a number has no room there, it is made as float32 first.
template <typename N, bool EXACT>
struct Whole {
  CONSTANT float OFFSET = 0.0f;
  CONSTANT unsigned int ONES = 0x3f803f80u;
  static INLINE unsigned int of(unsigned int two, unsigned int mask) {
    two &= mask;
    const float low = from_bits((two & 0xffu) | 0x4b000000u) - 8388608.0f;
    const float high = from_bits(two >> 16 | 0x4b000000u) - 8388608.0f;
    return two_of<N>(low, high);
  }
};
template <>
struct Whole<Brain, false> {
  CONSTANT float OFFSET = 128.0f;
  CONSTANT unsigned int ONES = 0x3f803f80u;
  static INLINE unsigned int of(unsigned int two, unsigned int mask) { return behind<0x43004300u>(two, mask); }
};
template <>
struct Whole<Half, false> {
  CONSTANT float OFFSET = 1024.0f;
  CONSTANT unsigned int ONES = 0x3c003c00u;
  static INLINE unsigned int of(unsigned int two, unsigned int mask) { return behind<0x64006400u>(two, mask); }
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
    pairs[0][0] = lower_halves(e.raw.x, e.raw.z);
    pairs[0][1] = upper_halves(e.raw.x, e.raw.z);
    pairs[0][2] = lower_halves(e.raw.y, e.raw.w);
    pairs[0][3] = upper_halves(e.raw.y, e.raw.w);
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

INLINE int least(int a, int b) { return a < b ? a : b; }

INLINE void clear_tile(LOCAL float* sums) {
  sums[0] = 0.0f; sums[1] = 0.0f; sums[2] = 0.0f; sums[3] = 0.0f;
}

// Where bytes of DEPTH groups of some rows of weights, BYTES each, lie in shared memory: so that lanes that read at once, each
// its part of a group, and lanes that write at once, sixteen bytes each, meet different banks.
template <int ROWS, int DEPTH, int BYTES>
struct Places {
  CONSTANT bool BY_GROUPS = BYTES % 16 == 0;
  CONSTANT int STEP = BY_GROUPS ? BYTES : DEPTH * BYTES;  // from a row to that eight further on, by eight
  static INLINE int at(int row, int byte) {
    if (!BY_GROUPS) {
      return row * STEP + byte;
    }
    const int d = byte / BYTES, turned = BYTES == 32 && DEPTH <= 4 ? row ^ d * (4 / DEPTH) : row;
    return (d * ROWS + turned) * BYTES + byte % BYTES;
  }
  // Of a lane's i-th piece, of which those of a row come one behind another.
  template <int PIECE>
  static INLINE int piece_at(int lane, int i) {
    constexpr int OF_ROW = DEPTH * BYTES / PIECE, ROWS_AT_ONCE = 32 / OF_ROW;
    if (OF_ROW * ROWS_AT_ONCE == 32 && ROWS_AT_ONCE % 4 == 0) {
      return at(lane / OF_ROW, lane % OF_ROW * PIECE) + i * ROWS_AT_ONCE * STEP;
    }
    const int piece = i * 32 + lane;
    return at(piece / OF_ROW, piece % OF_ROW * PIECE);
  }
};
