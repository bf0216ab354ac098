#define _GNU_SOURCE /* RTLD_DEFAULT */
/* A stand-in for the parts of the CUDA runtime that torch calls on the host: devices, streams, events and copies. It is loaded
   before torch, whose libraries then find these functions instead of those of libcudart. Launching a kernel fails, so a process
   that uses it computes nothing on its device: tensors there must be fake. Work on a stream is complete as soon as it is issued.

   Compiled against the headers that torch's own CUDA wheels bring, because the layout of structures differs between versions. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "driver_types.h"

#define EXPORT __attribute__((visibility("default")))
#define FORWARD EXPORT cudaError_t

static char device_name[256] = "NVIDIA H100 80GB HBM3";
static int device_count = 8, major = 9, minor = 0, multiprocessors = 132;
static size_t device_memory = 80ull << 30;
static __thread int current_device;
static long handles = 1;

/* Describe the devices. Called once, before torch is imported. */
EXPORT void titan_describe_device(const char *name, int count, int capability, int processors, size_t memory) {
    strncpy(device_name, name, sizeof device_name - 1);
    device_count = count, major = capability / 10, minor = capability % 10;
    multiprocessors = processors, device_memory = memory;
}

/* Whoever observes waits of the host: returns 0 to allow one. */
static int (*on_wait)(const char *what);
static long current_step;
EXPORT void titan_on_wait(int (*callback)(const char *what)) { on_wait = callback; }
EXPORT void titan_begin_step(long step) { current_step = step; }
static cudaError_t wait_for(const char *what) { return on_wait && on_wait(what) ? cudaErrorNotPermitted : cudaSuccess; }

static void *new_handle(void) { return (void *)(0x1000 + 16 * __sync_fetch_and_add(&handles, 1)); }

FORWARD cudaGetDeviceCount(int *count) { *count = device_count; return cudaSuccess; }
FORWARD cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
FORWARD cudaSetDevice(int device) {
    if (device < 0 || device >= device_count) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}
FORWARD cudaDriverGetVersion(int *version) { *version = 13020; return cudaSuccess; }
static __thread cudaError_t last_error; /* of a launch: torch asks for it afterwards */
FORWARD cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
FORWARD cudaPeekAtLastError(void) { return last_error; }
FORWARD cudaDeviceSynchronize(void) { return wait_for("torch.cuda.synchronize"); }
FORWARD cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
FORWARD cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
FORWARD cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
FORWARD cudaDeviceGetPCIBusId(char *id, int length, int device) {
    strncpy(id, "0000:00:00.0", length);
    return cudaSuccess;
}
FORWARD cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = minor; break;
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
    default: *value = 1;
    }
    return cudaSuccess;
}
FORWARD cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strncpy(properties->name, device_name, sizeof properties->name - 1);
    properties->major = major, properties->minor = minor;
    properties->totalGlobalMem = device_memory;
    properties->multiProcessorCount = multiprocessors;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 50 << 20;
    return cudaSuccess;
}
FORWARD cudaMemGetInfo(size_t *free_bytes, size_t *total) { *free_bytes = *total = device_memory; return cudaSuccess; }

FORWARD cudaStreamCreate(cudaStream_t *stream) { *stream = new_handle(); return cudaSuccess; }
FORWARD cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { *stream = new_handle(); return cudaSuccess; }
FORWARD cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new_handle();
    return cudaSuccess;
}
FORWARD cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
FORWARD cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
FORWARD cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
FORWARD cudaStreamSynchronize(cudaStream_t stream) { return wait_for("Stream.synchronize"); }
FORWARD cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
FORWARD cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
FORWARD cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* An event knows the step in which it was recorded. To wait for one of an earlier step does not stall the device, which has
   work of the current step. */
struct event { long step; };
FORWARD cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(struct event));
    return cudaSuccess;
}
FORWARD cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
FORWARD cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
FORWARD cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
FORWARD cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((struct event *)event)->step = current_step;
    return cudaSuccess;
}
FORWARD cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
FORWARD cudaEventSynchronize(cudaEvent_t event) {
    return ((struct event *)event)->step < current_step ? cudaSuccess : wait_for("Event.synchronize");
}
FORWARD cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) { *milliseconds = 1; return cudaSuccess; }

/* Host memory in place of device memory, for the few real tensors that torch's own code makes. */
FORWARD cudaMalloc(void **address, size_t bytes) {
    *address = aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}
FORWARD cudaFree(void *address) { free(address); return cudaSuccess; }
FORWARD cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    *address = malloc(bytes);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}
FORWARD cudaFreeHost(void *address) { free(address); return cudaSuccess; }
FORWARD cudaHostRegister(void *address, size_t bytes, unsigned flags) { return cudaSuccess; }
FORWARD cudaHostUnregister(void *address) { return cudaSuccess; }
FORWARD cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}
FORWARD cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}
FORWARD cudaMemset(void *address, int value, size_t bytes) { memset(address, value, bytes); return cudaSuccess; }
FORWARD cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
    memset(address, value, bytes);
    return cudaSuccess;
}
FORWARD cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = (void *)address;
    return cudaSuccess;
}

/* Newer versions have further parameters, which stay as they are: nothing captures. */
FORWARD cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
FORWARD cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* torch asks for the driver's functions by name. It looks them up before it needs them, so all exist, and fail if called. */
static int unsupported(void) { return cudaErrorNotSupported; }
FORWARD cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
    void *found = dlsym(RTLD_DEFAULT, symbol);
    *function = found ? found : (void *)unsupported;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* What cannot be done without a GPU. A kernel<<<...>>> is not called if its configuration is refused. */
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    last_error = cudaErrorNotSupported;
    return 1;
}
FORWARD cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return last_error = cudaErrorNotSupported;
}
FORWARD cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return last_error = cudaErrorNotSupported;
}
