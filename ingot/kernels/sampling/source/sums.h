// Weights are added up as whole numbers of 2^-44: exactly, so that a sum does not depend on who adds when.
typedef unsigned long long Sum;
INLINE Sum whole_of(float weight) { return (Sum)(weight * 17592186044416.0f); }
// The share of a sum that is `part` times 2^-24.
INLINE Sum share_of(Sum sum, unsigned int part) { return (sum >> 24) * part + (((sum & 0xffffffu) * part) >> 24); }

#ifdef __CUDACC__
INLINE unsigned int bits_of(float x) { return __float_as_uint(x); }
INLINE unsigned int add_to(SHARED unsigned int* number, unsigned int more) { return atomicAdd(number, more); }
#else
INLINE unsigned int bits_of(float x) {
  unsigned int bits;
  memcpy(&bits, &x, 4);
  return bits;
}
INLINE unsigned int add_to(SHARED unsigned int* number, unsigned int more) {
  const unsigned int before = *number;
  *number += more;
  return before;
}
#endif

// How many weights are in a bin, and what they add up to: by any number of threads at once.
struct Bins {
  SHARED unsigned int *counts, *low, *high;
  INLINE void clear(int bin) { counts[bin] = low[bin] = high[bin] = 0; }
  INLINE void add(int bin, Sum sum) {
    add_to(counts + bin, 1);
    const unsigned int lower = (unsigned int)sum, before = add_to(low + bin, lower);
    const unsigned int upper = (unsigned int)(sum >> 32) + (before + lower < before ? 1 : 0);
    if (upper != 0) {
      add_to(high + bin, upper);
    }
  }
  INLINE Sum sum(int bin) const { return (Sum)high[bin] << 32 | low[bin]; }
};
