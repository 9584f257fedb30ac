#include "segments.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "floats.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "product.h"
#include "room.h"
#include "strided.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr int kMostQueries = 64, kFewestQueries = 16;
constexpr int kScores = 1 << 17;  // of one task: as many as a processor keeps near, where keys are not too many for that

// Rows [segments, rows, heads, size], of which heads lie one behind another.
struct Side {
  const float* data;
  size_t segment, row;  // how far it is to the next
  std::vector<float> owned;  // where they lay otherwise

  Side(const float* from, const mx::Shape& shape, const mx::Strides& strides)
      : data(from), segment(strides[0]), row(strides[1]) {
    if (strides[3] == 1 && strides[2] == shape[3]) return;
    owned = gathered(from, shape, strides);
    data = owned.data();
    row = static_cast<size_t>(shape[2]) * shape[3];
    segment = row * shape[1];
  }
};

// An input, before it is computed.
struct Given {
  const float* data;
  mx::Shape shape;
  mx::Strides strides;

  explicit Given(const mx::array& x) : data(x.data<float>()), shape(x.shape()), strides(x.strides()) {}
  Side side() const { return Side(data, shape, strides); }
};

struct Segments {
  int count, rows, keys, heads, size;
  float scale;

  int at_once() const { return std::min(rows, std::clamp(kScores / std::max(1, keys), kFewestQueries, kMostQueries)); }
  int lots() const { return (rows + at_once() - 1) / at_once(); }
};

// What some queries of one head find.
void find(const Segments& all, const Side& queries, const Side& keys, const Side& values, int task, Sgemm sgemm, float* to) {
  constexpr int kRowMajor = 101, kAsIs = 111, kTransposed = 112;
  const int lot = task % all.lots(), head = task / all.lots() % all.heads, segment = task / all.lots() / all.heads;
  const int first = lot * all.at_once(), count = std::min(all.at_once(), all.rows - first);
  const size_t place = static_cast<size_t>(head) * all.size, out = static_cast<size_t>(all.heads) * all.size;
  static thread_local Room<float> room;
  float* scores = room.at_least(static_cast<size_t>(count) * all.keys);
  sgemm(kRowMajor, kAsIs, kTransposed, count, all.keys, all.size, all.scale,
        queries.data + segment * queries.segment + first * queries.row + place, static_cast<int>(queries.row),
        keys.data + segment * keys.segment + place, static_cast<int>(keys.row), 0.0f, scores, all.keys);
  for (int row = 0; row < count; row++) floats().softmax(scores + static_cast<size_t>(row) * all.keys, all.keys);
  float* found = to + (static_cast<size_t>(segment) * all.rows + first) * out + place;
  sgemm(kRowMajor, kAsIs, kAsIs, count, all.size, all.keys, 1.0f, scores, all.keys,
        values.data + segment * values.segment + place, static_cast<int>(values.row), 0.0f, found, static_cast<int>(out));
}

class AttendSegments : public mx::Primitive {
 public:
  AttendSegments(mx::Stream stream, Sgemm sgemm, float scale) : Primitive(stream), sgemm_(sgemm), scale_(scale) {}
  const char* name() const override { return "IngotAttendSegments"; }
  bool is_equivalent(const Primitive& other) const override {
    return scale_ == static_cast<const AttendSegments&>(other).scale_;
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(y);
    const mx::array &q = inputs[0], &k = inputs[1];
    const Segments all{q.shape(0), q.shape(1), k.shape(1), q.shape(2), q.shape(3), scale_};
    encoder.dispatch([all, sgemm = sgemm_, given = std::vector<Given>(inputs.begin(), inputs.end()),
                      to = y.data<float>()] {
      const Side queries = given[0].side(), keys = given[1].side(), values = given[2].side();
      Pool::shared().each(all.count * all.heads * all.lots(),
                          [&](int task) { find(all, queries, keys, values, task, sgemm, to); });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

 private:
  Sgemm sgemm_;
  float scale_;
};

}  // namespace

mx::array attend_segments(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
                          mx::StreamOrDevice s) {
  require(named_blas() != nullptr, "attention within segments needs a BLAS");
  require(queries.ndim() == 4 && keys.ndim() == 4 && keys.shape() == values.shape(),
          "attention within segments takes [segments, rows, heads, size]");
  for (int axis : {0, 2, 3}) require(queries.shape(axis) == keys.shape(axis), "queries and keys must be alike");
  require(queries.size() > 0 && keys.size() > 0, "there is nothing to attend to");
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  auto single = [&](const mx::array& x) { return mx::astype(x, mx::float32, stream); };
  return mx::array(queries.shape(), mx::float32, std::make_shared<AttendSegments>(stream, named_blas(), scale),
                   {single(queries), single(keys), single(values)});
}

}  // namespace ingot
