// What experts multiply by each other: a curve of the gate, and what it lets through.
// CURVE 0: SiLU, each operation rounded; 1: GELU by a hyperbolic tangent; 2: GPT-OSS's, clipped at `limit`: steeper than SiLU
// by `slope`, and one more is let through.
template <int CURVE, typename T>
INLINE T curved(T gate, T up, float slope, float limit) {
  if (CURVE == 0) {
    return gated(gate, up);
  }
  const float x = float(gate), y = float(up);
  if (CURVE == 1) {
    return T(float(T(0.5f * x * (1.0f + tangent(0.79788456f * (x + 0.044715f * x * x * x))))) * y);
  }
  const float most = x < limit ? x : limit, other = y < -limit ? -limit : y < limit ? y : limit;
  return T((other + 1.0f) * (most / (1.0f + power_of_two(-1.44269504f * slope * most))));
}
