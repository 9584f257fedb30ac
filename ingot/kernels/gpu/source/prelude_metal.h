// What the kernels are written in, on Metal.
#define DEVICE device
#define SHARED threadgroup
#define LOCAL thread
#define INLINE METAL_FUNC

#define SHARED_FLOATS(name, count)         \
  threadgroup float4 name##_fours[((count) + 3) / 4]; \
  SHARED float* name = (SHARED float*)name##_fours
#define AFTER_OTHERS() {}
#define CONSTANT static constant constexpr const

typedef bfloat Brain;
typedef half Half;

INLINE void group_barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }
INLINE float shuffle_xor(float x, int mask) { return simd_shuffle_xor(x, ushort(mask)); }
INLINE float power_of_two(float x) { return exp2(x); }
INLINE float logarithm_of_two(float x) { return precise::log2(x); }
INLINE float root(float x) { return precise::sqrt(x); }
INLINE float tangent(float x) { return precise::tanh(x); }
INLINE float multiply_add(float a, float b, float c) { return fma(a, b, c); }
INLINE float larger(float a, float b) { return max(a, b); }
INLINE float nothing() { return as_type<float>(0xff800000u); }
INLINE float from_bits(uint bits) { return as_type<float>(bits); }
INLINE float from_half(uint bits) { return float(as_type<half>(ushort(bits))); }
