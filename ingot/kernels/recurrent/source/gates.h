// What gates are made of.
INLINE float sigmoid(float x) { return 1.0f / (1.0f + power_of_two(-1.44269504f * x)); }
INLINE float softplus(float x) {
  const float size = x < 0.0f ? -x : x;
  return (x < 0.0f ? 0.0f : x) + 0.69314718f * logarithm_of_two(1.0f + power_of_two(-1.44269504f * size));
}
INLINE void store_four(DEVICE float4* to, const LOCAL float* from) {
  float4 four;
  four.x = from[0]; four.y = from[1]; four.z = from[2]; four.w = from[3];
  *to = four;
}
INLINE void store_shared(const LOCAL float* from, SHARED float* to) {
  float4 four;
  four.x = from[0]; four.y = from[1]; four.z = from[2]; four.w = from[3];
  ((SHARED float4*)to)[0] = four;
  four.x = from[4]; four.y = from[5]; four.z = from[6]; four.w = from[7];
  ((SHARED float4*)to)[1] = four;
}
