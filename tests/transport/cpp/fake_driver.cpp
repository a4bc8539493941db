// A CUDA driver for machines without a GPU: its streams are threads, and its device memory is host memory. It is
// stricter than the real driver, to check the calls of csrc/transport/cuda_device.cpp: a context must be current,
// copies must use pinned memory that was registered in one piece, and words must lie in pinned memory. As in the real
// driver, a copy to memory that is not pinned blocks all other threads that call the driver until it is done. Memory of
// cuMemAlloc is a file of shared memory, which another process can map by its handle. As in the real driver, a process
// cannot map its own memory, and memory must be unmapped before it is freed, which is checked with a lock of the file.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int invalid = 1, no_memory = 2, cannot_map = 205, not_ready = 600, no_context = 201, already_registered = 712;

struct Event {
  std::mutex mutex;
  bool recorded = false, done = true;
};

struct Stream {
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<std::function<void()>> work;
  std::thread thread{[this] { run(); }};
  void push(std::function<void()> operation) {
    std::lock_guard lock(mutex);
    work.push_back(std::move(operation));
    ready.notify_one();
  }
  void run() {
    while (true) {
      std::unique_lock lock(mutex);
      ready.wait(lock, [this] { return !work.empty(); });
      auto operation = std::move(work.front());
      work.pop_front();
      lock.unlock();
      operation();
    }
  }
};

int context;  // there is one
thread_local int current = 0;
std::mutex registry;
std::map<const char*, std::size_t> registered;
std::mutex driver;                   // held in every call
std::vector<Event*> default_stream;  // what it waits for; nothing else ever runs on it

bool pinned(const void* start, std::size_t bytes) {
  std::lock_guard lock(registry);
  auto region = registered.upper_bound(static_cast<const char*>(start));
  if (region == registered.begin()) return false;
  --region;
  return static_cast<const char*>(start) + bytes <= region->first + region->second;
}

bool done(Event* event) {
  std::lock_guard lock(event->mutex);
  return event->done;
}

template <typename Done>
void poll(Done done) {
  while (!done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

struct Handle {
  char file[48];
  std::size_t bytes;
  int process, padding;
};
static_assert(sizeof(Handle) == 64);

struct Block {
  std::size_t bytes;
  int file;
  std::string path;  // empty if another process has allocated it
};
std::map<unsigned long long, Block> blocks;  // guarded by `driver`

bool in_block(unsigned long long start, std::size_t bytes) {
  auto block = blocks.upper_bound(start);
  if (block == blocks.begin()) return false;
  --block;
  return start + bytes <= block->first + block->second.bytes;
}

unsigned long long map_file(int file, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? 0 : reinterpret_cast<unsigned long long>(memory);
}

std::uint32_t* word_at(unsigned long long address) { return reinterpret_cast<std::uint32_t*>(address); }

}  // namespace

#define LOCKED std::lock_guard locked(driver)

extern "C" {

int cuInit(unsigned) { LOCKED; return 0; }
int cuDriverGetVersion(int* version) { LOCKED; return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { LOCKED; return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { LOCKED; return *device = ordinal, ordinal == 0 ? 0 : 101; }
int cuDeviceGetName(char* name, int size, int) { LOCKED; return std::snprintf(name, size, "Fake GPU"), 0; }
int cuDeviceGetPCIBusId(char* text, int size, int) { LOCKED; return std::snprintf(text, size, "FFFF:FF:1F.7"), 0; }
int cuDevicePrimaryCtxRetain(void** out, int) { LOCKED; return *out = &context, 0; }
int cuCtxPushCurrent_v2(void* given) { LOCKED; return given == &context ? (++current, 0) : invalid; }
int cuCtxPopCurrent_v2(void** out) { LOCKED; return current > 0 ? (--current, *out = &context, 0) : no_context; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { LOCKED; return *least = 0, *greatest = -5, 0; }
int cuGetErrorName(int code, const char** name) {
  LOCKED;
  return *name = code == invalid ? "CUDA_ERROR_INVALID_VALUE" : "?", 0;
}
int cuGetErrorString(int, const char** text) { LOCKED; return *text = "fake", 0; }

int cuStreamCreateWithPriority(Stream** out, unsigned flags, int priority) {
  LOCKED;
  if (!current) return no_context;
  if (flags != 1 || priority != -5) return invalid;
  return *out = new Stream, 0;
}

int cuEventCreate(Event** out, unsigned flags) {
  LOCKED;
  if (!current) return no_context;
  return flags == 2 ? (*out = new Event, 0) : invalid;
}
int cuEventDestroy_v2(Event*) { LOCKED; return current ? 0 : no_context; }  // a stream may still wait for it
int cuEventRecord(Event* event, Stream* stream) {
  LOCKED;
  if (!current) return no_context;
  std::lock_guard lock(event->mutex);
  event->recorded = true;
  event->done = stream == nullptr;  // nothing ever runs on the default stream
  if (stream) stream->push([event] { std::lock_guard lock(event->mutex); event->done = true; });
  return 0;
}
int cuEventQuery(Event* event) {
  LOCKED;
  if (!current) return no_context;
  std::lock_guard lock(event->mutex);
  return event->recorded ? (event->done ? 0 : not_ready) : invalid;
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
  LOCKED;
  if (!current) return no_context;
  if (flags != 0) return invalid;
  if (stream)
    stream->push([event] { poll([event] { return done(event); }); });
  else
    default_stream.push_back(event);
  return 0;
}

int cuStreamWriteValue32_v2(Stream* stream, unsigned long long address, std::uint32_t value, unsigned flags) {
  LOCKED;
  if (!current) return no_context;
  if (flags != 0 || address % 4 || !pinned(word_at(address), 4)) return invalid;
  stream->push([=] { __atomic_store_n(word_at(address), value, __ATOMIC_RELEASE); });
  return 0;
}
int cuStreamWaitValue32_v2(Stream* stream, unsigned long long address, std::uint32_t value, unsigned flags) {
  LOCKED;
  if (!current) return no_context;
  if (flags != 0 || address % 4 || !pinned(word_at(address), 4)) return invalid;
  stream->push([=] {
    poll([=] { return static_cast<std::int32_t>(__atomic_load_n(word_at(address), __ATOMIC_ACQUIRE) - value) >= 0; });
  });
  return 0;
}

int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, std::size_t bytes, Stream* stream) {
  LOCKED;
  if (!current) return no_context;
  if (!bytes || !device || !pinned(host, bytes)) return invalid;
  stream->push([=] { std::memcpy(host, reinterpret_cast<const void*>(device), bytes); });
  return 0;
}
int cuMemcpyDtoH_v2(void* host, unsigned long long device, std::size_t bytes) {
  LOCKED;
  for (Event* event : default_stream) poll([event] { return done(event); });
  default_stream.clear();
  std::memcpy(host, reinterpret_cast<const void*>(device), bytes);
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long device, const void* host, std::size_t bytes, Stream* stream) {
  LOCKED;
  if (!current) return no_context;
  if (!bytes || !device || !pinned(host, bytes)) return invalid;
  stream->push([=] { std::memcpy(reinterpret_cast<void*>(device), host, bytes); });
  return 0;
}

int cuMemcpyDtoDAsync_v2(unsigned long long target, unsigned long long source, std::size_t bytes, Stream* stream) {
  LOCKED;
  if (!current) return no_context;
  if (!bytes || !(in_block(target, bytes) || in_block(source, bytes))) return invalid;
  stream->push([=] { std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes); });
  return 0;
}
int cuMemsetD8Async(unsigned long long target, unsigned char value, std::size_t bytes, Stream* stream) {
  LOCKED;
  if (!current) return no_context;
  if (!bytes || !in_block(target, bytes)) return invalid;
  stream->push([=] { std::memset(reinterpret_cast<void*>(target), value, bytes); });
  return 0;
}
int cuMemAlloc_v2(unsigned long long* out, std::size_t bytes) {
  LOCKED;
  if (!current) return no_context;
  char path[] = "/dev/shm/fake-gpu-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0 || flock(file, LOCK_SH) != 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return no_memory;
  *out = map_file(file, bytes);
  blocks[*out] = {bytes, file, path};
  return *out ? 0 : no_memory;
}
int cuMemFree_v2(unsigned long long memory) {
  LOCKED;
  if (!current) return no_context;
  const auto block = blocks.find(memory);
  if (block == blocks.end() || block->second.path.empty()) return invalid;
  if (flock(block->second.file, LOCK_EX | LOCK_NB) != 0) return invalid;  // another process has mapped it
  munmap(reinterpret_cast<void*>(memory), block->second.bytes);
  unlink(block->second.path.c_str());
  close(block->second.file);
  blocks.erase(block);
  return 0;
}
int cuIpcGetMemHandle(Handle* out, unsigned long long memory) {
  LOCKED;
  if (!current) return no_context;
  if (std::getenv("FAKE_GPU_WITHOUT_IPC")) return invalid;
  const auto block = blocks.find(memory);
  if (block == blocks.end()) return invalid;
  *out = {};
  std::strncpy(out->file, block->second.path.c_str(), sizeof out->file - 1);
  out->bytes = block->second.bytes;
  out->process = getpid();
  return 0;
}
int cuIpcOpenMemHandle_v2(unsigned long long* out, Handle handle, unsigned flags) {
  LOCKED;
  if (!current) return no_context;
  if (flags != 1 || handle.process == getpid()) return invalid;
  if (std::getenv("FAKE_GPU_CANNOT_MAP")) return cannot_map;
  const int file = open(handle.file, O_RDWR);
  if (file < 0 || flock(file, LOCK_SH) != 0) return cannot_map;
  *out = map_file(file, handle.bytes);
  blocks[*out] = {handle.bytes, file, ""};
  return *out ? 0 : cannot_map;
}
int cuIpcCloseMemHandle(unsigned long long memory) {
  LOCKED;
  if (!current) return no_context;
  const auto block = blocks.find(memory);
  if (block == blocks.end() || !block->second.path.empty()) return invalid;
  munmap(reinterpret_cast<void*>(memory), block->second.bytes);
  close(block->second.file);
  blocks.erase(block);
  return 0;
}

int cuMemHostRegister_v2(void* start, std::size_t bytes, unsigned flags) {
  LOCKED;
  if (!current) return no_context;
  if (flags != 3 || reinterpret_cast<std::uintptr_t>(start) % 4096 || bytes % 4096) return invalid;
  std::lock_guard lock(registry);
  auto* first = static_cast<const char*>(start);
  for (const auto& [other, size] : registered)
    if (first < other + size && other < first + bytes) return already_registered;
  registered[first] = bytes;
  return 0;
}
int cuMemHostUnregister(void* start) {
  LOCKED;
  if (!current) return no_context;
  std::lock_guard lock(registry);
  return registered.erase(static_cast<const char*>(start)) ? 0 : invalid;
}
int cuMemHostGetDevicePointer_v2(unsigned long long* out, void* start, unsigned flags) {
  LOCKED;
  if (flags != 0 || !pinned(start, 1)) return invalid;
  return *out = reinterpret_cast<unsigned long long>(start), 0;
}
}
