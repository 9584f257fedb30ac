// Products of weights that lanes hold with rows that lie in shared memory: sums [64, ROWS] of four warps, sixteen outputs each.
//
// Rows lie one behind another, 64 columns (128 bytes) of each, and of the eight chunks of sixteen bytes of row r the one at c has
// the place of c ^ r % 8: so do the units of compute capability 9.0 read them, and other ones without conflicts of banks.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What copies brought can be read by units that read shared memory themselves.
INLINE void share_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Registers were written that units are about to read or to add to.
INLINE void begin_units() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void end_units() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
INLINE void wait_for_units() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Nothing reads these sums before what is above, which the compiler does not see.
template <int N>
INLINE void settle(LOCAL float* sums) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("" : "+f"(sums[i]) :: "memory");
  }
}
template <typename T, int ROWS>
INLINE void multiply_rows(LOCAL float* s, const LOCAL unsigned int* a, unsigned long long rows);
WGMMA_FORMS
template <typename T, int ROWS>
INLINE void multiply_rows(LOCAL float* low, LOCAL float* high, const LOCAL unsigned int* a, const LOCAL unsigned int* b,
                          const SHARED unsigned char* rows, int k) {
  const unsigned long long at = (unsigned int)__cvta_generic_to_shared(rows) + k * 32;
  const unsigned long long said = at >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;  // 1,024 bytes to the next eight rows
  multiply_rows<T, ROWS>(low, a, said);
  multiply_rows<T, ROWS>(high, b, said);
}
#else
INLINE void share_copies() {}
INLINE void begin_units() {}
INLINE void end_units() {}
template <int N>
INLINE void wait_for_units() {}
template <int N>
INLINE void settle(LOCAL float*) {}
template <typename T, int ROWS>
INLINE void multiply_rows(LOCAL float* low, LOCAL float* high, const LOCAL unsigned int* a, const LOCAL unsigned int* b,
                          const SHARED unsigned char* rows, int k) {
  const int lane = int(thread_index_in_simdgroup);
#pragma unroll
  for (int n = 0; n < ROWS / 8; n += 2) {
    const int row = (n + lane / 16) * 8 + lane % 8, chunk = k * 2 + lane / 8 % 2;
    unsigned int met[4];
    load_tiles(met, (const SHARED float*)(rows + row * 128 + (chunk ^ row & 7) * 16));
    multiply_tiles<T>(low + n * 4, a[0], a[1], a[2], a[3], met[0], met[1]);
    multiply_tiles<T>(high + n * 4, b[0], b[1], b[2], b[3], met[0], met[1]);
    multiply_tiles<T>(low + n * 4 + 4, a[0], a[1], a[2], a[3], met[2], met[3]);
    multiply_tiles<T>(high + n * 4 + 4, b[0], b[1], b[2], b[3], met[2], met[3]);
  }
}
#endif

// The next 32 columns.
template <typename T, int ROWS, int SUMS>
INLINE void multiply_columns(LOCAL float (&sums)[2][SUMS], const LOCAL unsigned int (&held)[2][2][4],
                             const SHARED unsigned char* rows, int k) {
  begin_units();
  multiply_rows<T, ROWS>(sums[0], sums[1], held[0][0], held[1][0], rows, k);
  multiply_rows<T, ROWS>(sums[0], sums[1], held[0][1], held[1][1], rows, k + 1);
  end_units();
}

#ifdef __CUDACC__
// Nothing by what is very large.
INLINE float quick_quotient(float x, float y) { return __fdividef(x, y); }
// Memory that begins at a multiple of 1,024 bytes.
INLINE SHARED unsigned char* aligned_memory(SHARED float* from) {
  return (SHARED unsigned char*)from + (0u - (unsigned int)__cvta_generic_to_shared(from) & 1023u);
}
#else
INLINE float quick_quotient(float x, float y) { return x / y; }
INLINE SHARED unsigned char* aligned_memory(SHARED float* from) { return (SHARED unsigned char*)from; }
#endif

template <typename T>
struct Powers;
template <>
struct Powers<Brain> {
  CONSTANT unsigned int ONES = 0x3f803f80u, LESS_OFFSET = 0xc300c300u;  // -128
};
template <>
struct Powers<Half> {
  CONSTANT unsigned int ONES = 0x3c003c00u, LESS_OFFSET = 0xe400e400u;  // -1,024
};

// Two weights in the halves of a word, of bits that lie in its halves as `two_at` gives them: whole numbers of so many bits, or
// floats.
template <typename T, int BITS, bool FLOATS>
struct Weights {
  typedef Whole<T, (BITS > Room<T>::BITS)> Numbers;
  static INLINE unsigned int of(unsigned int two, unsigned int scale, unsigned int bias) {
    unsigned int whole = Numbers::of(two, ((1u << BITS) - 1) * 0x10001u);
    if (Numbers::OFFSET != 0.0f) {
      whole = multiply_add_two<T>(whole, Powers<T>::ONES, Powers<T>::LESS_OFFSET);
    }
    return multiply_add_two<T>(whole, scale, bias);
  }
};
template <typename T, int BITS>
struct Weights<T, BITS, true> {
  typedef Floats<T, BITS> Form;
  static INLINE unsigned int of(unsigned int two, unsigned int scale, unsigned int) {
    return multiply_add_two<T>(multiply_add_two<T>(Form::lowered(two), Form::RAISE * 0x10001u, 0), scale, 0);
  }
};

// Scales and biases of a row's next 64 columns, one of each in the halves of a word.
template <typename T, int GROUP>
INLINE void load_pairs(LOCAL unsigned int* pairs, const DEVICE T* scales, const DEVICE T* biases) {
  if (GROUP == 32) {
    const unsigned int scale = *(const DEVICE unsigned int*)scales, bias = *(const DEVICE unsigned int*)biases;
    pairs[0] = lower_halves(scale, bias);
    pairs[GROUP == 32 ? 1 : 0] = upper_halves(scale, bias);
  } else {
    pairs[0] = *(const DEVICE unsigned short*)scales | (unsigned int)*(const DEVICE unsigned short*)biases << 16;
  }
}
// Scales of floats.
template <typename T, int GROUP>
INLINE void load_pairs(LOCAL unsigned int* pairs, const DEVICE unsigned char* scales, const DEVICE unsigned char*) {
  const unsigned int raw = GROUP == 16 ? *(const DEVICE unsigned int*)scales : *(const DEVICE unsigned short*)scales;
#pragma unroll
  for (int i = 0; i < 64 / GROUP; ++i) {
    pairs[i] = two_of<T>(scale_of<GROUP>((unsigned char)(raw >> i * 8)), 0.0f);
  }
}

// What experts make of their gates: silu(gate) * up; gelu(gate) * up, by a tangent, which is a sigmoid; or, clipped,
// gate * sigmoid(1.702 gate) * (up + 1).
template <int CURVE>
INLINE float curve_of(float gate, float up) {
  float inner = gate;
  if (CURVE == 1) {
    inner = 1.5957691f * (gate + 0.044715f * gate * gate * gate);
  }
  if (CURVE == 2) {
    gate = -larger(-gate, -7.0f);
    up = 1.0f - larger(-larger(up, -7.0f), -7.0f);
    inner = 1.702f * gate;
  }
  return quick_quotient(gate, 1.0f + quick_power_of_two(-1.442695f * inner)) * up;
}
