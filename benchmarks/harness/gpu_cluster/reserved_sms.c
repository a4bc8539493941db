/* Loaded with LD_PRELOAD into a process that shares a GPU with others through MPS. Every stream that the process creates through
 * the CUDA runtime then belongs to a green context with its own SMs (streaming multiprocessors). No kernel of another process runs
 * on those SMs.
 *
 *     cc -shared -fPIC -o reserved_sms.so reserved_sms.c -ldl
 *     RESERVED_SMS=1/4 LD_PRELOAD=./reserved_sms.so python ...     # the second of four equal parts
 *
 * The default stream is not created through these functions and uses all SMs, so compute must run on another stream. The library
 * needs no CUDA toolkit, but a driver for CUDA 12.4 or later. If SMs cannot be reserved, the process aborts with a message.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define SM_RESOURCE 1
#define DEFAULT_STREAM 1 /* required flag of a green context */
#define NON_BLOCKING 1   /* required flag of a stream in a green context */
#define MOST_PARTS 64

typedef struct { /* CUdevResource of CUDA 12.4 to 13.0. Later drivers still accept it in the functions without a version suffix. */
  int type;
  unsigned char internal[92];
  unsigned sm_count, smallest_part, alignment;
  unsigned char reserved_bytes[36];
} Resource;

static void *green; /* the green context of this process */
static unsigned reserved; /* SMs */
static int (*create_stream)(void **, void *, unsigned, int);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void check(int status, const char *call) {
  if (status == 0) return;
  fprintf(stderr, "reserved_sms: %s failed with CUDA error %d\n", call, status);
  abort();
}

static void *find(void *driver, const char *name) {
  void *function = dlsym(driver, name);
  if (!function) {
    fprintf(stderr, "reserved_sms: the driver has no %s; CUDA 12.4 or later is needed\n", name);
    abort();
  }
  return function;
}

#define CALL(name, types, ...) check(((int(*) types)find(driver, #name))(__VA_ARGS__), #name)

static void make_context(void) {
  const char *part_of = getenv("RESERVED_SMS");
  unsigned part, parts;
  if (!part_of || sscanf(part_of, "%u/%u", &part, &parts) != 2 || part >= parts || parts > MOST_PARTS) {
    fprintf(stderr, "reserved_sms: RESERVED_SMS is %s; expected PART/PARTS, for example 0/4\n", part_of ? part_of : "not set");
    abort();
  }
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!driver) {
    fprintf(stderr, "reserved_sms: %s\n", dlerror());
    abort();
  }
  void *primary, *description;
  int device = 0;
  Resource all = {0}, remaining = {0}, each[MOST_PARTS] = {{0}};
  CALL(cuInit, (unsigned), 0);
  CALL(cuDevicePrimaryCtxRetain, (void **, int), &primary, device);
  CALL(cuDeviceGetDevResource, (int, Resource *, int), device, &all, SM_RESOURCE);
  unsigned wanted = all.sm_count / parts / all.alignment * all.alignment, groups = parts;
  CALL(cuDevSmResourceSplitByCount, (Resource *, unsigned *, const Resource *, Resource *, unsigned, unsigned), each, &groups,
       &all, &remaining, 0, wanted);
  if (groups < parts) {
    fprintf(stderr, "reserved_sms: %u SMs cannot be split into %u parts; a part needs at least %u SMs\n", all.sm_count, parts, all.smallest_part);
    abort();
  }
  reserved = each[part].sm_count;
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

/* The number of SMs that are reserved for this process. */
unsigned reserved_sms(void) {
  pthread_once(&once, make_context);
  return reserved;
}
