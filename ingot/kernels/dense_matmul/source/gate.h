// silu(gate) * up, each operation rounded as MLX rounds it there.
#ifdef __CUDACC__
template <typename T>
INLINE T exponential(T x) { return hexp(x); }
#else
template <typename T>
INLINE T exponential(T x) { return T(expf(float(x))); }
#endif

template <typename T>
INLINE T gated(T gate, T up) {
  const float x = float(gate);
  const float tail = float(T(1.0f / float(T(1.0f + float(exponential(T(x < 0 ? -x : x)))))));
  const T share = x < 0 ? T(tail) : T(1.0f - tail);
  return T(float(T(x * float(share))) * float(up));
}
