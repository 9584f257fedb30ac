// As much of Metal's language as C++ can say. Clang knows address spaces, and then so does what is checked here.
typedef unsigned int uint;
typedef unsigned short ushort;
typedef int int32_t;
typedef long int64_t;
typedef unsigned long size_t;
#ifdef __clang__
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
typedef __bf16 bfloat;
typedef _Float16 half;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
#else
#define device
#define constant
#define threadgroup
struct bfloat {
  explicit operator float() const;
  ushort bits;
  bfloat() = default;
  explicit bfloat(float);
};
struct half {
  ushort bits;
  half() = default;
  explicit half(float);
  operator float() const;
};
struct uint3 {
  uint x, y, z;
};
struct uint4 {
  uint x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
#endif
#define thread
#define METAL_FUNC inline

typedef bfloat bfloat16_t;
typedef half float16_t;
namespace metal {
enum class mem_flags { mem_threadgroup };
void threadgroup_barrier(mem_flags);
float simd_shuffle_xor(float, ushort);
float exp2(float);
float fma(float, float, float);
float max(float, float);
float length(float4);
template <typename To, typename From>
To as_type(From);
namespace precise {
float tanh(float);
float log2(float);
float sqrt(float);
}
}  // namespace metal
using namespace metal;
