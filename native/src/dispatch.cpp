#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

namespace ingot {

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512vnni;
#elif defined(__aarch64__)
extern const Kernels kernels_dotprod;
#endif

namespace {

const Kernels& pick() {
  // For tests: the slow path must be right on fast machines too.
  const char* asked = std::getenv("INGOT_ISA");
  if (asked != nullptr && std::strcmp(asked, "portable") == 0) return kernels_portable;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool vnni = avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (vnni && !(asked != nullptr && std::strcmp(asked, "avx2") == 0)) return kernels_avx512vnni;
  if (avx2) return kernels_avx2;
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) return kernels_dotprod;
#endif
  return kernels_portable;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& picked = pick();
  return picked;
}

}  // namespace ingot
