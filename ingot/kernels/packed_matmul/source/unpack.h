// Unpacks weights into `scratch`, in place, eight of them a thread, and hands `given` on: who reads what is handed on has the
// weights in scratch, and `after` says that who had scratch before has done with it.
//
// weight [outputs, columns * BITS / 32], scales, biases [outputs, columns / GROUP] (of FLOATS no biases), scratch [outputs * columns ...],
// given [rows, columns], after [1] -> handed [rows, columns]
const size_t weights = (size_t)scales_shape[0] * scales_shape[1] * (GROUP / 8);
const size_t all = weights + (size_t)given_shape[0] * scales_shape[1] * (GROUP / 8);
const size_t number = (size_t)threadgroup_position_in_grid.x * THREADS + simdgroup_index_in_threadgroup * 32 +
                      thread_index_in_simdgroup;
if (number < weights) {
  Lot<BITS> lot;
  load_lot(lot, (const DEVICE unsigned char*)weight + number * BITS);
  const float scale = scale_of<GROUP>(scales[number / (GROUP / 8)]);
  const float bias = FLOATS ? 0.0f : scale_of<GROUP>(biases[number / (GROUP / 8)]);
  float numbers[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned int own = number_at<BITS>(lot, i * BITS);
    const float weight = FLOATS ? float_of<BITS == 8 ? 8 : 4>(own) : from_bits(own | 0x4b000000u) - 8388608.0f;
    numbers[i] = multiply_add(weight, scale, bias);
  }
  store_several((DEVICE T*)scratch + number * 8, numbers);
} else if (number < all) {
  Eight<T> eight;
  load_eight(eight, given + (number - weights) * 8);
  store_eight(handed + (number - weights) * 8, eight);
}
