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
