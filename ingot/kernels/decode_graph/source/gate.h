// A thread a number: what an MLP gates, by its gate, rounded where plain operations would round.
//
// both [tokens, 2 * SIZE]: gates, and what they gate -> gated [tokens, SIZE]
// GATE 0: SiLU; 1: GELU by a hyperbolic tangent; 2: GELU; 3: ReLU squared of [tokens, SIZE], which gates nothing
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  const DEVICE T* from = both + (size_t)token * (GATE == 3 ? 1 : 2) * SIZE;
  const float gate = float(from[i]);
  T curve;
  if (GATE == 0) {
    const float share = float(T(1.0f / (1.0f + power_of_two(-1.44269504f * gate))));
    curve = T(gate * share);
  } else if (GATE == 1) {
    curve = T(0.5f * gate * (1.0f + tangent(0.79788456f * (gate + 0.044715f * gate * gate * gate))));
  } else if (GATE == 2) {
    curve = T(0.5f * gate * (1.0f + error_function(0.70710678f * gate)));
  } else {
    curve = T(larger(gate, 0.0f));
  }
  gated[(size_t)token * SIZE + i] = T(float(curve) * (GATE == 3 ? float(curve) : float(from[SIZE + i])));
}
