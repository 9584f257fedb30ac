// A thread a number: what a layer is given besides hidden states, gated, rounded where plain operations would round.
//
// gate [tokens, SIZE], inputs [tokens, ROW], of which a token's numbers from BEGIN on are this layer's -> gated [tokens, SIZE]
const int token = int(threadgroup_position_in_grid.y);
const int i = int(threadgroup_position_in_grid.x) * THREADS +
              int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
if (i < SIZE) {
  const float x = float(gate[(size_t)token * SIZE + i]);
  const T curve = T(0.5f * x * (1.0f + tangent(0.79788456f * (x + 0.044715f * x * x * x))));
  gated[(size_t)token * SIZE + i] = T(float(curve) * float(inputs[(size_t)token * ROW + BEGIN + i]));
}
