// Matrix units on CUDA: sums [16, 8] += left [16, 16] * right [16, 8], all of it spread over the lanes of a warp.
template <typename T>
INLINE void multiply_tiles(LOCAL float* sums, unsigned int a, unsigned int b, unsigned int c, unsigned int d, unsigned int e,
                           unsigned int f);
template <>
INLINE void multiply_tiles<Brain>(LOCAL float* s, unsigned int a, unsigned int b, unsigned int c, unsigned int d,
                                  unsigned int e, unsigned int f) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f));
}
template <>
INLINE void multiply_tiles<Half>(LOCAL float* s, unsigned int a, unsigned int b, unsigned int c, unsigned int d,
                                  unsigned int e, unsigned int f) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f));
}
INLINE unsigned int bits_of(Brain x) { return __bfloat16_as_ushort(x); }
INLINE unsigned int bits_of(Half x) { return __half_as_ushort(x); }
