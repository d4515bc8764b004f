/* A CUDA driver that starts nothing, for the host's side of Triton alone: it loads Triton's binaries, refuses launches
   and descriptors that break a RULE below (from the CUDA driver API and the CUDA C++ programming guide, for compute
   capability 9.0), and shows each launch to an observer: the kernel, its grid, and its parameters as the machine code
   will read them. */

#include <cuda.h>
#include <elf.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define PARAMS 256
#define SHARED_BY_DEFAULT (48 << 10) /* bytes a block; more must be asked for */
#define SHARED_AT_MOST (227 << 10)

struct CUfunc_st {
  char name[512];
  int shared; /* bytes that were asked for */
  int count;  /* of parameters */
  unsigned sizes[PARAMS];
};

typedef void (*observer)(CUfunction function, const char *name, const unsigned long long *launch, int count,
                         const unsigned *sizes, void **params);
static observer seen;
static const char *broken = "no rule was broken";

void observe(observer to) { seen = to; }

static CUresult refuse(const char *rule) {
  broken = rule;
  return CUDA_ERROR_INVALID_VALUE;
}

#define RULE(holds)                                                                                                    \
  if (!(holds))                                                                                                        \
  return refuse(#holds)

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_SUCCESS ? "no error" : broken;
  return CUDA_SUCCESS;
}

/* ---- the device and its context ---- */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED_AT_MOST; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1; /* clocks and widths, which nothing here depends on */
  }
  return CUDA_SUCCESS;
}

static CUcontext current = (CUcontext)1;

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetDevice(CUdevice *device) { return cuDeviceGet(device, 0); }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
  return refuse("only the address of a pointer is known");
}

/* ---- kernels ---- */

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  RULE(memcmp(image, ELFMAG, SELFMAG) == 0);
  *module = (CUmodule)image; /* read by cuModuleGetFunction, while the caller still holds it */
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

/* Reads the parameters' sizes from the section of the binary that describes the kernel: entries of a format, an
   attribute and a size (a value, for a format that is not SIZED); one is of each parameter.  Returns whether there is
   room for all. */
static bool parameters(CUfunction function, const char *entries, const char *end) {
  enum { SIZED = 4, PARAMETER = 0x17 };
  while (entries < end) {
    unsigned char format = entries[0], attribute = entries[1];
    unsigned short size = *(const unsigned short *)(entries + 2);
    if (format == SIZED && attribute == PARAMETER) {
      unsigned short ordinal = *(const unsigned short *)(entries + 8);
      if (ordinal >= PARAMS)
        return false;
      function->sizes[ordinal] = *(const unsigned *)(entries + 12) >> 18;
      function->count = ordinal >= function->count ? ordinal + 1 : function->count;
    }
    entries += 4 + (format == SIZED ? size : 0);
  }
  return true;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  const char *image = (const char *)module, prefix[] = ".nv.info.";
  const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + head->e_shoff);
  const char *names = image + sections[head->e_shstrndx].sh_offset;
  RULE(strlen(name) < sizeof (*function)->name);
  for (int i = 0; i < head->e_shnum; i++) {
    const char *of = names + sections[i].sh_name;
    if (strncmp(of, prefix, strlen(prefix)) == 0 && strcmp(of + strlen(prefix), name) == 0) {
      *function = calloc(1, sizeof **function);
      strcpy((*function)->name, name);
      (*function)->shared = SHARED_BY_DEFAULT;
      const char *entries = image + sections[i].sh_offset;
      RULE(parameters(*function, entries, entries + sections[i].sh_size));
      return CUDA_SUCCESS;
    }
  }
  return refuse("the binary has a kernel of that name");
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; /* no register is counted */
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
    return CUDA_SUCCESS;
  RULE(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  RULE(value <= SHARED_AT_MOST);
  function->shared = value;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  unsigned x = config->gridDimX, y = config->gridDimY, z = config->gridDimZ;
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  RULE(0 < x && x <= 0x7fffffff);
  RULE(0 < y && y <= 65535);
  RULE(0 < z && z <= 65535);
  RULE(0 < threads && threads <= 1024);
  RULE(config->sharedMemBytes <= function->shared);
  unsigned long long attributes = 0; /* a bit for each */
  for (unsigned i = 0; i < config->numAttrs; i++) {
    attributes |= 1ull << config->attrs[i].id;
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      RULE(x % config->attrs[i].value.clusterDim.x == 0);
      RULE(y % config->attrs[i].value.clusterDim.y == 0);
      RULE(z % config->attrs[i].value.clusterDim.z == 0);
    }
  }
  if (seen) {
    unsigned long long stream = (unsigned long long)config->hStream;
    unsigned long long launch[] = {x, y, z, threads, config->sharedMemBytes, stream, attributes};
    seen(function, function->name, launch, function->count, function->sizes, params);
  }
  return CUDA_SUCCESS;
}

/* ---- descriptors of the copy engine ---- */

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}; /* by type */
  static const int span[] = {256, 32, 64, 128};                      /* bytes, by swizzle */
  RULE(type < sizeof bytes / sizeof *bytes);
  RULE(0 < rank && rank <= 5);
  RULE((unsigned long long)address % 16 == 0);
  RULE(swizzle < sizeof span / sizeof *span);
  for (cuuint32_t i = 0; i < rank; i++) {
    RULE(0 < shape[i] && shape[i] <= 1ull << 32);
    RULE(0 < box[i] && box[i] <= 256);
    RULE(0 < steps[i] && steps[i] <= 8);
    if (i + 1 < rank) { /* between rows, and so on */
      RULE(strides[i] % 16 == 0);
      RULE(strides[i] < 1ull << 40);
    }
  }
  RULE(box[0] * bytes[type] % 16 == 0);
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE)
    RULE(box[0] * bytes[type] <= span[swizzle]);
  memset(map, 0, sizeof *map);
  map->opaque[0] = (cuuint64_t)address;
  for (cuuint32_t i = 0; i < rank; i++) {
    map->opaque[1 + i] = shape[i];
    map->opaque[6 + i] = (cuuint64_t)box[i] << 48 | (i + 1 < rank ? strides[i] : 0);
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                 const cuuint64_t *shape, const cuuint64_t *strides, const int *lower,
                                 const int *upper, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *steps,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return refuse("tiles are not gathered from images");
}
