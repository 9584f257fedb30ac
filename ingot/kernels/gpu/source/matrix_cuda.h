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

// Two numbers of 16 bits in one: the lower first.
template <typename T>
INLINE unsigned int two_of(float low, float high);
template <>
INLINE unsigned int two_of<Brain>(float low, float high) {
  unsigned int two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
template <>
INLINE unsigned int two_of<Half>(float low, float high) {
  unsigned int two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

// What is smaller than a normal number is nothing.
INLINE float quick_power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Four tiles [8, 8] of numbers of 16 bits out of shared memory: each lane says where a row of eight begins, those of the first
// tile first, and is given two neighbours of each tile: in row lane / 4, or, turned, in column lane / 4.
INLINE void load_tiles(LOCAL unsigned int* to, const SHARED float* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((unsigned int)__cvta_generic_to_shared(row)));
}
INLINE void load_turned_tiles(LOCAL unsigned int* to, const SHARED float* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((unsigned int)__cvta_generic_to_shared(row)));
}

// Sixteen bytes on their way to shared memory, or zeros where they are not `there`. A thread's copies until `end_copies` are a
// batch; it waits until at most N of its batches are still on their way. Others see them after a barrier.
INLINE void copy_chunk(SHARED float* to, const DEVICE void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Like `copy_chunk`, of what is read once: the whole line is on its way from memory when its first part is.
INLINE void pass_chunk(SHARED float* to, const DEVICE void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Four, eight or sixteen bytes, whose neighbours are copied next.
template <int BYTES>
INLINE void copy_bytes(SHARED void* to, const DEVICE void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES) : "memory");
}
INLINE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
INLINE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

INLINE void store_two(DEVICE float* to, float low, float high) { *(float2*)to = make_float2(low, high); }

// Shared memory that a launch asks for (`Work.lent`), of which there is more than a text may declare.
#define LENT_FLOATS(name, count)        \
  extern __shared__ float4 name##_lent[]; \
  SHARED float* name = (SHARED float*)name##_lent
