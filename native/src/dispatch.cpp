#include <cstdlib>
#include <cstring>

#include "dense.h"
#include "floats.h"
#include "kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

namespace ingot {

// One set for each instruction set that src/CMakeLists.txt compiles for.
struct Set {
  const Kernels& kernels;
  const Floats& floats;
  const Dense& dense;
};
#define INGOT_SET(name)                \
  extern const Kernels kernels_##name; \
  extern const Floats floats_##name;   \
  extern const Dense dense_##name;     \
  const Set name{kernels_##name, floats_##name, dense_##name};

INGOT_SET(portable)
#if defined(__x86_64__)
INGOT_SET(avx2)
INGOT_SET(avx512vnni)
#elif defined(__aarch64__)
INGOT_SET(dotprod)
#endif

namespace {

const Set& pick() {
  // For tests: the slow path must be right on fast machines too.
  const char* asked = std::getenv("INGOT_ISA");
  if (asked != nullptr && std::strcmp(asked, "portable") == 0) return portable;
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool vnni = has_avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (vnni && !(asked != nullptr && std::strcmp(asked, "avx2") == 0)) return avx512vnni;
  if (has_avx2) return avx2;
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) return dotprod;
#endif
  return portable;
}

const Set& set() {
  static const Set& picked = pick();
  return picked;
}

}  // namespace

const Kernels& kernels() { return set().kernels; }

const Floats& floats() { return set().floats; }

const Dense& dense() { return set().dense; }

}  // namespace ingot
