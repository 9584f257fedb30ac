#include "pages.h"

#include <cstring>
#include <memory>
#include <stdexcept>

#include "in_place.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

// The memory of an array of pages.
struct Bytes {
  explicit Bytes(mx::array& array)
      : data(array.data<char>()), heads(array.shape(1)), page(array.shape(2)), token(array.shape(3) * array.itemsize()) {}

  char* at(int of, int head, int place) const { return data + ((static_cast<size_t>(of) * heads + head) * page + place) * token; }

  char* data;
  int heads, page;
  size_t token;
};

class CopyPrimitive : public mx::Primitive {
 public:
  CopyPrimitive(mx::Stream stream, std::vector<PageCopy> copies) : Primitive(stream), copies_(std::move(copies)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    let_go(inputs, outputs);
    take_whole(encoder, inputs);
    std::vector<Bytes> arrays;
    for (size_t i = 0; i < outputs.size(); i++) {
      outputs[i].copy_shared_buffer(inputs[i]);
      encoder.set_output_array(outputs[i]);
      arrays.emplace_back(outputs[i]);
    }
    encoder.dispatch([arrays = std::move(arrays), copies = copies_] {
      Pool::shared().each(static_cast<int>(arrays.size()), [&](int index) {
        const Bytes& bytes = arrays[index];
        for (const auto& [source, target, tokens] : copies)
          for (int head = 0; head < bytes.heads; head++)
            std::memmove(bytes.at(target, head, 0), bytes.at(source, head, 0), tokens * bytes.token);
      });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native.copy_tokens runs on CPUs only");
  }

  const char* name() const override { return "IngotCopyTokens"; }

 private:
  std::vector<PageCopy> copies_;
};

class WritePrimitive : public mx::Primitive {
 public:
  WritePrimitive(mx::Stream stream, int page, int begin) : Primitive(stream), page_(page), begin_(begin) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    let_go(inputs, outputs);
    take_whole(encoder, inputs);
    outputs[0].copy_shared_buffer(inputs[0]);
    encoder.set_output_array(outputs[0]);
    encoder.dispatch([bytes = Bytes(outputs[0]), from = inputs[1].data<char>(), count = inputs[1].shape(1), page = page_, begin = begin_] {
      const size_t run = count * bytes.token;
      for (int head = 0; head < bytes.heads; head++) std::memcpy(bytes.at(page, head, begin), from + head * run, run);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native.write_tokens runs on CPUs only");
  }

  const char* name() const override { return "IngotWriteTokens"; }

 private:
  int page_, begin_;
};

}  // namespace

std::vector<mx::array> copy_tokens(const std::vector<mx::array>& arrays, std::vector<PageCopy> copies, mx::StreamOrDevice s) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& array : arrays) {
    require(array.ndim() == 4, "pages are [pages, kv_heads, tokens, size]");
    for (const auto& [source, target, tokens] : copies) {
      require(source >= 0 && source < array.shape(0) && target >= 0 && target < array.shape(0), "there is no such page");
      require(tokens >= 0 && tokens <= array.shape(2), "a page has fewer tokens");
    }
    shapes.push_back(array.shape());
    dtypes.push_back(array.dtype());
  }
  if (arrays.empty() || copies.empty()) return arrays;
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  return mx::array::make_arrays(std::move(shapes), std::move(dtypes), std::make_shared<CopyPrimitive>(stream, std::move(copies)),
                                arrays);
}

mx::array write_tokens(const mx::array& array, int page, int begin, const mx::array& tokens, mx::StreamOrDevice s) {
  require(array.ndim() == 4 && tokens.ndim() == 3 && tokens.shape(0) == array.shape(1) && tokens.shape(2) == array.shape(3),
          "tokens are [kv_heads, count, size], as the pages have them");
  require(page >= 0 && page < array.shape(0), "there is no such page");
  require(begin >= 0 && tokens.shape(1) <= array.shape(2) - begin, "the tokens do not fit in a page");
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  const mx::array given = mx::contiguous(mx::astype(tokens, array.dtype(), stream), false, stream);
  return mx::array(array.shape(), array.dtype(), std::make_shared<WritePrimitive>(stream, page, begin), {array, given});
}

}  // namespace ingot
