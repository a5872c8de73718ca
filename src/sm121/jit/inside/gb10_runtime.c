/* The CUDA runtime that FlashInfer's compiled modules launch through, answered as on a GB10.
 *
 * Beside gb10.c, for a module's own host code: kernels register themselves by name when the library is
 * loaded; a launch is noted (threads, bytes of dynamic shared memory, the kernel's name as in its
 * cubin) as a line of the file GB10_LAUNCHES (gb10.c). A launch that can't be noted, or is of a kernel
 * that did not register itself, ends the process, with the reason on standard error. Nothing runs.
 *
 * What is not answered here ends in the real runtime, if one is loaded (torch's is), and that asks
 * libcuda.so.1 beside this library: gb10.c, which has none of what it asks for, so that the answer is
 * cudaErrorInsufficientDriver.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void gb10_note(unsigned threads, size_t shared, const char *name);

/* nvcc's own calls (crt/host_runtime.h); a stub's address stands for its kernel. */
struct entry {
  const void *stub;
  char *name;
  struct entry *next;
};
static struct entry *entries;
static struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;

void **__cudaRegisterFatBinary(void *binary) {
  void **handle = malloc(sizeof *handle);
  *handle = binary;
  return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                       size_t size, int constant, int global) {
  (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size;
  (void)constant, (void)global;
}
void __cudaRegisterFunction(void **handle, const char *stub, char *function, const char *name,
                            int limit, uint3 *thread, uint3 *block, dim3 *block_size,
                            dim3 *grid_size, int *warp_size) {
  (void)handle, (void)function, (void)limit, (void)thread, (void)block, (void)block_size;
  (void)grid_size, (void)warp_size;
  struct entry *one = malloc(sizeof *one);
  one->stub = stub, one->name = strdup(name), one->next = entries;
  entries = one;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
  *kernel = (cudaKernel_t)stub;
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *(cudaStream_t *)stream = pushed.stream;
  return cudaSuccess;
}

static cudaError_t launched(const void *stub, dim3 block, size_t shared) {
  const struct entry *one = entries;
  while (one && one->stub != stub) one = one->next;
  if (!one) {
    fprintf(stderr, "gb10_runtime.c: what is launched at %p is no kernel that registered itself\n", stub);
    abort();
  }
  gb10_note(block.x * block.y * block.z, shared, one->name);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t stream) {
  (void)grid, (void)arguments, (void)stream;
  return launched((const void *)kernel, block, shared);
}
cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  (void)grid, (void)arguments, (void)stream;
  return launched(stub, block, shared);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *stub, void **arguments) {
  (void)arguments;
  return launched(stub, c->blockDim, c->dynamicSmemBytes);
}

/* Whether a block fits is judged later, by what was launched. */
cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute attribute, int value) {
  (void)stub, (void)attribute, (void)value;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp prop;
  cudaError_t error = cudaGetDeviceProperties(&prop, device);
  if (error) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = prop.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)prop.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)prop.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)prop.sharedMemPerMultiprocessor; break;
    default:
      fprintf(stderr, "gb10_runtime.c: device attribute %d is not answered\n", attribute);
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
