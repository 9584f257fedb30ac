// States that are found by their addresses: where a layer's tails begin, and where its states do.
#define BY_ADDRESS
#ifdef __CUDACC__
#define IN_DEVICE_MEMORY(pointer) __builtin_assume(__isGlobal(pointer));
#else
#define IN_DEVICE_MEMORY(pointer)
#endif
