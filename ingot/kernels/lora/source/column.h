// What an adapter adds to one number: RANK numbers by as many, read eight at once.
template <typename T, int RANK>
INLINE T column(const DEVICE T* x, const DEVICE T* row) {
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < RANK; n += 8) {
    Eight<T> left, right;
    load_eight(left, x + n);
    load_eight(right, row + n);
    float one[8], two[8];
    widen(left, one);
    widen(right, two);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      sum = multiply_add(one[m], two[m], sum);
    }
  }
  return T(sum);
}
