#include "draw.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr int kLanes = 16;

// Where the first of the largest values is.
int largest(const float* x, int count) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, x[0]);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
  float most = lanes[0];
  for (int l = 1; l < kLanes; l++) most = lanes[l] > most ? lanes[l] : most;
  for (; i < count; i++) most = x[i] > most ? x[i] : most;
  const float* found = std::find(x, x + count, most);
  return found == x + count ? 0 : static_cast<int>(found - x);
}

// exp((x - most) / temperature), of which none is above 1; 0 far below.
void weigh(const float* x, int count, float most, float temperature, float* out) {
  constexpr float kToWhole = 12582912.0f;  // what is added to it loses all behind the point
  for (int i = 0; i < count; i++) {
    const float power = (x[i] - most) / temperature, bounded = power > -87.0f ? power : -87.0f;
    const float n = (bounded * 1.44269504f + kToWhole) - kToWhole;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const float scaled = y * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
    out[i] = power > -87.0f ? scaled : 0.0f;
  }
}

// Weights sorted coarsely, by what their first bits say: those of one bin are sorted only where it matters.
class Bins {
 public:
  Bins(const float* weights, int count)
      : weights_(weights), count_(count), sums_(kBins), least_(kBins, 1.0f), sizes_(kBins) {
    for (int i = 0; i < count; i++) {
      const int bin = of(weights[i]);
      sums_[bin] += weights[i];
      least_[bin] = std::min(least_[bin], weights[i]);
      sizes_[bin]++;
    }
  }

  struct Reached {
    float last = 0;
    double sum = 0;
  };

  // Goes through the weights from the heaviest on, until there are `most` or they add up to `goal`.
  Reached fall(int most, double goal) const {
    Reached reached;
    int seen = 0;
    for (int bin = kBins - 1; bin >= 0; bin--) {
      if (sizes_[bin] == 0) continue;
      if (seen + sizes_[bin] <= most && reached.sum + sums_[bin] <= goal) {
        seen += sizes_[bin];
        reached = {least_[bin], reached.sum + sums_[bin]};
        continue;
      }
      for (float weight : inside(bin)) {
        if (seen == most || (seen > 0 && reached.sum >= goal)) return reached;
        seen++;
        reached = {weight, reached.sum + weight};
      }
    }
    return reached;
  }

 private:
  static constexpr int kBins = 1 << 12;  // 8 bits of exponent and 4 of what follows it; a weight has no sign
  static int of(float weight) { return static_cast<int>(std::bit_cast<uint32_t>(weight) >> 19); }

  std::vector<float> inside(int bin) const {
    std::vector<float> found;
    for (int i = 0; i < count_; i++)
      if (of(weights_[i]) == bin) found.push_back(weights_[i]);
    std::sort(found.begin(), found.end(), std::greater<>());
    return found;
  }

  const float* weights_;
  int count_;
  std::vector<double> sums_;
  std::vector<float> least_;
  std::vector<int> sizes_;
};

// The least weight that stays; the heaviest is 1.
float least(const float* weights, int count, const Draw& how) {
  float limit = how.min_p;
  if (how.top_k == 0 && how.top_p >= 1.0f) return limit;
  const Bins bins(weights, count);
  const int most = how.top_k > 0 ? std::min(how.top_k, count) : count;
  Bins::Reached reached = bins.fall(most, std::numeric_limits<double>::infinity());
  if (how.top_p < 1.0f) reached = bins.fall(most, reached.sum * how.top_p);
  return std::max(limit, reached.last);
}

uint32_t drawn(const float* logits, int count, const Draw& how) {
  const int likeliest = largest(logits, count);
  if (how.temperature == 0) return likeliest;
  const auto weights = std::make_unique_for_overwrite<float[]>(count);
  weigh(logits, count, logits[likeliest], how.temperature, weights.get());
  const float limit = least(weights.get(), count, how);
  double total = 0, running = 0;
  for (int i = 0; i < count; i++) {
    if (weights[i] < limit) weights[i] = 0;
    total += weights[i];
  }
  for (int i = 0; i < count; i++)
    if ((running += weights[i]) > how.at * total) return i;
  return likeliest;  // of a draw so close to one that rounding leaves nothing above it
}

class DrawPrimitive : public mx::Primitive {
 public:
  DrawPrimitive(mx::Stream stream, std::vector<Draw> draws) : Primitive(stream), draws_(std::move(draws)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(inputs[0]);
    encoder.set_output_array(outputs[0]);
    encoder.dispatch([draws = draws_, logits = inputs[0].data<float>(), vocab = inputs[0].shape(1),
                      tokens = outputs[0].data<uint32_t>()] {
      Pool::shared().each(static_cast<int>(draws.size()), [&](int row) {
        tokens[row] = drawn(logits + static_cast<size_t>(row) * vocab, vocab, draws[row]);
      });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

  const char* name() const override { return "IngotDraw"; }

 private:
  std::vector<Draw> draws_;
};

}  // namespace

mx::array draw(const mx::array& logits, std::vector<Draw> draws, mx::StreamOrDevice s) {
  require(logits.ndim() == 2 && logits.shape(1) > 0, "logits must be [rows, vocab]");
  require(static_cast<size_t>(logits.shape(0)) == draws.size(), "there must be a draw for each row");
  for (const Draw& how : draws)
    require(how.temperature >= 0 && how.top_k >= 0, "a temperature or a top_k is below nought");
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  return mx::array({logits.shape(0)}, mx::uint32, std::make_shared<DrawPrimitive>(stream, std::move(draws)),
                   {mx::contiguous(mx::astype(logits, mx::float32, stream), false, stream)});
}

}  // namespace ingot
