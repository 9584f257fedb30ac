// Compiled several times with different flags; INGOT_ISA names the result. Plain loops over a fixed number of lanes,
// which the compiler turns into vectors without being allowed to reorder sums.
#include "floats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#define INGOT_NAME(name) INGOT_NAME_(name, INGOT_ISA)
#define INGOT_NAME_(name, isa) INGOT_NAME__(name, isa)
#define INGOT_NAME__(name, isa) name##_##isa

namespace ingot {
namespace {

constexpr int kLanes = 8;

float total(const float* lanes) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += lanes[i];
  return sum;
}

// Relative error below 2e-7 for x <= 0, which is what softmax and sigmoid ask for; 0 far below.
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  const float n = std::floor(x * 1.44269504f + 0.5f);
  float r = x - n * 0.693359375f;
  r -= n * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
  return y * std::bit_cast<float>(exponent);
}

void rms_norm(const float* x, const float* weight, float eps, int size, float* y) {
  float lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int l = 0; l < kLanes; l++) lanes[l] += x[i + l] * x[i + l];
  for (int l = 0; i < size; i++, l++) lanes[l] += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(total(lanes) / static_cast<float>(size) + eps);
  for (i = 0; i < size; i++) y[i] = x[i] * inverse * weight[i];
}

void add(float* y, const float* x, size_t size) {
  for (size_t i = 0; i < size; i++) y[i] += x[i];
}

void swiglu(float* gate, const float* up, size_t size) {
  for (size_t i = 0; i < size; i++) {
    // Of two equal forms, the one whose exponential cannot overflow.
    const float g = gate[i], e = exponential(-std::fabs(g));
    const float sigmoid = (g >= 0 ? 1.0f : e) / (1.0f + e);
    gate[i] = g * sigmoid * up[i];
  }
}

void rotate(float* head, const float* cosines, const float* sines, int dims, bool neighbours) {
  const int half = dims / 2;
  if (neighbours) {
    for (int i = 0; i < half; i++) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cosines[i] - b * sines[i];
      head[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
    return;
  }
  for (int i = 0; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = a * sines[i] + b * cosines[i];
  }
}

// Q queries times K keys: the loaded values are used Q or K times each.
template <int Q, int K>
inline void products(const float* q, size_t q_stride, const float* k, size_t k_stride, int dim, float* out, size_t stride) {
  float lanes[Q][K][kLanes] = {};
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes)
#pragma GCC unroll 4
    for (int a = 0; a < Q; a++)
#pragma GCC unroll 4
      for (int b = 0; b < K; b++)
        for (int l = 0; l < kLanes; l++) lanes[a][b][l] += q[a * q_stride + d + l] * k[b * k_stride + d + l];
  for (int l = 0; d < dim; d++, l++)
    for (int a = 0; a < Q; a++)
      for (int b = 0; b < K; b++) lanes[a][b][l] += q[a * q_stride + d] * k[b * k_stride + d];
  for (int a = 0; a < Q; a++)
    for (int b = 0; b < K; b++) out[a * stride + b] = total(lanes[a][b]);
}

template <int Q>
void scored(const float* q, size_t stride, const float* k, int keys, int dim, float* scores, size_t row) {
  int j = 0;
  for (; j + 2 <= keys; j += 2) products<Q, 2>(q, stride, k + static_cast<size_t>(j) * dim, dim, dim, scores + j, row);
  for (; j < keys; j++) products<Q, 1>(q, stride, k + static_cast<size_t>(j) * dim, dim, dim, scores + j, row);
}

// The scores become weights that add up to one.
void softmax(float* scores, int count, float scale) {
  float largest = scores[0];
  for (int j = 1; j < count; j++) largest = std::max(largest, scores[j]);
  for (int j = 0; j < count; j++) scores[j] = exponential((scores[j] - largest) * scale);
  float lanes[kLanes] = {};
  int j = 0;
  for (; j + kLanes <= count; j += kLanes)
    for (int l = 0; l < kLanes; l++) lanes[l] += scores[j + l];
  for (int l = 0; j < count; j++, l++) lanes[l] += scores[j];
  const float inverse = 1.0f / total(lanes);
  for (j = 0; j < count; j++) scores[j] *= inverse;
}

void weighted(const float* weights, const float* v, int count, int dim, float* out) {
  std::fill(out, out + dim, 0.0f);
  int j = 0;
  for (; j + 4 <= count; j += 4) {
    const float *a = v + static_cast<size_t>(j) * dim, *b = a + dim, *c = b + dim, *d = c + dim;
    const float wa = weights[j], wb = weights[j + 1], wc = weights[j + 2], wd = weights[j + 3];
    for (int i = 0; i < dim; i++) out[i] += (wa * a[i] + wb * b[i]) + (wc * c[i] + wd * d[i]);
  }
  for (; j < count; j++)
    for (int i = 0; i < dim; i++) out[i] += weights[j] * v[static_cast<size_t>(j) * dim + i];
}

template <int Q>
void attend_some(const float* q, size_t stride, const float* k, const float* v, int keys, int dim, float scale,
                 float* scratch, float* out) {
  scored<Q>(q, stride, k, keys, dim, scratch, keys);
  for (int a = 0; a < Q; a++) {
    const int seen = keys - (Q - 1 - a);
    softmax(scratch + static_cast<size_t>(a) * keys, seen, scale);
    weighted(scratch + static_cast<size_t>(a) * keys, v, seen, dim, out + a * stride);
  }
}

void attend(const float* q, int queries, size_t stride, const float* k, const float* v, int keys, int dim, float scale,
            float* scratch, float* out) {
  int done = 0;
  for (; done + 4 <= queries; done += 4)
    attend_some<4>(q + done * stride, stride, k, v, keys - (queries - done - 4), dim, scale, scratch,
                   out + done * stride);
  for (; done < queries; done++)
    attend_some<1>(q + done * stride, stride, k, v, keys - (queries - done - 1), dim, scale, scratch,
                   out + done * stride);
}

template <int M>
void some_rows(const float* w, const float* x, int columns, int first, int last, float* y, size_t stride) {
  int n = first;
  for (; n + 2 <= last; n += 2)
    products<M, 2>(x, columns, w + static_cast<size_t>(n) * columns, columns, columns, y + n, stride);
  for (; n < last; n++) products<M, 1>(x, columns, w + static_cast<size_t>(n) * columns, columns, columns, y + n, stride);
}

void multiply(const float* w, const float* x, int columns, int count, int first, int last, float* y, size_t stride) {
  int m = 0;
  for (; m + 4 <= count; m += 4)
    some_rows<4>(w, x + static_cast<size_t>(m) * columns, columns, first, last, y + m * stride, stride);
  for (; m < count; m++)
    some_rows<1>(w, x + static_cast<size_t>(m) * columns, columns, first, last, y + m * stride, stride);
}

}  // namespace

extern const Floats INGOT_NAME(floats);
const Floats INGOT_NAME(floats) = {rms_norm, add, swiglu, rotate, attend, multiply};

}  // namespace ingot
