/* A stand-in for libcuda.so.1 on a machine without a GPU: answers the questions that torch and the CUDA runtime ask when they
   are loaded. It runs no kernel and allocates no memory. */
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define CONTEXT ((void *)8) /* any address other than 0 */

EXPORT int cuInit(unsigned flags) { return 0; }
EXPORT int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
EXPORT int cuDeviceGetCount(int *count) { *count = 8; return 0; }
EXPORT int cuCtxGetCurrent(void **context) { *context = CONTEXT; return 0; }
EXPORT int cuCtxSetCurrent(void *context) { return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { *context = CONTEXT; return 0; }
EXPORT int cuGetErrorString(int error, const char **text) { *text = "simulated device"; return 0; }
EXPORT int cuGetErrorName(int error, const char **text) { *text = "simulated device"; return 0; }
