// Slabs that are found by their addresses: of each, where its keys begin and where its values do.
#ifdef __CUDACC__
#define IN_DEVICE_MEMORY(pointer) __builtin_assume(__isGlobal(pointer));
#else
#define IN_DEVICE_MEMORY(pointer)
#endif
#define SLAB_AT(slab, number)                           \
  slab = ((const T* const*)addresses)[number];          \
  IN_DEVICE_MEMORY(slab)
#define KEYS_OF(slab, number) SLAB_AT(slab, (number) * 2)
#define VALUES_OF(slab, number) SLAB_AT(slab, (number) * 2 + 1)
