/* A driver and the few runtime calls that DeepGEMM's host library makes, answered as on a GB10.
 *
 * Its C++ chooses tiles, writes the kernel's source and runs nvcc; then it loads and launches.
 * Preloaded, this says that there is one GPU of capability 12.1 and notes each launch (threads,
 * bytes of dynamic shared memory, the cubin) as a line of the file GB10_LAUNCHES; a launch that
 * can't be noted ends the process, with the reason on standard error. Nothing runs.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { (void)device; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t count, cudaStream_t stream) {
  (void)to, (void)value, (void)count, (void)stream;
  return cudaSuccess;
}

/* As in pretend.py. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
  (void)device;
  memset(prop, 0, sizeof *prop);
  strcpy(prop->name, "NVIDIA GB10");
  prop->major = 12;
  prop->minor = 1;
  prop->multiProcessorCount = 48;
  prop->warpSize = 32;
  prop->sharedMemPerBlock = 49152;
  prop->sharedMemPerBlockOptin = 101376;
  prop->sharedMemPerMultiprocessor = 102400;
  prop->regsPerBlock = 65536;
  prop->regsPerMultiprocessor = 65536;
  prop->maxThreadsPerBlock = 1024;
  prop->maxThreadsPerMultiProcessor = 1536;
  prop->l2CacheSize = 24 << 20;
  prop->totalGlobalMem = (size_t)128 << 30;
  return cudaSuccess;
}

/* A library, its kernel and the kernel's function are all the path of the cubin. */
CUresult cuGetErrorName(CUresult error, const char **name) {
  (void)error;
  *name = "none";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  (void)f, (void)a, (void)v;
  return CUDA_SUCCESS;
}
CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *file, CUjit_option *jo, void **jv,
                               unsigned jn, CUlibraryOption *lo, void **lv, unsigned ln) {
  (void)jo, (void)jv, (void)jn, (void)lo, (void)lv, (void)ln;
  *library = (CUlibrary)strdup(file);
  return CUDA_SUCCESS;
}
CUresult cuLibraryUnload(CUlibrary library) { (void)library; return CUDA_SUCCESS; }
CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library) {
  (void)library;
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned count, CUlibrary library) {
  for (unsigned i = 0; i < count; i++) kernels[i] = (CUkernel)library;
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *at,
                                const cuuint64_t *dim, const cuuint64_t *stride, const cuuint32_t *box,
                                const cuuint32_t *step, CUtensorMapInterleave i, CUtensorMapSwizzle s,
                                CUtensorMapL2promotion p, CUtensorMapFloatOOBfill f) {
  (void)map, (void)type, (void)rank, (void)at, (void)dim, (void)stride, (void)box, (void)step;
  (void)i, (void)s, (void)p, (void)f;
  return CUDA_SUCCESS;
}
void gb10_note(unsigned threads, size_t shared, const char *name) {
  const char *path = getenv("GB10_LAUNCHES");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file || fprintf(file, "%u %zu %s\n", threads, shared, name) < 0 || fclose(file)) {
    fprintf(stderr, "gb10.c: the launch of %s can't be noted in GB10_LAUNCHES (%s): %s\n", name,
            path ? path : "not set", path ? strerror(errno) : "no file");
    abort();
  }
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **more) {
  (void)arguments, (void)more;
  gb10_note(c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes, (const char *)function);
  return CUDA_SUCCESS;
}
