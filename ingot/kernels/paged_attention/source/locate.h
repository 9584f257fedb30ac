// One thread: where a slab lies.
//
// keys, values: a slab of each -> addresses [4]: two pointers
if (thread_index_in_simdgroup == 0) {
  ((const T**)addresses)[0] = keys;
  ((const T**)addresses)[1] = values;
}
