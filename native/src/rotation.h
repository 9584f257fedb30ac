// Rotary positions, with the angles of a launch computed once for all layers that turn by the same.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "mlx/mlx.h"
#include "weights.h"

namespace ingot {

class Rotation {
 public:
  // `angles` [dims / 2]: what a pair turns by from one position to the next. What is turned is also multiplied by `gain`.
  Rotation(const mlx::core::array& angles, int dims, bool neighbours, float gain);

  struct Table {
    std::vector<int32_t> positions;
    std::vector<float> cosines, sines;  // [tokens, dims / 2]
  };
  std::shared_ptr<const Table> table(const std::vector<int32_t>& positions) const;
  void turn(float* head, const Table& table, int token) const;
  int dims() const { return dims_; }

 private:
  int dims_;
  bool neighbours_;
  float gain_;
  Vector angles_;
  mutable std::mutex lock_;
  mutable std::shared_ptr<const Table> last_;
};

}  // namespace ingot
