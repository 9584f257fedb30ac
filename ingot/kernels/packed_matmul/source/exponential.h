// Of 32 bits; those of 16 have one of their own.
INLINE float exponential(float x) { return expf(x); }
