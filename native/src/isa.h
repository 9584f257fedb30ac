// What files that are compiled once for each instruction set begin with; INGOT_ISA names the set.
#pragma once

#define INGOT_NAME(name) INGOT_NAME_(name, INGOT_ISA)
#define INGOT_NAME_(name, isa) INGOT_NAME__(name, isa)
#define INGOT_NAME__(name, isa) name##_##isa

namespace ingot {

// Floats in a vector.
#if defined(__AVX512F__)
constexpr int kVector = 16;
#elif defined(__AVX2__)
constexpr int kVector = 8;
#else
constexpr int kVector = 4;
#endif

}  // namespace ingot
