#include "rotation.h"

#include <cmath>

#include "floats.h"
#include "pool.h"

namespace ingot {

Rotation::Rotation(const mlx::core::array& angles, int dims, bool neighbours, float gain)
    : dims_(dims), neighbours_(neighbours), gain_(gain), angles_(angles, dims / 2) {
  require(dims >= 0 && dims % 2 == 0, "only an even number of dims can be turned");
}

std::shared_ptr<const Rotation::Table> Rotation::table(const std::vector<int32_t>& positions) const {
  {
    std::lock_guard hold(lock_);
    if (last_ && last_->positions == positions) return last_;
  }
  const size_t half = dims_ / 2;
  auto made = std::make_shared<Table>();
  made->positions = positions;
  made->cosines.resize(positions.size() * half);
  made->sines.resize(positions.size() * half);
  each_token(static_cast<int>(positions.size()), [&](int token) {
    float *cosines = made->cosines.data() + token * half, *sines = made->sines.data() + token * half;
    for (size_t d = 0; d < half; d++) {
      // In double: at far positions a float would not hold the angle's turns.
      const double angle = static_cast<double>(positions[token]) * angles_.data()[d];
      cosines[d] = static_cast<float>(std::cos(angle)) * gain_;
      sines[d] = static_cast<float>(std::sin(angle)) * gain_;
    }
  });
  std::lock_guard hold(lock_);
  last_ = made;
  return made;
}

void Rotation::turn(float* head, const Table& table, int token) const {
  const size_t at = static_cast<size_t>(token) * (dims_ / 2);
  floats().rotate(head, table.cosines.data() + at, table.sines.data() + at, dims_, neighbours_);
}

}  // namespace ingot
