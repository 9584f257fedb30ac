#include <cstdlib>
#include <cstring>

#include "codes.h"
#include "dense.h"
#include "floats.h"
#include "kernels.h"
#include "recurrence.h"
#include "wide.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
  const Recurrence& recurrence;
  const Dense& dense;
  const Codes& codes;
};
#define INGOT_SET(name)                      \
  extern const Kernels kernels_##name;       \
  extern const Floats floats_##name;         \
  extern const Recurrence recurrence_##name; \
  extern const Dense dense_##name;           \
  extern const Codes codes_##name;           \
  const Set name{kernels_##name, floats_##name, recurrence_##name, dense_##name, codes_##name};

INGOT_SET(portable)
#if defined(__x86_64__)
INGOT_SET(avx2)
INGOT_SET(avx512)
INGOT_SET(avx512vnni)
extern const Wide wide_amx;
#elif defined(__aarch64__)
INGOT_SET(dotprod)
#endif

namespace {

const Set& pick() {
  // For tests: the slow path must be right on fast machines too.
  const char* given = std::getenv("INGOT_ISA");
  const auto asked = [given](const char* name) { return given != nullptr && std::strcmp(given, name) == 0; };
  if (asked("portable")) return portable;
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq");
  if (has_avx512 && !asked("avx2")) return __builtin_cpu_supports("avx512vnni") && !asked("avx512") ? avx512vnni : avx512;
  if (has_avx2) return avx2;
#elif defined(__aarch64__)
  const unsigned long has = getauxval(AT_HWCAP);
  if (has & HWCAP_ASIMDDP) return dotprod;
#endif
  return portable;
}

const Set& set() {
  static const Set& picked = pick();
  return picked;
}

#if defined(__x86_64__)
// Whether the processor has tiles of bfloat16, and the kernel lets this process use them.
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24)) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

const Wide* pick_wide() {
#if defined(__x86_64__)
  const char* asked = std::getenv("INGOT_ISA");
  const bool wanted = asked == nullptr || std::strcmp(asked, "amx") == 0;
  if (wanted && &set() == &avx512vnni && has_amx()) return &wide_amx;
#endif
  return nullptr;
}

}  // namespace

const Wide* wide() {
  static const Wide* picked = pick_wide();
  return picked;
}

const Kernels& kernels() { return set().kernels; }

const Floats& floats() { return set().floats; }

const Recurrence& recurrence() { return set().recurrence; }

const Dense& dense() { return set().dense; }

const Codes& codes() { return set().codes; }

}  // namespace ingot
