#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

std::atomic<Sgemm> blas{nullptr};

constexpr int kFew = 16;            // with more rows than this, a BLAS is faster
constexpr int kPanel = 64;          // weight rows that are unpacked at once: they stay in the second-level cache
constexpr int kRowsAtOnce = 64;     // activation rows that are quantised and multiplied before the next ones
constexpr int kTasksPerThread = 4;  // so that a thread that was held up does not hold up the others

class QuantisedRows {
 public:
  QuantisedRows(int rows, int columns, int group)
      : bytes_(2 * static_cast<size_t>(rows) * columns), scales_(static_cast<size_t>(rows) * columns / kBlock),
        sums_(static_cast<size_t>(rows) * columns / group), rows_(rows), columns_(columns), group_(group) {}

  Quantised at(int row) {
    const size_t all = static_cast<size_t>(rows_) * columns_, begin = static_cast<size_t>(row) * columns_;
    return {bytes_.data() + begin, bytes_.data() + all + begin, scales_.data() + begin / kBlock,
            sums_.data() + begin / group_};
  }

 private:
  std::vector<int8_t> bytes_;
  std::vector<float> scales_, sums_;
  int rows_, columns_, group_;
};

// Many rows: unpack some weights, let a BLAS multiply them, go on. The weights are read once for all rows, and a
// matrix product in floats is then as fast as one in integers.
void multiply_many(const PackedMatrix& w, const float* x, int count, float* y, Sgemm sgemm) {
  constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
  const int panels = (w.rows + kPanel - 1) / kPanel;
  Pool::shared().each(panels, [&](int panel) {
    static thread_local std::vector<float> unpacked;
    const int first = panel * kPanel, last = std::min(first + kPanel, w.rows);
    unpacked.resize(static_cast<size_t>(kPanel) * w.columns);
    kernels().unpack(w, first, last, unpacked.data());
    sgemm(kRowMajor, kPlain, kTransposed, count, last - first, w.columns, 1.0f, x, w.columns, unpacked.data(), w.columns,
          0.0f, y + first, w.rows);
  });
}

// Few rows: reading the weights is what takes time, so they are multiplied as they are packed.
void multiply_few(const PackedMatrix& w, const float* x, int count, float* y) {
  const Kernels& use = kernels();
  Pool& pool = Pool::shared();
  QuantisedRows quantised(count, w.columns, w.group);
  auto quantise = [&](int row) {
    use.quantise(x + static_cast<size_t>(row) * w.columns, w.columns, w.group, w.bits == 4, quantised.at(row));
  };
  if (count < 4)
    for (int row = 0; row < count; row++) quantise(row);
  else
    pool.each(count, quantise);
  const int tasks = pool.threads() == 1 ? 1 : std::max(1, std::min(pool.threads() * kTasksPerThread, w.rows / 16));
  pool.each(tasks, [&](int task) {
    // Ends on multiples of four, so that a row is computed the same way whatever the number of threads.
    auto edge = [&](int64_t t) { return t == tasks ? w.rows : static_cast<int>(w.rows * t / tasks / 4 * 4); };
    use.multiply(w, quantised.at(0), count, edge(task), edge(task + 1), y, w.rows);
  });
}

void multiply(const PackedMatrix& w, const float* x, int count, float* y) {
  if (Sgemm sgemm = blas.load(); count > kFew && sgemm != nullptr) {
    multiply_many(w, x, count, y, sgemm);
    return;
  }
  for (int begin = 0; begin < count; begin += kRowsAtOnce) {
    const int rows = std::min(kRowsAtOnce, count - begin);
    multiply_few(w, x + static_cast<size_t>(begin) * w.columns, rows, y + static_cast<size_t>(begin) * w.rows);
  }
}

// The values of an array with any strides, row after row.
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

class PackedLinear : public mx::Primitive {
 public:
  PackedLinear(mx::Stream stream, int group, int bits) : Primitive(stream), group_(group), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array &quanta = inputs[1], &scales = inputs[2], &biases = inputs[3];
    mx::array& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array& x = inputs[0];
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(y);
    const PackedMatrix w{reinterpret_cast<const uint8_t*>(quanta.data<uint32_t>()), scales.data<float>(),
                         biases.data<float>(), quanta.shape(0), x.shape(-1), group_, bits_};
    const int count = static_cast<int>(x.size() / w.columns);
    const float* from = x.data<float>();
    float* to = y.data<float>();
    if (x.flags().row_contiguous)
      encoder.dispatch([w, count, from, to] { multiply(w, from, count, to); });
    else
      encoder.dispatch([w, count, from, to, shape = x.shape(), strides = x.strides()] {
        multiply(w, gathered(from, shape, strides).data(), count, to);
      });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native.linear runs on CPUs only");
  }

  const char* name() const override { return "IngotPackedLinear"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& same = static_cast<const PackedLinear&>(other);
    return group_ == same.group_ && bits_ == same.bits_;
  }

 private:
  int group_, bits_;
};

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("ingot_native.linear: " + what);
}

}  // namespace

void use_blas(Sgemm sgemm) { blas = sgemm; }

mx::array linear(const mx::array& x, const mx::array& quanta, const mx::array& scales, const mx::array& biases, int group,
                 int bits, mx::StreamOrDevice s) {
  require(bits == 4 || bits == 8, "bits must be 4 or 8");
  require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
  require(x.ndim() >= 1, "x must have at least one axis");
  require(quanta.ndim() == 2 && scales.ndim() == 2 && biases.shape() == scales.shape(), "weights must be matrices");
  require(quanta.dtype() == mx::uint32, "quanta must be uint32");
  require(scales.dtype() == mx::float32 && biases.dtype() == mx::float32, "scales and biases must be float32");
  const int columns = x.shape(-1);
  require(columns % group == 0 && scales.shape(1) == columns / group, "x and the scales disagree about the width");
  require(quanta.shape(1) == columns * bits / 32, "x and the quanta disagree about the width");
  require(quanta.shape(0) == scales.shape(0), "quanta and scales disagree about the number of rows");

  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  mx::Shape shape = x.shape();
  shape.back() = quanta.shape(0);
  // An operation more costs as much as a small product, so weights, which are there already, are only looked at.
  auto plain = [&](const mx::array& a) {
    return a.is_available() && a.flags().row_contiguous ? a : mx::contiguous(a, false, stream);
  };
  return mx::array(std::move(shape), mx::float32, std::make_shared<PackedLinear>(stream, group, bits),
                   {mx::astype(x, mx::float32, stream), plain(quanta), plain(scales), plain(biases)});
}

}  // namespace ingot
