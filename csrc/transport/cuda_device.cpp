// A GPU as a device, through the CUDA driver.
//
// Copies between the GPU and pinned host memory, and between two GPUs, run on copy engines. The driver runs copies and
// fills within one GPU on its SMs. The stream itself writes words and waits for them (stream memory operations). Nothing
// here launches a kernel.
#include <sys/mman.h>

#include <cctype>
#include <chrono>
#include <fstream>
#include <map>
#include <thread>

#include "cuda_driver.h"

namespace freescale::transport {
namespace {

using namespace cuda;

class CudaEvent : public Event {
 public:
  CudaEvent(Context context, DriverStream stream) : context_(context) {
    ScopedContext scope(context_);
    FREESCALE_CUDA(cuEventCreate, &event_, event_disable_timing);
    FREESCALE_CUDA(cuEventRecord, event_, stream);
  }
  ~CudaEvent() override {
    // At exit the driver may have shut down already. Then this fails, and there is nothing left to destroy.
    if (driver().cuCtxPushCurrent(context_) != success) return;
    driver().cuEventDestroy(event_);
    Context ignored;
    driver().cuCtxPopCurrent(&ignored);
  }
  bool done() override {
    ScopedContext scope(context_);
    const Result result = driver().cuEventQuery(event_);
    if (result == not_ready) return false;
    driver().check(result, "cuEventQuery");
    return true;
  }
  void block_stream(StreamHandle caller) override { wait_in(reinterpret_cast<DriverStream>(caller)); }
  void wait_in(DriverStream stream) {
    ScopedContext scope(context_);
    FREESCALE_CUDA(cuStreamWaitEvent, stream, event_, 0u);
  }

 private:
  Context context_;
  DriverEvent event_ = nullptr;
};

class CudaDevice;

class CudaStream : public Stream {
 public:
  explicit CudaStream(CudaDevice& device);
  ~CudaStream() override;
  void copy_to_host(std::byte* host, Address source, std::size_t bytes) override;
  void copy_from_host(Address target, const std::byte* host, std::size_t bytes) override;
  void copy_on_device(Address target, Address source, std::size_t bytes) override;
  void fill_with_ones(Address target, std::size_t bytes) override;
  void write_word(Word* word, Word value) override;
  void wait_word(const Word* word, Word value) override;
  void wait_event(std::shared_ptr<Event> event) override;
  std::shared_ptr<Event> record() override;
  StreamHandle handle() const override { return reinterpret_cast<StreamHandle>(stream_); }

 private:
  CudaDevice& device_;
  const DriverStream stream_;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) {
    if (!driver().problem.empty()) throw std::runtime_error(driver().problem);
    Ordinal device;
    FREESCALE_CUDA(cuDeviceGet, &device, ordinal);
    char text[256] = "";
    FREESCALE_CUDA(cuDeviceGetName, text, static_cast<int>(sizeof text), device);
    name_ = std::string(text) + " (cuda:" + std::to_string(ordinal) + ")";
    FREESCALE_CUDA(cuDeviceGetPCIBusId, text, static_cast<int>(sizeof text), device);
    numa_node_ = node_of(text);
    FREESCALE_CUDA(cuDevicePrimaryCtxRetain, &context_, device);  // the context that torch uses
    // This memory is never freed or unpinned, because streams may read a gate until the process ends.
    void* page = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw std::runtime_error("no memory for the priority gates");
    static_assert(sizeof(GateWords) * max_gates + sizeof(Word) <= page_bytes);
    pin(static_cast<std::byte*>(page), page_bytes);
    set_gate_memory(static_cast<GateWords*>(page));
    std::byte* word = static_cast<std::byte*>(page) + sizeof(GateWords) * max_gates;
    check_stream_memory_operations(reinterpret_cast<Word*>(word));
  }

  std::string name() const override { return name_; }
  int numa_node() const override { return numa_node_; }
  Context context() const { return context_; }
  std::unique_ptr<Stream> new_stream() override { return std::make_unique<CudaStream>(*this); }
  std::shared_ptr<Event> record(StreamHandle caller) override {
    return std::make_shared<CudaEvent>(context_, reinterpret_cast<DriverStream>(caller));
  }

  void pin(std::byte* memory, std::size_t bytes) override {
    ScopedContext scope(context_);
    FREESCALE_CUDA(cuMemHostRegister, memory, bytes, host_portable | host_device_map);
    DevicePointer seen;
    FREESCALE_CUDA(cuMemHostGetDevicePointer, &seen, memory, 0u);
    std::lock_guard lock(mutex_);
    pinned_[memory] = {bytes, seen};
  }

  void unpin(std::byte* memory) override {
    {
      std::lock_guard lock(mutex_);
      pinned_.erase(memory);
    }
    ScopedContext scope(context_);
    FREESCALE_CUDA(cuMemHostUnregister, memory);
  }

  Address allocate_shared(std::size_t bytes) override {
    ScopedContext scope(context_);
    DevicePointer memory;
    // The driver shares whole blocks of this size, so that smaller memory would share its neighbours, too.
    constexpr std::size_t block = 2 << 20;
    FREESCALE_CUDA(cuMemAlloc, &memory, (bytes + block - 1) / block * block);
    CudaStream stream(*this);
    stream.fill_with_ones(static_cast<Address>(memory), bytes);
    await(*stream.record(), "filling memory");
    return static_cast<Address>(memory);
  }

  void free_shared(Address memory) override {
    ScopedContext scope(context_);
    FREESCALE_CUDA(cuMemFree, static_cast<DevicePointer>(memory));
  }

  std::string handle_of(Address memory) override {
    ScopedContext scope(context_);
    IpcHandle handle;
    FREESCALE_CUDA(cuIpcGetMemHandle, &handle, static_cast<DevicePointer>(memory));
    std::string text;
    for (const unsigned char byte : handle.bytes)
      for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
    return text;
  }

  Address map_shared(const std::string& handle, std::size_t) override {
    IpcHandle given;
    if (handle.size() != 2 * sizeof given.bytes) throw std::runtime_error("the peer published no CUDA IPC handle");
    for (std::size_t i = 0; i < sizeof given.bytes; ++i)
      given.bytes[i] = static_cast<unsigned char>(std::stoi(handle.substr(2 * i, 2), nullptr, 16));
    ScopedContext scope(context_);
    DevicePointer memory;
    FREESCALE_CUDA(cuIpcOpenMemHandle, &memory, given, lazy_peer_access);
    return static_cast<Address>(memory);
  }

  void unmap_shared(Address memory) override {
    ScopedContext scope(context_);
    FREESCALE_CUDA(cuIpcCloseMemHandle, static_cast<DevicePointer>(memory));
  }

  // Streams are reused and never destroyed. Torch's allocator may refer to a stream as long as a tensor lives that was
  // sent through it.
  DriverStream take_stream() {
    {
      std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        const DriverStream taken = idle_.back();
        idle_.pop_back();
        return taken;
      }
    }
    ScopedContext scope(context_);
    int least = 0, greatest = 0;
    FREESCALE_CUDA(cuCtxGetStreamPriorityRange, &least, &greatest);
    DriverStream stream;
    FREESCALE_CUDA(cuStreamCreateWithPriority, &stream, stream_non_blocking, greatest);
    return stream;
  }

  void return_stream(DriverStream stream) {
    std::lock_guard lock(mutex_);
    idle_.push_back(stream);
  }

  // The address at which the device sees a word of pinned memory.
  DevicePointer device_pointer(const Word* word) const {
    auto* place = reinterpret_cast<const std::byte*>(word);
    std::lock_guard lock(mutex_);
    auto region = pinned_.upper_bound(place);
    if (region != pinned_.begin()) {
      --region;
      const std::size_t offset = place - region->first;
      if (offset < region->second.bytes) return region->second.seen + offset;
    }
    throw std::logic_error("a CUDA stream was given a word outside pinned memory");
  }

 private:
  static constexpr std::size_t page_bytes = 8192;
  struct Region {
    std::size_t bytes;
    DevicePointer seen;
  };

  // Some virtual GPUs accept these calls and never run them. This finds it out here and not in a training step.
  void check_stream_memory_operations(Word* word) {
    CudaStream stream(*this);
    stream.write_word(word, 7);
    stream.wait_word(word, 7);
    await(*stream.record(), "cuStreamWriteValue32");
    if (load(word) != 7) throw std::runtime_error(name_ + ": cuStreamWriteValue32 wrote a wrong value");
  }

  void await(Event& end, const char* what) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!end.done()) {
      if (std::chrono::steady_clock::now() > deadline)
        throw std::runtime_error(name_ + ": " + what + " had no effect within 10 s");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  // The NUMA node of a PCI device such as "0000:1B:00.0", as the kernel knows it.
  static int node_of(std::string bus_id) {
    for (char& letter : bus_id) letter = static_cast<char>(std::tolower(letter));
    std::ifstream file("/sys/bus/pci/devices/" + bus_id + "/numa_node");
    int node = -1;
    return file >> node ? node : -1;
  }

  std::string name_;
  int numa_node_ = -1;
  Context context_ = nullptr;
  mutable std::mutex mutex_;
  std::map<const std::byte*, Region> pinned_;
  std::vector<DriverStream> idle_;
};

CudaStream::CudaStream(CudaDevice& device) : device_(device), stream_(device.take_stream()) {}

CudaStream::~CudaStream() { device_.return_stream(stream_); }

void CudaStream::copy_to_host(std::byte* host, Address source, std::size_t bytes) {
  ScopedContext scope(device_.context());
  FREESCALE_CUDA(cuMemcpyDtoHAsync, host, static_cast<DevicePointer>(source), bytes, stream_);
}

void CudaStream::copy_from_host(Address target, const std::byte* host, std::size_t bytes) {
  ScopedContext scope(device_.context());
  FREESCALE_CUDA(cuMemcpyHtoDAsync, static_cast<DevicePointer>(target), host, bytes, stream_);
}

void CudaStream::copy_on_device(Address target, Address source, std::size_t bytes) {
  ScopedContext scope(device_.context());
  FREESCALE_CUDA(cuMemcpyDtoDAsync, static_cast<DevicePointer>(target), static_cast<DevicePointer>(source), bytes,
                 stream_);
}

void CudaStream::fill_with_ones(Address target, std::size_t bytes) {
  ScopedContext scope(device_.context());
  FREESCALE_CUDA(cuMemsetD8Async, static_cast<DevicePointer>(target), static_cast<unsigned char>(0xFF), bytes, stream_);
}

void CudaStream::write_word(Word* word, Word value) {
  ScopedContext scope(device_.context());
  // With the default flags, the whole system sees this write after every earlier write of the stream.
  FREESCALE_CUDA(cuStreamWriteValue32, stream_, device_.device_pointer(word), value, write_default);
}

void CudaStream::wait_word(const Word* word, Word value) {
  ScopedContext scope(device_.context());
  FREESCALE_CUDA(cuStreamWaitValue32, stream_, device_.device_pointer(word), value, wait_geq);
}

void CudaStream::wait_event(std::shared_ptr<Event> event) { static_cast<CudaEvent&>(*event).wait_in(stream_); }

std::shared_ptr<Event> CudaStream::record() { return std::make_shared<CudaEvent>(device_.context(), stream_); }

}  // namespace

CudaFacts cuda_facts() {
  CudaFacts facts{driver().problem};
  if (!facts.problem.empty()) return facts;
  if (const Result result = driver().cuDriverGetVersion(&facts.driver_version); result != success)
    facts.problem = "cuDriverGetVersion failed: " + driver().describe(result);
  else if (const Result counted = driver().cuDeviceGetCount(&facts.devices); counted != success)
    facts.problem = "cuDeviceGetCount failed: " + driver().describe(counted);
  else if (facts.devices == 0)
    facts.problem = "the CUDA driver sees no device";
  return facts;
}

std::shared_ptr<Device> cuda_device(int ordinal) { return std::make_shared<CudaDevice>(ordinal); }

}  // namespace freescale::transport
