#include "strided.h"

#include <cstdint>

namespace ingot {
namespace mx = mlx::core;

std::vector<float> gathered(const float* from, const mx::Shape& shape, const mx::Strides& strides) {
  size_t size = 1;
  for (int extent : shape) size *= extent;
  std::vector<float> out(size);
  std::vector<int> at(shape.size(), 0);
  int64_t offset = 0;
  for (float& value : out) {
    value = from[offset];
    for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; axis--) {
      offset += strides[axis];
      if (++at[axis] < shape[axis]) break;
      offset -= strides[axis] * shape[axis];
      at[axis] = 0;
    }
  }
  return out;
}

}  // namespace ingot
