// Rotary positions, with the angles of a launch computed once for all layers that turn by the same.
#pragma once

#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "mlx/mlx.h"
#include "weights.h"

namespace ingot {

// Tokens [first, first + count) of a launch are those of one sequence, in the row `slot` of the states: they stand at
// the positions from `start` on, and their keys at the places from `place` on. Each sees the `window` newest tokens,
// itself among them, or all before it where that is 0.
struct Span {
  int first, count, slot, start, place, window;
};

constexpr int kFarthest = std::numeric_limits<int>::max();  // no position is beyond it

class Rotation {
 public:
  // `angles` [dims / 2]: what a pair turns by from one position to the next. What is turned is also multiplied by `gain`.
  Rotation(const mlx::core::array& angles, int dims, bool neighbours, float gain);

  struct Table {
    std::vector<int> key;
    std::vector<float> cosines, sines;  // [tokens, dims / 2]
  };
  std::shared_ptr<const Table> table(const std::vector<Span>& spans, int tokens) const;
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
