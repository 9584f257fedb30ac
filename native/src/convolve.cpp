#include "convolve.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "product.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr int kRows = 256;     // of a task: its sums stay in the second-level cache while taps pass by
constexpr int kColumns = 256;  // of a task at most, where rows alone would not keep all threads busy

struct Filter {
  int rows, inputs, outputs, taps, dilation, front, count;

  int lots() const { return (count + kRows - 1) / kRows; }
  int panels() const { return lots() >= Pool::shared().threads() ? 1 : (outputs + kColumns - 1) / kColumns; }
};

// Some rows and columns: no copies of neighbours are made, each tap adds its product to what those before it gave.
void filter(const Filter& how, const float* x, const float* weight, const float* bias, int task, Sgemm sgemm, float* to) {
  constexpr int kRowMajor = 101, kAsIs = 111;
  const int lot = task / how.panels(), panel = task % how.panels();
  const int begin = static_cast<int>(static_cast<int64_t>(how.count) * lot / how.lots());
  const int end = static_cast<int>(static_cast<int64_t>(how.count) * (lot + 1) / how.lots());
  const int first = how.outputs * panel / how.panels(), last = how.outputs * (panel + 1) / how.panels();
  for (int row = begin; row < end; row++)
    std::copy(bias + first, bias + last, to + static_cast<size_t>(row) * how.outputs + first);
  for (int tap = 0; tap < how.taps; tap++) {
    const int shift = tap * how.dilation - how.front;
    const int from = std::max(begin, -shift), until = std::min(end, how.rows - shift);
    if (from >= until) continue;
    sgemm(kRowMajor, kAsIs, kAsIs, until - from, last - first, how.inputs, 1.0f,
          x + static_cast<size_t>(from + shift) * how.inputs, how.inputs,
          weight + static_cast<size_t>(tap) * how.inputs * how.outputs + first, how.outputs, 1.0f,
          to + static_cast<size_t>(from) * how.outputs + first, how.outputs);
  }
}

class Convolve : public mx::Primitive {
 public:
  Convolve(mx::Stream stream, Sgemm sgemm, const Filter& how) : Primitive(stream), sgemm_(sgemm), how_(how) {}
  const char* name() const override { return "IngotConvolve"; }
  bool is_equivalent(const Primitive& other) const override {
    const Filter& its = static_cast<const Convolve&>(other).how_;
    return how_.dilation == its.dilation && how_.front == its.front && how_.count == its.count;
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& input : inputs) {
      if (!input.flags().row_contiguous) throw std::runtime_error("ingot_native: an input is not contiguous");
      encoder.set_input_array(input);
    }
    encoder.set_output_array(y);
    encoder.dispatch([how = how_, sgemm = sgemm_, x = inputs[0].data<float>(), weight = inputs[1].data<float>(),
                      bias = inputs[2].data<float>(), to = y.data<float>()] {
      Pool::shared().each(how.lots() * how.panels(),
                          [&](int task) { filter(how, x, weight, bias, task, sgemm, to); });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

 private:
  Sgemm sgemm_;
  Filter how_;
};

}  // namespace

mx::array convolve(const mx::array& x, const mx::array& weight, const mx::array& bias, int dilation, int front, int count,
                   mx::StreamOrDevice s) {
  require(named_blas() != nullptr, "a convolution needs a BLAS");
  require(x.ndim() == 2 && weight.ndim() == 3 && bias.ndim() == 1 && x.shape(1) == weight.shape(1) &&
              bias.shape(0) == weight.shape(2),
          "a convolution takes [rows, inputs], [taps, inputs, outputs] and [outputs]");
  require(x.size() > 0 && weight.size() > 0, "there is nothing to convolve");
  require(dilation > 0 && front >= 0 && count > 0, "a convolution has a dilation, and makes rows");
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  auto plain = [&](const mx::array& a) { return mx::contiguous(mx::astype(a, mx::float32, stream), false, stream); };
  const Filter how{x.shape(0), x.shape(1), weight.shape(2), weight.shape(0), dilation, front, count};
  return mx::array({count, weight.shape(2)}, mx::float32, std::make_shared<Convolve>(stream, named_blas(), how),
                   {plain(x), plain(weight), plain(bias)});
}

}  // namespace ingot
