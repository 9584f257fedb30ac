// The arithmetic of recurrent layers, in float32; compiled once for each instruction set.
//
// A state's rows do not know of each other: a few of them at a time stay in the first-level cache while a chunk of
// tokens passes over them, so that the chunk's keys and queries are all that is read again and again. A chunked matrix
// form of these rules would multiply about as often and gains nothing where there is no faster product than this one.
#pragma once

#include <cstddef>

namespace ingot {

constexpr int kChunk = 32;     // tokens that are computed together
constexpr int kStateRows = 4;  // rows of a state that are computed together

// Some neighbouring channels of tokens in a row, and of the ones before them.
struct Stretch {
  const float* x;     // the first token's
  size_t stride;      // from a token to the next
  int before;         // tokens of the same piece that lie in front of x
  const float* tail;  // channels of the `taps - 1` tokens before the piece, oldest first; null where they are zeros
  size_t tail_stride;
  int count, size;  // tokens and channels
};

struct Filter {
  const float* weight;  // of these channels: the oldest tap's
  size_t stride;        // from a tap to the next
  const float* bias;    // may be null
  int taps;
  bool silu;
};

// One head of the gated delta rule: state = decay * state + beta * (v - decay * state k) k', y = state q. Keys and queries are
// filled up with zeros to a whole number of vectors. Each number of a key may have a decay of its own.
struct DeltaHead {
  float* state;  // [values, keys]
  int values, keys;
  const float *q, *k;  // [count, padded keys]
  const float* v;      // [count, values]
  const float *decay, *beta;  // [count]; decays of numbers [count, padded keys]
  const float* decayed_k;     // [count, padded keys]: keys times their decays; null where a token has one decay
  int count;
  float* y;        // [count, values]
  float* scratch;  // kStateRows * padded keys
};

// One head of Mamba 2's rule: state = decay * state + dt * x b', y = state c + skip * x.
struct ScanHead {
  float* state;  // [values, keys]
  int values, keys;
  const float *b, *c;  // [count, padded keys]
  const float* x;      // [count, values]
  const float *decay, *dt;
  float skip;
  int count;
  float* y;  // [count] rows, y_stride apart
  size_t y_stride;
  float* scratch;  // kStateRows * padded keys
};

// What decays are made of: exp(rate * softplus(x + bias)), or exp(bound * sigmoid(rate * (x + bias))).
struct DecayRule {
  float rate;
  bool bounded;
  float bound;
};

struct Recurrence {
  int lanes;  // floats of a vector
  // y[t] = sum over taps of weight * x[t - taps + 1 + tap], plus bias, times its sigmoid if asked for.
  void (*convolve)(const Stretch& x, const Filter& filter, float* y, size_t y_stride);
  void (*delta)(const DeltaHead& head);
  void (*scan)(const ScanHead& head);
  // x = x * gain / sqrt(sum(x * x) + eps).
  void (*normalise)(float* x, int size, float eps, float gain);
  // Of neighbouring numbers, each with a bias of its own.
  void (*decays)(const DecayRule& rule, const float* x, const float* bias, int size, float* y);

  int padded(int size) const { return (size + lanes - 1) / lanes * lanes; }
};

const Recurrence& recurrence();  // of the same instruction set as kernels()

}  // namespace ingot
