// Codes, a byte each, in as many bits as they have, and back (the layout is that of ingot/cache/codecs/codec.py): of n bytes,
// byte j has the codes of places j, j + n and so on. Three bits are a plane of two, then a plane of one.
#pragma once

#include <cstring>

#include "hadamard.h"
#include "vectors.h"

namespace ingot {
namespace {  // each instruction set has its own

typedef uint64_t Words __attribute__((vector_size(16)));

// The same byte everywhere.
template <class W>
inline W filled(uint8_t byte) {
  if constexpr (sizeof(W) == 1)
    return byte;
  else
    return byte * 0x0101010101010101u - W{};
}

// As many bytes at a time as W has, from byte j on while there are so many; the first byte that is left. Nothing crosses from
// one byte to the next: what is shifted there is masked before or after.
template <class W, int Width, int Below>
INGOT_INLINE inline int pack_words(const uint8_t* codes, int n, uint8_t* bytes, int j) {
  const W mask = filled<W>((1 << Width) - 1);
  for (; j + static_cast<int>(sizeof(W)) <= n; j += sizeof(W)) {
    W whole = {};
    repeated<8 / Width>([&](auto place) {
      W some;
      std::memcpy(&some, codes + place * n + j, sizeof some);
      whole |= (some >> Below & mask) << (place * Width);
    });
    std::memcpy(bytes + j, &whole, sizeof whole);
  }
  return j;
}

template <class W, int Width, int Below>
INGOT_INLINE inline int unpack_words(const uint8_t* bytes, int n, uint8_t* codes, int j) {
  const W mask = filled<W>((1 << Width) - 1);
  for (; j + static_cast<int>(sizeof(W)) <= n; j += sizeof(W)) {
    W whole;
    std::memcpy(&whole, bytes + j, sizeof whole);
    repeated<8 / Width>([&](auto place) {
      W some = {};
      if constexpr (Below > 0) std::memcpy(&some, codes + place * n + j, sizeof some);
      some |= (whole >> (place * Width) & mask) << Below;
      std::memcpy(codes + place * n + j, &some, sizeof some);
    });
  }
  return j;
}

template <int Width, int Below>
inline void pack_plane(const uint8_t* codes, int size, uint8_t* bytes) {
  const int n = size * Width / 8;
  int j = pack_words<Words, Width, Below>(codes, n, bytes, 0);
  j = pack_words<uint64_t, Width, Below>(codes, n, bytes, j);
  pack_words<uint8_t, Width, Below>(codes, n, bytes, j);
}

template <int Width, int Below>
inline void unpack_plane(const uint8_t* bytes, int size, uint8_t* codes) {
  const int n = size * Width / 8;
  int j = unpack_words<Words, Width, Below>(bytes, n, codes, 0);
  j = unpack_words<uint64_t, Width, Below>(bytes, n, codes, j);
  unpack_words<uint8_t, Width, Below>(bytes, n, codes, j);
}

template <int Bits>
inline void pack(const uint8_t* codes, int size, uint8_t* bytes) {
  if constexpr (Bits == 3) {
    pack_plane<2, 0>(codes, size, bytes);
    pack_plane<1, 2>(codes, size, bytes + size / 4);
  } else {
    pack_plane<Bits, 0>(codes, size, bytes);
  }
}

template <int Bits>
inline void unpack(const uint8_t* bytes, int size, uint8_t* codes) {
  if constexpr (Bits == 3) {
    unpack_plane<2, 0>(bytes, size, codes);
    unpack_plane<1, 2>(bytes + size / 4, size, codes);
  } else {
    unpack_plane<Bits, 0>(bytes, size, codes);
  }
}

// Of a vector's codes in a plane, those of as many places from `At` on as a vector has; above their bits may be anything.
template <int Width, int Size, int At>
INGOT_INLINE inline IntegerVec plane_at(const uint8_t* bytes) {
  constexpr int kBytes = Size * Width / 8;
  if constexpr (kBytes >= kVector) {
    return bytes_at(bytes + At % kBytes) >> (At / kBytes * Width);
  } else {
    uint8_t again[kVector];
    IntegerVec shift = {};
    repeated<kVector / kBytes>([&](auto part) {
      std::memcpy(again + part * kBytes, bytes, kBytes);
      repeated<kBytes>([&](auto j) { shift[part * kBytes + j.value] = (At / kBytes + part) * Width; });
    });
    return bytes_at(again) >> shift;
  }
}

// The same of codes.
template <int Bits, int Size, int At>
INGOT_INLINE inline IntegerVec codes_at(const uint8_t* bytes) {
  if constexpr (Bits == 3)
    return (plane_at<2, Size, At>(bytes) & 3) | (plane_at<1, Size, At>(bytes + Size / 4) << 2);
  else
    return plane_at<Bits, Size, At>(bytes);
}

// Numbers below 256.
inline void put_bytes(uint8_t* to, IntegerVec numbers) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)numbers));
#elif defined(__AVX2__)
  const __m256i wide = (__m256i)numbers;
  const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(shorts, shorts));
#else
  const ByteVec bytes = __builtin_convertvector(numbers, ByteVec);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

// The same of as many numbers as are put into bytes together.
#if defined(__AVX512BW__)
constexpr int kBytes = 4 * kVector;

INGOT_INLINE inline void put_bytes(uint8_t* to, const IntegerVec (&numbers)[4]) {
  const __m512i first = _mm512_packus_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
  const __m512i second = _mm512_packus_epi32((__m512i)numbers[2], (__m512i)numbers[3]);
  // Quarters of vectors were put side by side.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second)));
}
#elif defined(__AVX2__)
constexpr int kBytes = 4 * kVector;

INGOT_INLINE inline void put_bytes(uint8_t* to, const IntegerVec (&numbers)[4]) {
  const __m256i first = _mm256_packus_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
  const __m256i second = _mm256_packus_epi32((__m256i)numbers[2], (__m256i)numbers[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // halves of vectors were put side by side
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
}
#else
constexpr int kBytes = kVector;

INGOT_INLINE inline void put_bytes(uint8_t* to, const IntegerVec (&numbers)[1]) { put_bytes(to, numbers[0]); }
#endif

// numbers(at) of all places, a vector at a time, while there are so many; the first place that is left.
template <class Size, class Numbers>
INGOT_INLINE inline int put_all_bytes(uint8_t* to, Size size, const Numbers& numbers) {
  int at = 0;
  for (; at + kBytes <= size; at += kBytes) {
    IntegerVec some[kBytes / kVector];
    repeated<kBytes / kVector>([&](auto part) { some[part] = numbers(at + part * kVector); });
    put_bytes(to + at, some);
  }
  for (; at + kVector <= size; at += kVector) put_bytes(to + at, numbers(at));
  return at;
}

}  // namespace
}  // namespace ingot
