// The integral of the normal distribution's density, which no prelude has.
#ifndef __CUDACC__
extern "C" float erff(float);
#endif
INLINE float error_function(float x) { return erff(x); }
