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

// Bits that fit behind a power of two.
template <typename N>
struct Room {
  CONSTANT int BITS = 7;
};
template <>
struct Room<Half> {
  CONSTANT int BITS = 10;
};

// x * a + b of two numbers of 16 bits in one, rounded once.
#ifdef __CUDACC__
template <typename T>
INLINE unsigned int multiply_add_two(unsigned int x, unsigned int a, unsigned int b);
template <>
INLINE unsigned int multiply_add_two<Brain>(unsigned int x, unsigned int a, unsigned int b) {
  unsigned int two;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(x), "r"(a), "r"(b));
  return two;
}
template <>
INLINE unsigned int multiply_add_two<Half>(unsigned int x, unsigned int a, unsigned int b) {
  unsigned int two;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(x), "r"(a), "r"(b));
  return two;
}
#else
template <typename T>
INLINE float part_of_two(unsigned int two, int i) {
  const unsigned short bits = (unsigned short)(two >> i * 16);
  T x;
  memcpy(&x, &bits, 2);
  return float(x);
}
template <typename T>
INLINE unsigned int multiply_add_two(unsigned int x, unsigned int a, unsigned int b) {
  return two_of<T>(multiply_add(part_of_two<T>(x, 0), part_of_two<T>(a, 0), part_of_two<T>(b, 0)),
                   multiply_add(part_of_two<T>(x, 1), part_of_two<T>(a, 1), part_of_two<T>(b, 1)));
}
#endif

// Floats of BITS: a sign, an exponent (of two bits or four) and a fraction (of one or three). Their bits are put where N has its
// own, which makes all of them smaller, subnormal ones too, by two to the POWERth.
template <typename N, int BITS>
struct Floats {
  CONSTANT int FRACTION = Room<N>::BITS, BIAS = (1 << (14 - FRACTION)) - 1, POWER = BIAS + 1 - (1 << (BITS / 2 - 1));
  CONSTANT unsigned int RAISE = (unsigned int)(POWER + BIAS) << FRACTION;  // two to the POWERth, as N
  static INLINE unsigned int lowered(unsigned int two) {
    constexpr unsigned int SIGNS = (1u << (BITS - 1)) * 0x10001u, OTHERS = SIGNS - 0x10001u;
    return (two & OTHERS) << (FRACTION + 1 - BITS / 2) | (two & SIGNS) << (16 - BITS);
  }
};
template <int BITS>
INLINE float float_of(unsigned int bits) {
  return from_half(Floats<Half, BITS>::lowered(bits)) * float(1 << Floats<Half, BITS>::POWER);
}

// Weights as the matrix units take them, two in a word, of the bits of two: whole numbers, of which `by` is the mask, or floats.
// What is lacking is made up for in sums: these have to be multiplied by LEFT.
template <typename N, int BITS, int GROUP, bool FLOATS, bool EXACT>
struct Packed : Whole<N, EXACT || (BITS > Room<N>::BITS)> {
  CONSTANT float LEFT = 1.0f;
  static INLINE unsigned int by(float) { return ((1u << BITS) - 1) * 0x10001u; }
};
// Lowered halves are exact in sums of float32; others would be too small, and are raised. So are weights in groups of sixteen,
// by their scales: those have few enough bits for the products to be exact, and one matrix unit meets two of them.
template <typename N, int BITS, int GROUP, bool EXACT>
struct Packed<N, BITS, GROUP, true, EXACT> {
  typedef Floats<N, BITS> Form;
  CONSTANT bool HALF = Form::FRACTION == 10, SCALED = GROUP == 16;
  CONSTANT float OFFSET = 0.0f, LEFT = HALF ? float(1 << (Form::POWER & 15)) : SCALED ? 128.0f : 1.0f;
  CONSTANT unsigned int ONES = 0;
  static INLINE unsigned int by(float scale) {
    const float raise = from_bits((unsigned int)(Form::POWER + 127) << 23) / LEFT;
    return SCALED ? two_of<N>(scale * raise, scale * raise) : Form::RAISE * 0x10001u;
  }
  static INLINE unsigned int of(unsigned int two, unsigned int by) {
    const unsigned int lowered = Form::lowered(two);
    return HALF && !SCALED ? lowered : multiply_add_two<N>(lowered, by, 0);
  }
};

// Scales or biases that lie one behind another, of which so many bytes are there, of UNIT each.
template <int BYTES, int UNIT, bool ALIGNED>
INLINE void load_factors(LOCAL Lot<BYTES>& lot, const DEVICE unsigned char* from, int there) {
  if (ALIGNED) {
    load_lot(lot, from);
  } else {
    clear_lot(lot);
#pragma unroll
    for (int i = 0; i < BYTES / UNIT; ++i) {
      if (i * UNIT < there) {
        const unsigned int raw = UNIT == 4   ? ((const DEVICE unsigned int*)from)[i]
                                 : UNIT == 2 ? ((const DEVICE unsigned short*)from)[i]
                                             : from[i];
        lot.words[i * UNIT / 4] |= raw << i * UNIT % 4 * 8;
      }
    }
  }
}

// The one at i, or, of bytes in the same word, `next` behind it, which the compiler does not have to know.
template <int GROUP, int BYTES>
INLINE float factor_at(const LOCAL Lot<BYTES>& lot, int i, int, Brain) {
  return from_bits(i % 2 == 0 ? lot.words[i / 2] << 16 : lot.words[i / 2] & 0xffff0000u);
}
template <int GROUP, int BYTES>
INLINE float factor_at(const LOCAL Lot<BYTES>& lot, int i, int, Half) {
  return from_half(i % 2 == 0 ? lot.words[i / 2] & 0xffffu : lot.words[i / 2] >> 16);
}
template <int GROUP, int BYTES>
INLINE float factor_at(const LOCAL Lot<BYTES>& lot, int i, int, float) {
  return from_bits(lot.words[i]);
}
// Of floats a scale is a byte: of groups of sixteen a float as well, of others the exponent of a power of two.
template <int GROUP>
INLINE float scale_of(unsigned char byte) {
  return GROUP == 16 ? float_of<8>(byte) : from_bits(byte == 0 ? 0x400000u : (unsigned int)byte << 23);
}
template <int GROUP, typename T>
INLINE float scale_of(T number) {
  return float(number);
}
template <int GROUP, int BYTES>
INLINE float factor_at(const LOCAL Lot<BYTES>& lot, int i, int next, unsigned char) {
  return scale_of<GROUP>((unsigned char)(lot.words[i / 4] >> (i % 4 + next) * 8));
}

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
