// Experts that a thread has read from a file, brought into the order and the number formats of memory that kernels read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ingot {

enum class Numbers { bytes, bfloat16, float16, float32 };

// One array of the experts that kernels read: where it begins, and how far it is from one expert to the next.
struct Target {
  uintptr_t address;
  size_t stride;
};

// How the bytes of an expert in a file become those that the kernels of this machine read. It may be used by several
// threads at once, as long as none of them fills a slot that others read or fill.
class Arrival {
 public:
  // A matrix as mx.quantize gives it, with 4 or 8 bits in mode affine or with mxfp4; others are not known here. `given` are the
  // numbers of quanta, scales and biases among what `fill` is given; mxfp4 has no biases (-1).
  void add_packed(int rows, int columns, int group, int bits, bool mxfp4, std::vector<int> given, Numbers factors,
                  std::vector<Target> targets, Numbers stored);
  // Numbers in their order, as they are or in another format.
  void add_plain(size_t count, int given, Numbers from, Target target, Numbers to);

  // Where an expert's arrays lie, and into which slot they go.
  void fill(const std::vector<uintptr_t>& given, size_t slot) const;

 private:
  struct Packed {
    int rows, columns, group, bits;
    bool mxfp4;
    std::vector<int> given;
    Numbers factors;
    std::vector<Target> targets;
    Numbers stored;
  };
  struct Plain {
    size_t count;
    int given;
    Numbers from;
    Target target;
    Numbers to;
  };

  std::vector<Packed> packed_;
  std::vector<Plain> plain_;
};

}  // namespace ingot
