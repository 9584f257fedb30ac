// What the kernels are written in, on CUDA.
#define DEVICE
#define SHARED
#define LOCAL
#define INLINE __device__ __forceinline__

#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define thread_index_in_simdgroup (threadIdx.x & 31)

#define SHARED_FLOATS(name, count)         \
  __shared__ float4 name##_fours[((count) + 3) / 4]; \
  SHARED float* name = (SHARED float*)name##_fours
#define CONSTANT static constexpr

typedef __nv_bfloat16 Brain;
typedef __half Half;

// What a kernel launched before this one in a graph has made may be read behind this, and nothing before it: the graph
// lets a kernel begin when the one before it has begun. A text that does not say it anywhere says it first.
#if __CUDA_ARCH__ >= 900
#define AFTER_OTHERS()                                             \
  {                                                                \
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); \
    asm volatile("griddepcontrol.wait;" ::: "memory");             \
  }
#else
#define AFTER_OTHERS() {}
#endif

INLINE void group_barrier() { __syncthreads(); }
INLINE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
INLINE float power_of_two(float x) { return exp2f(x); }
INLINE float logarithm_of_two(float x) { return log2f(x); }
INLINE float root(float x) { return sqrtf(x); }
INLINE float tangent(float x) { return tanhf(x); }
INLINE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
INLINE float larger(float a, float b) { return fmaxf(a, b); }
INLINE float nothing() { return __int_as_float(0xff800000); }
INLINE float from_bits(unsigned int bits) { return __uint_as_float(bits); }
INLINE float from_half(unsigned int bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }
