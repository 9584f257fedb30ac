// Ragged attention over states in pages: any mix of prompts and steps in one operation, which also norms and turns queries
// and keys and writes keys and values to the states.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "floats.h"
#include "mlx/mlx.h"
#include "rotation.h"
#include "spans.h"
#include "weights.h"

namespace ingot {

struct Heads {
  int heads, kv_heads, size;
  float scale;                   // of the scores
  float cap = 0;                 // a score s becomes cap * tanh(s / cap); 0: it stays what it is
  const float* sinks = nullptr;  // one for each head: a score that takes its share of the weights and adds nothing
};

// How a layer's pages are laid out in fewer bits.
class CodedForm {
 public:
  // A side is (bits of a code, numbers that share a scale, where codes and scales begin, levels, signs).
  using Side = std::tuple<int, int, size_t, size_t, std::vector<float>, std::vector<float>>;

  // `centre` is where what keys have in common begins. Raises std::invalid_argument for what attention cannot read.
  CodedForm(int size, bool halves, std::optional<size_t> centre, size_t head_bytes, Side keys, Side values);
  CodedForm(const CodedForm&) = delete;

  const CodedLayout& layout() const { return layout_; }

 private:
  CodedSide side(Side& given);

  CodedLayout layout_;
  Side keys_, values_;
};

// A layer's pages in fewer bits, uint8 [pages, kv_heads, 1, bytes].
struct CodedStates {
  mlx::core::array pages;
  std::shared_ptr<const CodedForm> form;

  // Raises std::invalid_argument unless they go with such states and lead to all coded pages of the spans.
  void check(const mlx::core::array& keys, const Spans& spans) const;
};

// Keys and values in pages, [pages, kv_heads, tokens, size]: floats, or halves.
struct States {
  void *keys, *values;
  int kv_heads, page, size;  // `page` is the tokens of one
  bool halves;
  const uint8_t* coded = nullptr;  // the first pages of some sequences, in fewer bits
  const CodedLayout* layout = nullptr;

  States(mlx::core::array& keys, mlx::core::array& values);
  States(mlx::core::array& keys, mlx::core::array& values, const mlx::core::array& coded, const CodedForm& form);

  Coded coded_pages(const Table& table, int kv_head) const;

  // One head's of the token at a place.
  void put(const Table& table, int place, int kv_head, const float* key, const float* value) const;

  // One head's of a sequence.
  template <class Number>
  Paged<Number> paged(const Table& table, int kv_head) const;
};

// Whether states in such arrays are halves. Raises std::invalid_argument for arrays that cannot be states.
bool holds_halves(const mlx::core::array& keys, const mlx::core::array& values);

// Attention alone: q and out are [tokens, heads, size]. Each token sees the `window` newest ones of its sequence, itself among
// them, or all before it where that is 0. The states hold the spans' own keys and values already, or prepare(token, kv_head)
// puts them there, and does what is left to do to the queries of the heads that share them. Where the spans have a choice, they
// see the pages that are chosen.
using Prepare = std::function<void(int token, int kv_head)>;
void attend(const Heads& how, const Spans& spans, int window, const float* q, const States& states, float* out,
            const Prepare& prepare = nullptr);

// A norm of queries or keys.
struct HeadNorm {
  Vector weight;   // as long as a head, or as all of them
  int length;      // of the weight
  float eps;
  bool whole;      // all heads of a token are normed as one
  bool centred;    // the mean is taken off
};

class Attention {
 public:
  Attention(Heads how, const std::optional<mlx::core::array>& sinks, std::optional<HeadNorm> q_norm,
            std::optional<HeadNorm> k_norm, std::shared_ptr<const Rotation> rotation, bool gated);

  // q [tokens, heads, size], or with a gate for the output behind each head: [tokens, heads, 2 * size]; k and v
  // [tokens, kv_heads, size].
  void run(const float* q, const float* k, const float* v, int tokens, const Spans& spans, int window, const States& states,
           float* out) const;

  const Heads& heads() const { return how_; }
  int query_width() const { return how_.heads * how_.size * (gated_ ? 2 : 1); }

 private:
  Heads how_;
  std::optional<Vector> sinks_;
  std::optional<HeadNorm> q_norm_, k_norm_;
  std::shared_ptr<const Rotation> rotation_;
  bool gated_;
};

// The operation. Gives what was attended to [..., heads * size] and the states, which are the ones given, in the same
// memory: who else holds them sees them change. Tokens of no span get zeros.
// Raises std::invalid_argument for shapes that do not fit.
std::vector<mlx::core::array> run_attention(
    std::shared_ptr<const Attention> attention, const mlx::core::array& q, const mlx::core::array& k,
    const mlx::core::array& v, const mlx::core::array& keys, const mlx::core::array& values, std::shared_ptr<const Spans> spans,
    int window, const std::optional<CodedStates>& coded = std::nullopt, mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
