// One warp: what tells where slabs lie goes where graphs read it.
//
// addresses: data; after: whatever must be there before; place: no smaller, written in place -> laid [1]
for (int i = int(thread_index_in_simdgroup); i < addresses_shape[0]; i += 32) {
  ((DEVICE int*)place)[i] = addresses[i];
}
if (thread_index_in_simdgroup == 0) {
  laid[0] = after[0];
}
