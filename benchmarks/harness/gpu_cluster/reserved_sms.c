/* Preloaded into a process that shares a GPU with others through MPS: every stream that it makes through the CUDA runtime belongs
 * to a green context with streaming multiprocessors ("cores") of its own, so that no other process's kernels run on them.
 *
 *     cc -shared -fPIC -o own_cores.so own_cores.c -ldl
 *     OWN_CORES=1/4 LD_PRELOAD=./own_cores.so python ...     # the second of four equal parts
 *
 * The default stream is not made, and has all cores: compute must run on another one. Needs no CUDA toolkit, but a driver of CUDA
 * 12.4 or later. There is no way on without cores of one's own: what fails ends the process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define SM_RESOURCE 1
#define DEFAULT_STREAM 1 /* flag of a green context; required */
#define NON_BLOCKING 1   /* flag of a stream; required in a green context */
#define MOST_PARTS 64

typedef struct { /* CUdevResource of CUDA 12.4 to 13.0, which later drivers still take from the functions without a suffix */
  int type;
  unsigned char internal[92];
  unsigned sm_count, smallest_part, alignment;
  unsigned char rest[36];
} Resource;

static void *green; /* the context of this process */
static unsigned cores;
static int (*create_stream)(void **, void *, unsigned, int);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void check(int status, const char *call) {
  if (status == 0) return;
  fprintf(stderr, "own_cores: %s failed with CUDA error %d\n", call, status);
  abort();
}

static void *find(void *driver, const char *name) {
  void *function = dlsym(driver, name);
  if (!function) {
    fprintf(stderr, "own_cores: the driver has no %s; CUDA 12.4 or later is needed\n", name);
    abort();
  }
  return function;
}

#define CALL(name, types, ...) check(((int(*) types)find(driver, #name))(__VA_ARGS__), #name)

static void make_context(void) {
  const char *part_of = getenv("OWN_CORES");
  unsigned part, parts;
  if (!part_of || sscanf(part_of, "%u/%u", &part, &parts) != 2 || part >= parts || parts > MOST_PARTS) {
    fprintf(stderr, "own_cores: OWN_CORES is %s; wanted PART/PARTS, as 0/4\n", part_of ? part_of : "not set");
    abort();
  }
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!driver) {
    fprintf(stderr, "own_cores: %s\n", dlerror());
    abort();
  }
  void *primary, *description;
  int device = 0;
  Resource all = {0}, rest = {0}, each[MOST_PARTS] = {{0}};
  CALL(cuInit, (unsigned), 0);
  CALL(cuDevicePrimaryCtxRetain, (void **, int), &primary, device);
  CALL(cuDeviceGetDevResource, (int, Resource *, int), device, &all, SM_RESOURCE);
  unsigned wanted = all.sm_count / parts / all.alignment * all.alignment, groups = parts;
  CALL(cuDevSmResourceSplitByCount, (Resource *, unsigned *, const Resource *, Resource *, unsigned, unsigned), each, &groups,
       &all, &rest, 0, wanted);
  if (groups < parts) {
    fprintf(stderr, "own_cores: %u cores do not make %u parts of at least %u\n", all.sm_count, parts, all.smallest_part);
    abort();
  }
  cores = each[part].sm_count;
  CALL(cuDevResourceGenerateDesc, (void **, Resource *, unsigned), &description, &each[part], 1);
  CALL(cuGreenCtxCreate, (void **, void *, int, unsigned), &green, description, device, DEFAULT_STREAM);
  create_stream = (int (*)(void **, void *, unsigned, int))find(driver, "cuGreenCtxStreamCreate");
}

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  (void)flags;
  pthread_once(&once, make_context);
  check(create_stream(stream, green, NON_BLOCKING, priority), "cuGreenCtxStreamCreate");
  return 0;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }

int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

/* How many cores this process has for itself. */
unsigned own_cores(void) {
  pthread_once(&once, make_context);
  return cores;
}
