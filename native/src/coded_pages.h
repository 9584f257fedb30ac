// One head's pages in fewer bits, as attention reads them: how each is laid out, and where those of a sequence lie.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr int kLargestCoded = 512;  // numbers of a head

// Keys or values of a page. Codes and scales are those of the codecs of kept records (codes.h).
struct CodedSide {
  int bits;             // of a code; 0: they are numbers as they were computed
  int group;            // numbers that share a step and a least; 0: directions, rotated
  size_t codes, scales;  // where they begin
  const float* levels;  // [16] of a rotated coordinate, of which there are 1 << bits
  const float* signs;   // [size], which were multiplied with before it was rotated
};

struct CodedLayout {
  int size;         // of a head
  bool halves;      // what is not coded is halves, or else floats
  bool centred;     // keys are around what those of a page have in common
  size_t centre;    // where that begins
  size_t head;      // bytes of a head's page
  CodedSide keys, values;
};

struct Coded {
  const CodedLayout* layout;
  const uint8_t* first;  // this head's, in the first of all pages
  const int32_t* pages;  // the sequence's, from its beginning on
  int count;             // of them: what lies behind is not coded
  size_t stride;         // from page to page

  const uint8_t* at(int page) const { return first + static_cast<size_t>(pages[page]) * stride; }
};

}  // namespace ingot
