// Two numbers of 16 bits in one: the lower first.
template <typename T>
INLINE unsigned int two_of(float low, float high) {
  return bits_of(T(low)) | bits_of(T(high)) << 16;
}
// Of two times eight numbers, those in one column.
INLINE unsigned int pair_of(uint4 one, uint4 two, int column) {
  const unsigned int a = column / 2 == 0 ? one.x : column / 2 == 1 ? one.y : column / 2 == 2 ? one.z : one.w;
  const unsigned int b = column / 2 == 0 ? two.x : column / 2 == 1 ? two.y : column / 2 == 2 ? two.z : two.w;
  return column % 2 == 0 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
}
