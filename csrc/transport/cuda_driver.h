// The CUDA driver, which is loaded at run time, so that the package builds without the CUDA toolkit. The types are declared
// by hand after the documented ABI of the driver.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "device.h"

namespace freescale::transport::cuda {

using Result = int;                        // CUresult
using Ordinal = int;                       // CUdevice
using Context = void*;                     // CUcontext
using DriverStream = void*;                // CUstream
using DriverEvent = void*;                 // CUevent
using DevicePointer = unsigned long long;  // CUdeviceptr

constexpr Result success = 0, not_ready = 600;
constexpr unsigned stream_non_blocking = 1, event_disable_timing = 2, wait_geq = 0, write_default = 0;
constexpr unsigned host_portable = 1, host_device_map = 2, lazy_peer_access = 1;

struct IpcHandle {  // CUipcMemHandle
  unsigned char bytes[64];
};

struct Driver {
  std::string problem;
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(Ordinal*, int);
  Result (*cuDeviceGetName)(char*, int, Ordinal);
  Result (*cuDeviceGetPCIBusId)(char*, int, Ordinal);
  Result (*cuDevicePrimaryCtxRetain)(Context*, Ordinal);
  Result (*cuCtxPushCurrent)(Context);
  Result (*cuCtxPopCurrent)(Context*);
  Result (*cuCtxGetStreamPriorityRange)(int*, int*);
  Result (*cuStreamCreateWithPriority)(DriverStream*, unsigned, int);
  Result (*cuStreamWaitEvent)(DriverStream, DriverEvent, unsigned);
  Result (*cuStreamWriteValue32)(DriverStream, DevicePointer, Word, unsigned);
  Result (*cuStreamWaitValue32)(DriverStream, DevicePointer, Word, unsigned);
  Result (*cuEventCreate)(DriverEvent*, unsigned);
  Result (*cuEventDestroy)(DriverEvent);
  Result (*cuEventRecord)(DriverEvent, DriverStream);
  Result (*cuEventQuery)(DriverEvent);
  Result (*cuMemcpyDtoHAsync)(void*, DevicePointer, std::size_t, DriverStream);
  Result (*cuMemcpyHtoDAsync)(DevicePointer, const void*, std::size_t, DriverStream);
  Result (*cuMemcpyDtoDAsync)(DevicePointer, DevicePointer, std::size_t, DriverStream);
  Result (*cuMemsetD8Async)(DevicePointer, unsigned char, std::size_t, DriverStream);
  Result (*cuMemAlloc)(DevicePointer*, std::size_t);
  Result (*cuMemFree)(DevicePointer);
  Result (*cuIpcGetMemHandle)(IpcHandle*, DevicePointer);
  Result (*cuIpcOpenMemHandle)(DevicePointer*, IpcHandle, unsigned);
  Result (*cuIpcCloseMemHandle)(DevicePointer);
  Result (*cuMemHostRegister)(void*, std::size_t, unsigned);
  Result (*cuMemHostUnregister)(void*);
  Result (*cuMemHostGetDevicePointer)(DevicePointer*, void*, unsigned);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);

  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library_) {
      problem = "no CUDA driver: libcuda.so.1 cannot be loaded";
      return;
    }
    // The suffixes are the versions that current CUDA headers select.
    find(cuInit, "cuInit");
    find(cuDriverGetVersion, "cuDriverGetVersion");
    find(cuDeviceGetCount, "cuDeviceGetCount");
    find(cuDeviceGet, "cuDeviceGet");
    find(cuDeviceGetName, "cuDeviceGetName");
    find(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId");
    find(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    find(cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    find(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange");
    find(cuStreamCreateWithPriority, "cuStreamCreateWithPriority");
    find(cuStreamWaitEvent, "cuStreamWaitEvent");
    find(cuStreamWriteValue32, "cuStreamWriteValue32_v2");
    find(cuStreamWaitValue32, "cuStreamWaitValue32_v2");
    find(cuEventCreate, "cuEventCreate");
    find(cuEventDestroy, "cuEventDestroy_v2");
    find(cuEventRecord, "cuEventRecord");
    find(cuEventQuery, "cuEventQuery");
    find(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
    find(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    find(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
    find(cuMemsetD8Async, "cuMemsetD8Async");
    find(cuMemAlloc, "cuMemAlloc_v2");
    find(cuMemFree, "cuMemFree_v2");
    find(cuIpcGetMemHandle, "cuIpcGetMemHandle");
    find(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2");
    find(cuIpcCloseMemHandle, "cuIpcCloseMemHandle");
    find(cuMemHostRegister, "cuMemHostRegister_v2");
    find(cuMemHostUnregister, "cuMemHostUnregister");
    find(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2");
    find(cuGetErrorName, "cuGetErrorName");
    find(cuGetErrorString, "cuGetErrorString");
    if (!problem.empty()) return;
    if (const Result result = cuInit(0); result != success) problem = "cuInit failed: " + describe(result);
  }

  std::string describe(Result result) const {
    const char *name = nullptr, *text = nullptr;
    if (cuGetErrorName(result, &name) != success || !name) name = "unknown error";
    if (cuGetErrorString(result, &text) != success || !text) text = "";
    return std::string(name) + " (" + std::to_string(result) + "): " + text;
  }

  void check(Result result, const char* call) const {
    if (result != success) throw std::runtime_error(std::string(call) + " failed: " + describe(result));
  }

 private:
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (!function && problem.empty()) problem = std::string("the CUDA driver is too old: it has no ") + name;
  }

  void* library_ = nullptr;
};

inline const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

#define FREESCALE_CUDA(call, ...) driver().check(driver().call(__VA_ARGS__), #call)

// Makes a context current for one scope. The thread may have another library's context current.
class ScopedContext {
 public:
  explicit ScopedContext(Context context) { FREESCALE_CUDA(cuCtxPushCurrent, context); }
  ~ScopedContext() {
    Context ignored;
    driver().cuCtxPopCurrent(&ignored);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
};

}  // namespace freescale::transport::cuda
