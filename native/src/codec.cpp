#include "codec.h"

#include <algorithm>
#include <stdexcept>

#include "codes.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr size_t kShare = 64;  // vectors that are worth a thread's attention

Number kind_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return Number::single;
  if (dtype == mx::float16) return Number::half;
  if (dtype == mx::bfloat16) return Number::brain;
  throw std::invalid_argument("ingot_native: vectors are float32, float16 or bfloat16");
}

bool is_power_of_two(int number) { return number > 0 && (number & (number - 1)) == 0; }

using Centres = std::array<const float*, 2>;

// Calls body(first, count, centres) for shares of vectors that have centres in common.
template <class Body>
void shared_out(size_t vectors, size_t tokens, int size, const Centres& centres, const Body& body) {
  if (tokens == 0) return;
  const size_t runs = vectors / tokens, shares = (tokens + kShare - 1) / kShare;
  auto share = [&](int index) {
    const size_t run = index / shares, at = index % shares * kShare;
    Centres own;
    for (size_t i = 0; i < own.size(); i++) own[i] = centres[i] == nullptr ? nullptr : centres[i] + run * size;
    body(run * tokens + at, std::min(kShare, tokens - at), own);
  };
  Pool::shared().each(static_cast<int>(runs * shares), share);
}

class CodecPrimitive : public mx::Primitive {
 public:
  CodecPrimitive(mx::Stream stream, std::shared_ptr<Codec> codec, bool encodes)
      : Primitive(stream), codec_(std::move(codec)), encodes_(encodes) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& input : inputs) {
      if (!input.flags().row_contiguous) throw std::runtime_error("ingot_native: an input is not contiguous");
      encoder.set_input_array(input);
    }
    for (mx::array& output : outputs) {
      output.set_data(mx::allocator::malloc(output.nbytes()));
      encoder.set_output_array(output);
    }
    const size_t given = encodes_ ? 1 : 2;
    Centres centres = {};
    for (size_t i = given; i < inputs.size(); i++) centres[i - given] = inputs[i].data<float>();
    const mx::array& shape = inputs[0];
    const size_t tokens = shape.shape(-2), vectors = shape.size() / shape.shape(-1);
    std::vector<mx::array> from, to;
    for (const mx::array& input : inputs) from.push_back(mx::array::unsafe_weak_copy(input));
    for (const mx::array& output : outputs) to.push_back(mx::array::unsafe_weak_copy(output));
    encoder.dispatch([codec = codec_, encodes = encodes_, from = std::move(from), to = std::move(to), centres, tokens,
                      vectors]() mutable {
      shared_out(vectors, tokens, codec->size(), centres, [&](size_t first, size_t count, const Centres& own) {
        const size_t codes = first * codec->code_bytes(), scales = first * codec->scales();
        if (encodes)
          codec->encode(from[0], first, count, own, to[0].data<uint8_t>() + codes,
                        reinterpret_cast<uint16_t*>(to[1].data<char>()) + scales);
        else
          codec->decode(from[0].data<uint8_t>() + codes, reinterpret_cast<const uint16_t*>(from[1].data<char>()) + scales,
                        to[0], first, count, own);
      });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native's codecs run on CPUs only");
  }

  const char* name() const override { return "IngotCodec"; }

 private:
  std::shared_ptr<Codec> codec_;
  bool encodes_;
};

mx::Shape with_last(mx::Shape shape, int last) {
  shape.back() = last;
  return shape;
}

void add_centres(std::vector<mx::array>& inputs, const std::optional<mx::array>& centre, const std::optional<mx::array>& other,
                 const mx::Shape& shape, int size, mx::Stream stream) {
  require(centre || !other, "only where there is a centre can there be another");
  mx::Shape expected = with_last(shape, size);
  expected[expected.size() - 2] = 1;
  for (const auto& each : {centre, other}) {
    if (!each) continue;
    require(each->shape() == expected, "a centre is [..., 1, size]");
    inputs.push_back(mx::contiguous(mx::astype(*each, mx::float32, stream), false, stream));
  }
}

}  // namespace

std::shared_ptr<Codec> Codec::turbo(std::vector<float> signs, std::vector<float> borders, std::vector<float> levels,
                                    bool keeps_length) {
  const int size = static_cast<int>(signs.size());
  int bits = 1;
  while (bits < 4 && (1 << bits) != static_cast<int>(levels.size())) bits++;
  require(is_power_of_two(size) && size >= 16 && size <= kLargestVector, "a vector that is rotated has 16 to 512 numbers");
  require(levels.size() == (1u << bits) && borders.size() + 1 == (1u << (bits - 1)), "a codec has 1 to 4 bits");
  std::shared_ptr<Codec> made(new Codec(size, bits, 0));
  made->signs_ = std::move(signs), made->borders_ = std::move(borders), made->levels_ = std::move(levels);
  made->keeps_length_ = keeps_length;
  return made;
}

std::shared_ptr<Codec> Codec::affine(int size, int group, int bits) {
  require(size > 0 && size <= kLargestVector && group > 0 && size % group == 0, "groups make up a vector of at most 512 numbers");
  require((bits == 4 && size % 2 == 0) || bits == 8, "steps have 4 or 8 bits");
  return std::shared_ptr<Codec>(new Codec(size, bits, group));
}

void Codec::encode(const mx::array& from, size_t first, size_t count, Centres centres, uint8_t* to, uint16_t* scales) const {
  const char* at = from.data<char>() + first * size_ * from.itemsize();
  const Vectors vectors{const_cast<char*>(at), kind_of(from.dtype()), centres[0], centres[1], count};
  if (group_ == 0)
    codes().turbo_encode({size_, bits_, signs_.data(), borders_.data(), levels_.data(), keeps_length_}, vectors, to, scales);
  else
    codes().affine_encode({size_, group_, bits_}, vectors, to, scales);
}

void Codec::decode(const uint8_t* from, const uint16_t* scales, mx::array& to, size_t first, size_t count,
                   Centres centres) const {
  const Vectors vectors{to.data<char>() + first * size_ * to.itemsize(), kind_of(to.dtype()), centres[0], centres[1], count};
  if (group_ == 0)
    codes().turbo_decode({size_, bits_, signs_.data(), borders_.data(), levels_.data(), keeps_length_}, from, scales, vectors);
  else
    codes().affine_decode({size_, group_, bits_}, from, scales, vectors);
}

std::vector<mx::array> encode(std::shared_ptr<Codec> codec, const mx::array& x, const std::optional<mx::array>& centre,
                              const std::optional<mx::array>& other, mx::StreamOrDevice s) {
  require(x.ndim() >= 2 && x.shape(-1) == codec->size(), "vectors are [..., tokens, size], of the codec's size");
  kind_of(x.dtype());
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  std::vector<mx::array> inputs{mx::contiguous(x, false, stream)};
  add_centres(inputs, centre, other, x.shape(), codec->size(), stream);
  std::vector<mx::Shape> shapes{with_last(x.shape(), codec->code_bytes()), with_last(x.shape(), codec->scales())};
  return mx::array::make_arrays(std::move(shapes), {mx::uint8, mx::bfloat16},
                                std::make_shared<CodecPrimitive>(stream, std::move(codec), true), inputs);
}

mx::array decode(std::shared_ptr<Codec> codec, const mx::array& codes, const mx::array& scales, mx::Dtype dtype,
                 const std::optional<mx::array>& centre, const std::optional<mx::array>& other,
                 mx::StreamOrDevice s) {
  require(codes.ndim() >= 2 && codes.shape(-1) == codec->code_bytes() && codes.dtype() == mx::uint8, "codes are [..., tokens, bytes]");
  require(scales.shape() == with_last(codes.shape(), codec->scales()) && scales.dtype() == mx::bfloat16,
          "scales are as many as the codec has");
  kind_of(dtype);
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  std::vector<mx::array> inputs{mx::contiguous(codes, false, stream), mx::contiguous(scales, false, stream)};
  add_centres(inputs, centre, other, codes.shape(), codec->size(), stream);
  mx::Shape shape = with_last(codes.shape(), codec->size());
  return mx::array(std::move(shape), dtype, std::make_shared<CodecPrimitive>(stream, std::move(codec), false), std::move(inputs));
}

}  // namespace ingot
