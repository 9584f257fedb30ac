// Slabs that are inputs; EACH_SLAB names all of them but the first.
#define CHOOSE_KEYS(n) chosen_slab = slab_number == n ? keys_##n : chosen_slab;
#define CHOOSE_VALUES(n) chosen_slab = slab_number == n ? values_##n : chosen_slab;
#define CHOOSE_SLAB(slab, number, choose, first) \
  {                                              \
    const DEVICE T* chosen_slab = first;         \
    const int slab_number = number;              \
    EACH_SLAB(choose)                            \
    slab = chosen_slab;                          \
  }
#define KEYS_OF(slab, number) CHOOSE_SLAB(slab, number, CHOOSE_KEYS, keys_0)
#define VALUES_OF(slab, number) CHOOSE_SLAB(slab, number, CHOOSE_VALUES, values_0)
