// Eight numbers of 16 bits, as they lie in memory.
#ifdef __CUDACC__
// Read once, so that they do not push out of the first-level cache what is read again; in the order of the text, so that they
// are on their way before others are waited for.
INLINE uint4 pass_by(const DEVICE uint4* from) {
  uint4 raw;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(from));
  return raw;
}
#else
INLINE uint4 pass_by(const DEVICE uint4* from) { return *from; }
#endif

// Sums of neighbours, then of those, and so on.
template <int N>
struct Pairwise {
  static INLINE float sum(const SHARED float* from, int apart) {
    return Pairwise<N / 2>::sum(from, apart) + Pairwise<N / 2>::sum(from + N / 2 * apart, apart);
  }
};
template <>
struct Pairwise<1> {
  static INLINE float sum(const SHARED float* from, int) { return *from; }
};

// A lane's sums of EACH spans, which come one after another: a span's is added to its neighbour's, or kept for that.
template <int EACH, int SUMS>
struct Spans {
  CONSTANT int LEVELS = EACH == 8 ? 3 : EACH == 4 ? 2 : EACH == 2 ? 1 : 0;
  static_assert(1 << LEVELS == EACH, "one, two, four or eight spans");
  float kept[LEVELS > 0 ? LEVELS : 1][SUMS];
  int ended;

  INLINE void begin(LOCAL float* sums) {
    ended = 0;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      sums[i] = 0.0f;
    }
  }
  INLINE void end(LOCAL float* sums) {
    bool is_added = true;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
      const bool is_second = (ended >> level & 1) != 0;
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        if (is_added && is_second) sums[i] = kept[level][i] + sums[i];
        if (is_added && !is_second) kept[level][i] = sums[i];
      }
      is_added = is_added && is_second;
    }
    ++ended;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      if (ended < EACH) sums[i] = 0.0f;
    }
  }
};

// What `copy_chunk` does, done at once.
INLINE void put_chunk(SHARED float* to, const DEVICE uint4* from, bool there) {
  *(SHARED uint4*)to = there ? *from : no_bits();
}
