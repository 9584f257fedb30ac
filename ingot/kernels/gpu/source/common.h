// What the kernels share, in the common subset of CUDA, Metal and C++.

// Eight numbers as they lie in memory, read at once.
template <typename T>
struct Eight {
  uint4 raw;
};
template <>
struct Eight<float> {
  float4 low, high;
};

INLINE uint4 no_bits() {
  uint4 raw;
  raw.x = 0; raw.y = 0; raw.z = 0; raw.w = 0;
  return raw;
}
INLINE void clear_eight(LOCAL Eight<Brain>& e) { e.raw = no_bits(); }
INLINE void clear_eight(LOCAL Eight<Half>& e) { e.raw = no_bits(); }
INLINE void clear_eight(LOCAL Eight<float>& e) {
  e.low.x = 0; e.low.y = 0; e.low.z = 0; e.low.w = 0;
  e.high = e.low;
}

INLINE void load_eight(LOCAL Eight<Brain>& e, const DEVICE Brain* from) { e.raw = *(const DEVICE uint4*)from; }
INLINE void load_eight(LOCAL Eight<Half>& e, const DEVICE Half* from) { e.raw = *(const DEVICE uint4*)from; }
INLINE void load_eight(LOCAL Eight<float>& e, const DEVICE float* from) {
  e.low = ((const DEVICE float4*)from)[0];
  e.high = ((const DEVICE float4*)from)[1];
}

INLINE void store_eight(DEVICE Brain* to, const LOCAL Eight<Brain>& e) { *(DEVICE uint4*)to = e.raw; }
INLINE void store_eight(DEVICE Half* to, const LOCAL Eight<Half>& e) { *(DEVICE uint4*)to = e.raw; }
INLINE void store_eight(DEVICE float* to, const LOCAL Eight<float>& e) {
  ((DEVICE float4*)to)[0] = e.low;
  ((DEVICE float4*)to)[1] = e.high;
}

INLINE void widen(const LOCAL Eight<Brain>& e, LOCAL float* to) {
  to[0] = from_bits(e.raw.x << 16); to[1] = from_bits(e.raw.x & 0xffff0000u);
  to[2] = from_bits(e.raw.y << 16); to[3] = from_bits(e.raw.y & 0xffff0000u);
  to[4] = from_bits(e.raw.z << 16); to[5] = from_bits(e.raw.z & 0xffff0000u);
  to[6] = from_bits(e.raw.w << 16); to[7] = from_bits(e.raw.w & 0xffff0000u);
}
INLINE void widen(const LOCAL Eight<Half>& e, LOCAL float* to) {
  to[0] = from_half(e.raw.x & 0xffffu); to[1] = from_half(e.raw.x >> 16);
  to[2] = from_half(e.raw.y & 0xffffu); to[3] = from_half(e.raw.y >> 16);
  to[4] = from_half(e.raw.z & 0xffffu); to[5] = from_half(e.raw.z >> 16);
  to[6] = from_half(e.raw.w & 0xffffu); to[7] = from_half(e.raw.w >> 16);
}
INLINE void widen(const LOCAL Eight<float>& e, LOCAL float* to) {
  to[0] = e.low.x; to[1] = e.low.y; to[2] = e.low.z; to[3] = e.low.w;
  to[4] = e.high.x; to[5] = e.high.y; to[6] = e.high.z; to[7] = e.high.w;
}

INLINE void read_four(const SHARED float* from, LOCAL float* to) {
  float4 four = *(const SHARED float4*)from;
  to[0] = four.x; to[1] = four.y; to[2] = four.z; to[3] = four.w;
}

// Sums N numbers over 2 * STEP neighbouring lanes, each lane keeping about N / (2 * STEP) of the sums: at each step a lane
// gives half of its numbers away and is given the other half. The order of summing does not depend on N.
template <int N, int STEP>
struct Fold {
  CONSTANT int HALF = (N + 1) / 2;
  CONSTANT int HELD = Fold<(N + 1) / 2, STEP / 2>::HELD;
  // This lane's `x` become the sums [first, end); a lane that is not `sole` has what a lower one has, too.
  static INLINE void sum(LOCAL float* x, int lane, LOCAL int& first, LOCAL int& end, LOCAL bool& sole) {
    const bool upper = (lane & STEP) != 0;
    if (N == 1) {
      x[0] += shuffle_xor(x[0], STEP);
      sole = sole && !upper;
    } else {
#pragma unroll
      for (int i = 0; i < HALF; ++i) {
        const float high = HALF + i < N ? x[HALF + i] : 0.0f;
        const float given = upper ? x[i] : high;
        const float kept = upper ? high : x[i];
        x[i] = kept + shuffle_xor(given, STEP);
      }
      end = !upper && first + HALF < end ? first + HALF : end;
      first += upper ? HALF : 0;
    }
    Fold<(N + 1) / 2, STEP / 2>::sum(x, lane, first, end, sole);
  }
};
template <int N>
struct Fold<N, 0> {
  CONSTANT int HELD = N;
  static INLINE void sum(LOCAL float*, int, LOCAL int&, LOCAL int&, LOCAL bool&) {}
};

// The next U numbers of keys or values that lie one behind another in a page: those of `from` <= key < `to`, else zeros.
template <typename T, int U, int SIZE>
INLINE void fetch(LOCAL Eight<T>* into, const DEVICE T* page, int key, int from, int to, int column) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (key + u >= from && key + u < to && column < SIZE) {
      load_eight(into[u], page + u * SIZE + column);
    } else {
      clear_eight(into[u]);
    }
  }
}
