#include "rotation.h"

#include <cmath>

#include "floats.h"
#include "pool.h"

namespace ingot {

Rotation::Rotation(const mlx::core::array& angles, int dims, bool neighbours, float gain)
    : dims_(dims), neighbours_(neighbours), gain_(gain), angles_(angles, dims / 2) {
  require(dims >= 0 && dims % 2 == 0, "only an even number of dims can be turned");
}

std::shared_ptr<const Rotation::Table> Rotation::table(const std::vector<Span>& spans, int tokens) const {
  std::vector<int> key{tokens};
  for (const Span& span : spans) key.insert(key.end(), {span.first, span.count, span.start});
  {
    std::lock_guard hold(lock_);
    if (last_ && last_->key == key) return last_;
  }
  const size_t half = dims_ / 2;
  auto made = std::make_shared<Table>();
  made->key = std::move(key);
  made->cosines.resize(tokens * half);
  made->sines.resize(tokens * half);
  for (const Span& span : spans)
    each_token(span.count, [&](int i) {
      const size_t at = (span.first + i) * half;
      float *cosines = made->cosines.data() + at, *sines = made->sines.data() + at;
      for (size_t d = 0; d < half; d++) {
        // In double: at far positions a float would not hold the angle's turns.
        const double angle = static_cast<double>(span.start + i) * angles_.data()[d];
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
