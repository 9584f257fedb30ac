#include "rows.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr size_t kShare = 8192;  // values that are worth a thread's attention

// Calls body(first, last) for shares of `count` rows of `width` values.
template <class Body>
void shared_out(size_t count, size_t width, const Body& body) {
  const size_t rows = std::max<size_t>(1, kShare / std::max<size_t>(1, width));
  const int shares = static_cast<int>((count + rows - 1) / rows);
  auto share = [&](int index) { body(index * rows, std::min(count, (index + 1) * rows)); };
  if (shares <= 1)
    for (int index = 0; index < shares; index++) share(index);
  else
    Pool::shared().each(shares, share);
}

// Contiguous float32 inputs; one output whose rows follow from the rows of the inputs.
class Rows : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<const float*> from;
    for (const mx::array& input : inputs) {
      if (!input.flags().row_contiguous) throw std::runtime_error("ingot_native: an input is not contiguous");
      encoder.set_input_array(input);
      from.push_back(input.data<float>());
    }
    encoder.set_output_array(y);
    const size_t width = y.shape(-1);
    encoder.dispatch([work = work(static_cast<int>(width)), from = std::move(from), to = y.data<float>(), width,
                      count = width == 0 ? 0 : y.size() / width] {
      shared_out(count, width, [&](size_t first, size_t last) { work(from, first, last, to); });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

 protected:
  using Work = std::function<void(const std::vector<const float*>&, size_t first, size_t last, float* to)>;
  virtual Work work(int width) const = 0;
};

class RmsNorm : public Rows {
 public:
  RmsNorm(mx::Stream stream, float eps) : Rows(stream), eps_(eps) {}
  const char* name() const override { return "IngotRmsNorm"; }
  bool is_equivalent(const Primitive& other) const override { return eps_ == static_cast<const RmsNorm&>(other).eps_; }

 protected:
  Work work(int width) const override {
    return [eps = eps_, width](const std::vector<const float*>& from, size_t first, size_t last, float* to) {
      for (size_t row = first; row < last; row++)
        floats().rms_norm(from[0] + row * width, from[1], eps, width, to + row * width);
    };
  }

 private:
  float eps_;
};

class LayerNorm : public Rows {
 public:
  LayerNorm(mx::Stream stream, float eps, bool weighted, bool biased)
      : Rows(stream), eps_(eps), weighted_(weighted), biased_(biased) {}
  const char* name() const override { return "IngotLayerNorm"; }
  bool is_equivalent(const Primitive& other) const override {
    const auto& norm = static_cast<const LayerNorm&>(other);
    return eps_ == norm.eps_ && weighted_ == norm.weighted_ && biased_ == norm.biased_;
  }

 protected:
  Work work(int width) const override {
    return [eps = eps_, weighted = weighted_, biased = biased_, width](const std::vector<const float*>& from, size_t first,
                                                                       size_t last, float* to) {
      const float *weight = weighted ? from[1] : nullptr, *bias = biased ? from.back() : nullptr;
      for (size_t row = first; row < last; row++)
        floats().layer_norm(from[0] + row * width, weight, bias, eps, width, to + row * width);
    };
  }

 private:
  float eps_;
  bool weighted_, biased_;
};

class Gated : public Rows {
 public:
  Gated(mx::Stream stream, Gate kind) : Rows(stream), kind_(kind) {}
  const char* name() const override { return "IngotGated"; }
  bool is_equivalent(const Primitive& other) const override { return kind_ == static_cast<const Gated&>(other).kind_; }

 protected:
  Work work(int width) const override {
    return [kind = kind_, width](const std::vector<const float*>& from, size_t first, size_t last, float* to) {
      if (from.size() == 2) {
        const size_t begin = first * width;
        floats().gate(kind, from[0] + begin, from[1] + begin, (last - first) * width, to + begin);
        return;
      }
      for (size_t row = first; row < last; row++) {
        const float* gate = from[0] + 2 * row * width;
        floats().gate(kind, gate, gate + width, width, to + row * width);
      }
    };
  }

 private:
  Gate kind_;
};

class Snake : public Rows {
 public:
  using Rows::Rows;
  const char* name() const override { return "IngotSnake"; }
  bool is_equivalent(const Primitive&) const override { return true; }

 protected:
  Work work(int width) const override {
    return [width](const std::vector<const float*>& from, size_t first, size_t last, float* to) {
      for (size_t row = first; row < last; row++)
        floats().snake(from[0] + row * width, from[1], from[2], from[3], width, to + row * width);
    };
  }
};

mx::array plain(const mx::array& x, mx::Stream stream) {
  return mx::contiguous(mx::astype(x, mx::float32, stream), false, stream);
}

}  // namespace

mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps, mx::StreamOrDevice s) {
  require(x.ndim() >= 1 && weight.size() == static_cast<size_t>(x.shape(-1)), "a norm's weight has the wrong size");
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  return mx::array(x.shape(), mx::float32, std::make_shared<RmsNorm>(stream, eps),
                   {plain(x, stream), plain(weight, stream)});
}

mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight, const std::optional<mx::array>& bias,
                     float eps, mx::StreamOrDevice s) {
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  require(x.ndim() >= 1, "a norm needs an axis");
  std::vector<mx::array> inputs{plain(x, stream)};
  for (const std::optional<mx::array>* part : {&weight, &bias})
    if (*part) {
      require((*part)->size() == static_cast<size_t>(x.shape(-1)), "a norm's weight has the wrong size");
      inputs.push_back(plain(**part, stream));
    }
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<LayerNorm>(stream, eps, weight.has_value(), bias.has_value()), std::move(inputs));
}

mx::array gated(Gate kind, const mx::array& gate, const std::optional<mx::array>& up, mx::StreamOrDevice s) {
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  std::vector<mx::array> inputs{plain(gate, stream)};
  mx::Shape shape = gate.shape();
  require(gate.ndim() >= 1, "a gate needs an axis");
  if (up) {
    require(up->shape() == shape, "a gate and what it gates must be alike");
    inputs.push_back(plain(*up, stream));
  } else {
    require(shape.back() % 2 == 0, "a gate and what it gates must be alike");
    shape.back() /= 2;
  }
  return mx::array(std::move(shape), mx::float32, std::make_shared<Gated>(stream, kind), std::move(inputs));
}

mx::array snake(const mx::array& x, const mx::array& scale, const mx::array& shift, const mx::array& alpha,
                mx::StreamOrDevice s) {
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  require(x.ndim() >= 1, "a curve needs an axis");
  std::vector<mx::array> inputs{plain(x, stream)};
  for (const mx::array* part : {&scale, &shift, &alpha}) {
    require(part->size() == static_cast<size_t>(x.shape(-1)), "a curve's scale, shift or alpha has the wrong size");
    inputs.push_back(plain(*part, stream));
  }
  return mx::array(x.shape(), mx::float32, std::make_shared<Snake>(stream), std::move(inputs));
}

}  // namespace ingot
