// Blocks of weights in vectors of NEON, with its products of bytes.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "planes.h"

namespace ingot {
namespace {  // each instruction set has its own

constexpr int kTile = 4;
constexpr bool kSignedBytes = true;
using Sum = float32x4_t;
using Ints = int32x4_t;
using Bytes = int8x16_t;
constexpr int kMostTogether = 8;

// Integers are added up in the lowest bits of this float, since taking it off again is four times as fast as a conversion.
constexpr float kStart = 0x1.8p23f;

alignas(16) constexpr float kStarts[] = {kStart, kStart, kStart, kStart, kStart, kStart, kStart, kStart};

// From memory each time, as a copy of a register takes the place of a product.
inline Ints start() {
  Ints ints;
  asm volatile("ldr %q0, %1" : "=w"(ints) : "m"(kStarts));
  return ints;
}

inline Sum zero() { return vdupq_n_f32(0); }
inline Sum load(const float* p) { return vld1q_f32(p); }
inline Sum load(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline void store(float* p, Sum sum) { vst1q_f32(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return vfmaq_n_f32(sum, a, b); }
inline Sum scaled(Ints product, Sum scales) { return vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(product), vdupq_n_f32(kStart)), scales); }
inline Sum times(Sum a, Sum b) { return vmulq_f32(a, b); }
inline Sum plus(Sum sum, Sum a, Sum b) { return vfmaq_f32(sum, a, b); }
inline Sum numbers(Ints ints) { return vcvtq_f32_s32(ints); }
// Four bytes, of which a row of a tile each has one.
inline uint8x8_t one_each(const void* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  return vcreate_u8(four);
}
inline Ints widened(const uint8_t* p) { return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(one_each(p))))); }
inline Ints widened(const int8_t* p) { return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(one_each(p))))); }
inline Ints low_half(Ints bytes) { return vandq_s32(bytes, vdupq_n_s32(15)); }
inline Ints high_half(Ints bytes) { return vshrq_n_s32(bytes, 4); }

struct Vectors128 {
  static Bytes bytes_at(const uint8_t* p, int n) { return vreinterpretq_s8_u8(vld1q_u8(p + 16 * n)); }
  template <int Shift, int Mask>
  static Bytes field(Bytes bytes) {
    uint8x16_t v = vreinterpretq_u8_s8(bytes);
    if constexpr (Shift > 0) v = vshrq_n_u8(v, Shift);
    if constexpr (Shift < 0) v = vshlq_n_u8(v, -Shift);
    // The upper half of a byte needs no mask.
    return vreinterpretq_s8_u8(Shift == 4 && Mask == 15 ? v : vandq_u8(v, vdupq_n_u8(Mask)));
  }
  static Bytes joined(Bytes a, Bytes b) { return vorrq_s8(a, b); }
};

template <int Bits>
struct Block {
  Bytes w[kSteps];

  explicit Block(const uint8_t* p) { read_quanta<Bits, Vectors128>(p, w); }

  template <int M, int N, int First = 0, int Last = kSteps>
  void products(const int8_t* x, Ints* sums) const {
    static_assert(M == N);
    for (int n = 0; n < N; n++) sums[n] = start();
    // Sixteen bytes are four columns of four rows, or of fewer rows more.
#pragma GCC unroll 16
    for (int i = First * M / 4; i < Last * M / 4; i++) {
      const Bytes four = vld1q_s8(x + 16 * i);
      const int step = i * 4 / M, row = i * 4 % M;
      sums[row % M] = vdotq_laneq_s32(sums[row % M], w[step], four, 0);
      sums[(row + 1) % M] = vdotq_laneq_s32(sums[(row + 1) % M], w[step + 1 / M], four, 1);
      sums[(row + 2) % M] = vdotq_laneq_s32(sums[(row + 2) % M], w[step + 2 / M], four, 2);
      sums[(row + 3) % M] = vdotq_laneq_s32(sums[(row + 3) % M], w[step + 3 / M], four, 3);
    }
  }

  // One step of a block times rests, of N rows of a lot.
  template <int M, int N>
  static void add_rests(const uint8_t* p, int step, const int8_t* rests, Ints* sums) {
    const Bytes weights = read_step<Bits, Vectors128>(p, step);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const Bytes four = vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(rests + 4 * n)));
      sums[n] = vaddq_s32(sums[n], vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), weights, four), kRestBits));
    }
  }
};

// Sums of a tile with the rows of a lot: sums[4 * row + i]. Written out, since the order decides how long it takes: what a
// step needs is loaded and unpacked during the step before, all rows are summed in turn so that none waits for itself, what
// is done in floats comes at the end of a block, and nothing goes through memory. The scales must be halves, as then
// taking off the start is exact: scale * (start + sum) - scale * start in one step is scale * sum, rounded once.
//
// v0-v7 sums, v8 scales, v9 and v10 what is scaled, v11 and v12 the rows' scales, v13 what biases lack, v14 minus the start,
// v15 the low halves of bytes, v16-v19 weights of four steps, v20-v23 activations of two, v24-v31 the sums of a block.
#define INGOT_DOT(sum, w, x) "sdot v" sum ".4s, " w ".16b, " x "\n"
#define INGOT_SCALE(to, sum) "ldr q" to ", [%[less]]\nfmla v" to ".4s, v" sum ".4s, v8.4s\n"
#define INGOT_ADD(sum, from, factor) "fmla v" sum ".4s, v" from ".4s, " factor "\n"
#define INGOT_LESS "fcvtl v8.4s, v8.4h\nfmul v9.4s, v8.4s, v14.4s\nstr q9, [%[less]]\n"
#define INGOT_SHIFTED(sum, x) "movi v19.4s, #0\n" INGOT_DOT("19", "v18", x) "shl v19.4s, v19.4s, #3\nadd v" sum ".4s, v" sum ".4s, v19.4s\n"

// One step of halves as weights of rests.
#define INGOT_HALF_STEP                                                                                                      \
  "lsr %[from], %[at], #1\nadd %[from], %[w], %[from], lsl #4\nldr q18, [%[from], #-64]\n"                                   \
  "and %[at], %[at], #1\nadd %[at], %[shifts], %[at], lsl #4\nldr q19, [%[at]]\n"                                            \
  "ushl v18.16b, v18.16b, v19.16b\nmovi v19.16b, #0x78\nand v18.16b, v18.16b, v19.16b\n"

#define INGOT_STEP4(w, a, b, second, third, fourth)                                                                          \
  INGOT_DOT("24", w, a ".4b[0]") second INGOT_DOT("25", w, a ".4b[1]") third INGOT_DOT("26", w, a ".4b[2]") fourth           \
  INGOT_DOT("27", w, a ".4b[3]")
#define INGOT_LOAD4(a, b, from, step) "ldr q" a ", [" from ", #16 * " step "]\n"
#define INGOT_START4 "ldp q24, q25, [%[start]]\nldp q26, q27, [%[start]]\n"
#define INGOT_FACTORS4(from) "ldr q11, [" from "], #16\n"
#define INGOT_FLOATS4                                                                                                        \
  INGOT_SCALE("9", "24") INGOT_SCALE("10", "25") INGOT_SCALE("18", "26") INGOT_SCALE("19", "27")                             \
  INGOT_ADD("0", "9", "v11.s[0]") INGOT_ADD("1", "10", "v11.s[1]") INGOT_ADD("2", "18", "v11.s[2]") INGOT_ADD("3", "19", "v11.s[3]")
#define INGOT_BIASES4                                                                                                        \
  INGOT_ADD("0", "9", "v11.s[0]") INGOT_ADD("1", "9", "v11.s[1]") INGOT_ADD("2", "9", "v11.s[2]") INGOT_ADD("3", "9", "v11.s[3]")
#define INGOT_SHIFTED4                                                                                                       \
  INGOT_SHIFTED("24", "v22.4b[0]") INGOT_SHIFTED("25", "v22.4b[1]") INGOT_SHIFTED("26", "v22.4b[2]") INGOT_SHIFTED("27", "v22.4b[3]")
#define INGOT_STORE4 "stp q0, q1, [%[sums]]\nstp q2, q3, [%[sums], #32]\n"

#define INGOT_STEP8(w, a, b, second, third, fourth)                                                                          \
  INGOT_DOT("24", w, a ".4b[0]") INGOT_DOT("25", w, a ".4b[1]") second INGOT_DOT("26", w, a ".4b[2]") INGOT_DOT("27", w, a ".4b[3]") third \
  INGOT_DOT("28", w, b ".4b[0]") INGOT_DOT("29", w, b ".4b[1]") fourth INGOT_DOT("30", w, b ".4b[2]") INGOT_DOT("31", w, b ".4b[3]")
#define INGOT_LOAD8(a, b, from, step) "ldp q" a ", q" b ", [" from ", #32 * " step "]\n"
#define INGOT_START8 INGOT_START4 "ldp q28, q29, [%[start]]\nldp q30, q31, [%[start]]\n"
#define INGOT_FACTORS8(from) "ldp q11, q12, [" from "], #32\n"
#define INGOT_FLOATS8                                                                                                        \
  INGOT_SCALE("9", "24") INGOT_SCALE("10", "25") INGOT_SCALE("18", "26") INGOT_SCALE("19", "27")                             \
  INGOT_SCALE("22", "28") INGOT_SCALE("23", "29") INGOT_SCALE("24", "30") INGOT_SCALE("25", "31")                            \
  INGOT_ADD("0", "9", "v11.s[0]") INGOT_ADD("1", "10", "v11.s[1]") INGOT_ADD("2", "18", "v11.s[2]") INGOT_ADD("3", "19", "v11.s[3]") \
  INGOT_ADD("4", "22", "v12.s[0]") INGOT_ADD("5", "23", "v12.s[1]") INGOT_ADD("6", "24", "v12.s[2]") INGOT_ADD("7", "25", "v12.s[3]")
#define INGOT_BIASES8                                                                                                        \
  INGOT_BIASES4                                                                                                              \
  INGOT_ADD("4", "9", "v12.s[0]") INGOT_ADD("5", "9", "v12.s[1]") INGOT_ADD("6", "9", "v12.s[2]") INGOT_ADD("7", "9", "v12.s[3]")
#define INGOT_SHIFTED8                                                                                                       \
  INGOT_SHIFTED4                                                                                                             \
  INGOT_SHIFTED("28", "v23.4b[0]") INGOT_SHIFTED("29", "v23.4b[1]") INGOT_SHIFTED("30", "v23.4b[2]") INGOT_SHIFTED("31", "v23.4b[3]")
#define INGOT_STORE8 INGOT_STORE4 "stp q4, q5, [%[sums], #64]\nstp q6, q7, [%[sums], #96]\n"

// `first`, `second`, ... load the weights of two steps, `low` and `high` unpack them, `next` loads those of the next block.
// `centre` makes up for signed weights, `rest` adds the products of one step's rests.
#define INGOT_LOT(M, bytes, first, second, third, fourth, next, low_even, high_even, low_odd, high_odd, centre, rest)        \
  asm volatile(                                                                                                              \
      "movi v0.4s, #0\nmovi v1.4s, #0\nmovi v2.4s, #0\nmovi v3.4s, #0\n"                                                     \
      "movi v4.4s, #0\nmovi v5.4s, #0\nmovi v6.4s, #0\nmovi v7.4s, #0\nmovi v15.16b, #15\n"                                  \
      "movi v13.4s, #0x43, lsl #24\nldr q14, [%[less]]\nldr d8, [%[scales]]\n" INGOT_LESS                                    \
      first low_even high_even INGOT_LOAD##M("20", "21", "%[x]", "0")                                                        \
      "1:\n" second INGOT_LOAD##M("22", "23", "%[x]", "1") INGOT_START##M                                                    \
      "prfm pldl1keep, [%[w], #2048]\nadd %[block], %[block], #1\n"                                                          \
      INGOT_STEP##M("v16", "v20", "v21", "", "", "")                                                                         \
      INGOT_LOAD##M("20", "21", "%[x]", "2") INGOT_STEP##M("v17", "v22", "v23", low_odd, "", high_odd)                       \
      third INGOT_LOAD##M("22", "23", "%[x]", "3") INGOT_STEP##M("v18", "v20", "v21", "", "", "")                            \
      INGOT_LOAD##M("20", "21", "%[x]", "4") INGOT_STEP##M("v19", "v22", "v23", "", low_even, high_even)                     \
      fourth INGOT_LOAD##M("22", "23", "%[x]", "5") INGOT_STEP##M("v16", "v20", "v21", "", "", "")                           \
      INGOT_LOAD##M("20", "21", "%[x]", "6")                                                                                 \
      INGOT_STEP##M("v17", "v22", "v23", "add %[w], %[w], #" bytes "\nsubs %w[left], %w[left], #1\n", low_odd, high_odd)     \
      "csel %[at], %[quanta], %[w], eq\n" next INGOT_LOAD##M("22", "23", "%[x]", "7")                                        \
      INGOT_STEP##M("v18", "v20", "v21", INGOT_FACTORS##M("%[factors]"), "add %[x], %[x], #32 * " #M "\n", "")               \
      "csel %[at], %[values], %[x], eq\n" INGOT_LOAD##M("20", "21", "%[at]", "0")                                            \
      INGOT_STEP##M("v19", "v22", "v23", "", low_even, high_even)                                                            \
      "ldrb %w[marks], [%[marked]], #" #M "\ncbnz %w[marks], 4f\n3:\n"                                                       \
      INGOT_FLOATS##M                                                                                                        \
      "lsr %[at], %[block], %[shift]\ncsel %[at], xzr, %[at], eq\ntst %[block], %[mask]\nb.ne 2f\n"                          \
      "ldr d9, [%[biases]], #8\n" INGOT_FACTORS##M("%[totals]") "fcvtl v9.4s, v9.4h\n" centre INGOT_BIASES##M                \
      "ldr d8, [%[scales], %[at], lsl #3]\n" INGOT_LESS                                                                      \
      "2:\nadd %[rests], %[rests], #32 * " #M "\ncbnz %w[left], 1b\nb 5f\n"                                                  \
      "4:\nrbit %w[at], %w[marks]\nclz %w[at], %w[at]\nmov %w[from], #4 * " #M "\nmadd %[from], %[at], %[from], %[rests]\n"  \
      INGOT_LOAD##M("22", "23", "%[from]", "0") rest                                                                         \
      "sub %w[at], %w[marks], #1\nand %w[marks], %w[marks], %w[at]\ncbnz %w[marks], 4b\nb 3b\n"                              \
      "5:\n" INGOT_STORE##M                                                                                                  \
      : [w] "+r"(w), [x] "+r"(x), [factors] "+r"(factors), [block] "+r"(block), [left] "+r"(left), [at] "=&r"(at),           \
        [biases] "+r"(biases), [totals] "+r"(totals), [marked] "+r"(marked), [rests] "+r"(rests), [marks] "=&r"(marks),      \
        [from] "=&r"(from)                                                                                                   \
      : [quanta] "r"(quanta), [values] "r"(lot.values), [scales] "r"(scales), [shift] "r"(shift), [less] "r"(less),          \
        [start] "r"(kStarts), [sums] "r"(sums), [mask] "r"(mask), [shifts] "r"(kShifts)                                      \
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17",  \
        "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "cc", "memory")

#define INGOT_LOT_OF_BYTES(M)                                                                                                \
  INGOT_LOT(M, "128", "ldp q16, q17, [%[w]]\n", "ldp q18, q19, [%[w], #32]\n", "ldp q16, q17, [%[w], #64]\n",                \
            "ldp q18, q19, [%[w], #96]\n", "ldp q16, q17, [%[at]]\n", "", "", "", "", "fmla v9.4s, v8.4s, v13.4s\n",         \
            "add %[from], %[w], %[at], lsl #4\nldr q18, [%[from], #-128]\n" INGOT_SHIFTED##M)
#define INGOT_LOT_OF_HALVES(M)                                                                                               \
  INGOT_LOT(M, "64", "ldr q17, [%[w]]\n", "ldr q19, [%[w], #16]\n", "ldr q17, [%[w], #32]\n", "ldr q19, [%[w], #48]\n",      \
            "ldr q17, [%[at]]\n", "and v16.16b, v17.16b, v15.16b\n", "ushr v17.16b, v17.16b, #4\n",                          \
            "and v18.16b, v19.16b, v15.16b\n", "ushr v19.16b, v19.16b, #4\n", "",                                            \
            INGOT_HALF_STEP INGOT_STEP##M("v18", "v22", "v23", "", "", ""))

// The same with one row or two: they wait for weights rather than for products, so that less has to be in order.
#define INGOT_ROWS1 "ldp q24, q25, [%[x]], #32\nldr q26, [%[start]]\nldr s10, [%[factors]], #4\n"
#define INGOT_DOTS1(w, one, a, b) INGOT_DOT("26", w, one)
#define INGOT_SCALED1 "fsub v26.4s, v26.4s, v14.4s\nfmul v26.4s, v26.4s, v8.4s\n" INGOT_ADD("0", "26", "v10.s[0]")
#define INGOT_ADDED1 INGOT_ADD("0", "9", "v11.s[0]")
#define INGOT_BYTE_RESTS1 INGOT_SHIFTED("26", "v22.4b[0]")
#define INGOT_HALF_RESTS1 INGOT_DOT("26", "v18", "v22.4b[0]")
#define INGOT_KEEP1 "str q0, [%[sums]]\n"
#define INGOT_ROWS2                                                                                                                    \
  "ldp q27, q28, [%[x], #32]\nldp q24, q25, [%[x]], #64\nldp q26, q29, [%[start]]\nldr d10, [%[factors]], #8\n"
#define INGOT_DOTS2(w, one, a, b) INGOT_DOT("26", w, a) INGOT_DOT("29", w, b)
#define INGOT_SCALED2                                                                                                                  \
  "fsub v26.4s, v26.4s, v14.4s\nfsub v29.4s, v29.4s, v14.4s\nfmul v26.4s, v26.4s, v8.4s\nfmul v29.4s, v29.4s, v8.4s\n"                 \
  INGOT_ADD("0", "26", "v10.s[0]") INGOT_ADD("1", "29", "v10.s[1]")
#define INGOT_ADDED2 INGOT_ADDED1 INGOT_ADD("1", "9", "v11.s[1]")
#define INGOT_BYTE_RESTS2 INGOT_BYTE_RESTS1 INGOT_SHIFTED("29", "v22.4b[1]")
#define INGOT_HALF_RESTS2 INGOT_HALF_RESTS1 INGOT_DOT("29", "v18", "v22.4b[1]")
#define INGOT_KEEP2 "stp q0, q1, [%[sums]]\n"

// `some` is the register with what there is one of for each row, by its size.
#define INGOT_FEW(M, some, shift_some, bytes, weights, low0, high0, low1, high1, low2, high2, low3, high3, centre, rest)               \
  asm volatile(                                                                                                                        \
      "movi v0.4s, #0\nmovi v1.4s, #0\nmovi v15.16b, #15\nmovi v13.4s, #0x43, lsl #24\nldr q14, [%[start]]\n"                          \
      "1:\n" weights INGOT_ROWS##M                                                                                                     \
      "lsr %[at], %[block], %[shift]\nadd %[block], %[block], #1\nldr d8, [%[scales], %[at], lsl #3]\n"                                \
      "ldrb %w[marks], [%[marked]], #" #M "\nadd %[w], %[w], #" bytes "\n" low0 high0 low1 high1                                       \
      INGOT_DOTS##M("v16", "v24.4b[0]", "v24.4b[0]", "v24.4b[1]") low2 INGOT_DOTS##M("v17", "v24.4b[1]", "v24.4b[2]", "v24.4b[3]") high2 \
      INGOT_DOTS##M("v18", "v24.4b[2]", "v25.4b[0]", "v25.4b[1]") low3 INGOT_DOTS##M("v19", "v24.4b[3]", "v25.4b[2]", "v25.4b[3]") high3 \
      INGOT_DOTS##M("v20", "v25.4b[0]", "v27.4b[0]", "v27.4b[1]") "fcvtl v8.4s, v8.4h\n"                                               \
      INGOT_DOTS##M("v21", "v25.4b[1]", "v27.4b[2]", "v27.4b[3]")                                                                      \
      INGOT_DOTS##M("v22", "v25.4b[2]", "v28.4b[0]", "v28.4b[1]") INGOT_DOTS##M("v23", "v25.4b[3]", "v28.4b[2]", "v28.4b[3]")          \
      "cbnz %w[marks], 4f\n3:\n" INGOT_SCALED##M "tst %[block], %[mask]\nb.ne 2f\n"                                                    \
      "ldr d9, [%[biases]], #8\nldr " some "11, [%[totals]], #4 * " #M "\nfcvtl v9.4s, v9.4h\n" centre INGOT_ADDED##M                  \
      "2:\nsub %w[left], %w[left], #1\nadd %[rests], %[rests], #32 * " #M "\ncbnz %w[left], 1b\nb 5f\n"                                \
      "4:\nrbit %w[at], %w[marks]\nclz %w[at], %w[at]\nldr " some "22, [%[rests], %[at], lsl #" shift_some "]\n" rest                  \
      "sub %w[at], %w[marks], #1\nand %w[marks], %w[marks], %w[at]\ncbnz %w[marks], 4b\nb 3b\n"                                        \
      "5:\n" INGOT_KEEP##M                                                                                                             \
      : [w] "+r"(w), [x] "+r"(x), [factors] "+r"(factors), [block] "+r"(block), [left] "+r"(left), [at] "=&r"(at),                     \
        [biases] "+r"(biases), [totals] "+r"(totals), [marked] "+r"(marked), [rests] "+r"(rests), [marks] "=&r"(marks),                \
        [from] "=&r"(from)                                                                                                             \
      : [scales] "r"(scales), [shift] "r"(shift), [start] "r"(kStarts), [sums] "r"(sums), [mask] "r"(mask), [shifts] "r"(kShifts)      \
      : "v0", "v1", "v8", "v9", "v10", "v11", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23",             \
        "v24", "v25", "v26", "v27", "v28", "v29", "cc", "memory")
#define INGOT_FEW_OF_BYTES(M, some, shift_some)                                                                                        \
  INGOT_FEW(M, some, shift_some, "128",                                                                                                \
            "ldp q16, q17, [%[w]]\nldp q18, q19, [%[w], #32]\nldp q20, q21, [%[w], #64]\nldp q22, q23, [%[w], #96]\n"                  \
            "prfm pldl1keep, [%[w], #2048]\nprfm pldl1keep, [%[w], #2112]\n", "", "", "", "", "", "", "", "",                          \
            "fmla v9.4s, v8.4s, v13.4s\n", "add %[from], %[w], %[at], lsl #4\nldr q18, [%[from], #-128]\n" INGOT_BYTE_RESTS##M)
#define INGOT_FEW_OF_HALVES(M, some, shift_some)                                                                                       \
  INGOT_FEW(M, some, shift_some, "64", "ldp q17, q19, [%[w]]\nldp q21, q23, [%[w], #32]\nprfm pldl1keep, [%[w], #2048]\n",             \
            "and v16.16b, v17.16b, v15.16b\n", "ushr v17.16b, v17.16b, #4\n", "and v18.16b, v19.16b, v15.16b\n",                       \
            "ushr v19.16b, v19.16b, #4\n", "and v20.16b, v21.16b, v15.16b\n", "ushr v21.16b, v21.16b, #4\n",                           \
            "and v22.16b, v23.16b, v15.16b\n", "ushr v23.16b, v23.16b, #4\n", "", INGOT_HALF_STEP INGOT_HALF_RESTS##M)

// Makes of a byte its low or its high half, in front of kRestBits bits of nothing.
alignas(16) constexpr int8_t kShifts[2][16] = {{3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3},
                                               {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}};
static_assert(kRestBits == 3);

template <int M, int Bits>
void lot_products(const uint8_t* quanta, const Half* scales, const Half* biases, int per_group, const Quantised& lot, int blocks,
                  float* sums) {
  alignas(16) float less[4] = {-kStart, -kStart, -kStart, -kStart};
  const uint64_t shift = std::countr_zero(static_cast<unsigned>(per_group)), mask = per_group - 1;
  const uint8_t *w = quanta, *marked = lot.marks, *from;
  const int8_t *x = lot.values, *rests = lot.rests;
  const float *factors = lot.scales, *totals = lot.sums;
  uint64_t block = 0, at;
  int left = blocks, marks;
  if constexpr (M == 8 && Bits == 8) INGOT_LOT_OF_BYTES(8);
  if constexpr (M == 4 && Bits == 8) INGOT_LOT_OF_BYTES(4);
  if constexpr (M == 8 && Bits == 4) INGOT_LOT_OF_HALVES(8);
  if constexpr (M == 4 && Bits == 4) INGOT_LOT_OF_HALVES(4);
  if constexpr (M == 2 && Bits == 8) INGOT_FEW_OF_BYTES(2, "d", "3");
  if constexpr (M == 2 && Bits == 4) INGOT_FEW_OF_HALVES(2, "d", "3");
  if constexpr (M == 1 && Bits == 8) INGOT_FEW_OF_BYTES(1, "s", "2");
  if constexpr (M == 1 && Bits == 4) INGOT_FEW_OF_HALVES(1, "s", "2");
}

#undef INGOT_FEW_OF_HALVES
#undef INGOT_FEW_OF_BYTES
#undef INGOT_FEW
#undef INGOT_KEEP2
#undef INGOT_HALF_RESTS2
#undef INGOT_BYTE_RESTS2
#undef INGOT_ADDED2
#undef INGOT_SCALED2
#undef INGOT_DOTS2
#undef INGOT_ROWS2
#undef INGOT_KEEP1
#undef INGOT_HALF_RESTS1
#undef INGOT_BYTE_RESTS1
#undef INGOT_ADDED1
#undef INGOT_SCALED1
#undef INGOT_DOTS1
#undef INGOT_ROWS1
#undef INGOT_LOT_OF_HALVES
#undef INGOT_LOT_OF_BYTES
#undef INGOT_LOT
#undef INGOT_STORE8
#undef INGOT_SHIFTED8
#undef INGOT_BIASES8
#undef INGOT_FLOATS8
#undef INGOT_FACTORS8
#undef INGOT_START8
#undef INGOT_LOAD8
#undef INGOT_STEP8
#undef INGOT_STORE4
#undef INGOT_SHIFTED4
#undef INGOT_BIASES4
#undef INGOT_FLOATS4
#undef INGOT_FACTORS4
#undef INGOT_START4
#undef INGOT_LOAD4
#undef INGOT_STEP4
#undef INGOT_SHIFTED
#undef INGOT_LESS
#undef INGOT_ADD
#undef INGOT_SCALE
#undef INGOT_HALF_STEP
#undef INGOT_DOT

}  // namespace
}  // namespace ingot
