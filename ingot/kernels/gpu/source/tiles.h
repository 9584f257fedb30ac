// The sum of two numbers of 16 bits in one.
template <typename T>
INLINE float sum_of_two(unsigned int two);
template <>
INLINE float sum_of_two<Brain>(unsigned int two) {
  return from_bits(two << 16) + from_bits(two & 0xffff0000u);
}
template <>
INLINE float sum_of_two<Half>(unsigned int two) {
  return from_half(two & 0xffffu) + from_half(two >> 16);
}
