// How kernels find a layer's states: as an input, or (BY_ADDRESS) where numbers say that its tails and its states begin. They are
// written in place, or (RETURNED) to an output, one row's behind another's.
#ifdef __CUDACC__
#define IN_DEVICE_MEMORY(pointer) __builtin_assume(__isGlobal(pointer));
#else
#define IN_DEVICE_MEMORY(pointer)
#endif
#ifdef BY_ADDRESS
#define FIND_STATES(name, number)                                        \
  DEVICE float* name = ((DEVICE float* const*)addresses)[number]; \
  IN_DEVICE_MEMORY(name)
#else
#define FIND_STATES(name, number)
#endif
#ifdef RETURNED
#define STATES_AFTER(name, row, slot, size) (states_after + (size_t)(row) * (size))
#else
#define STATES_AFTER(name, row, slot, size) ((DEVICE float*)name + (size_t)(slot) * (size))
#endif
