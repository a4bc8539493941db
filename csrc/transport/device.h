// The devices that the transport works on. A device has streams. A stream copies between tensors and a ring, writes
// 32-bit words of host memory and waits for them, all in order and without blocking the host. A ring lies in host memory,
// or in memory of a device that other processes can map. There are two
// devices: CUDA (cuda_device.cpp), where copy engines copy, and host memory (host_device.cpp), where a stream is a
// thread. The second one exists so that the whole protocol can run and be tested on machines without a GPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace freescale::transport {

using Word = std::uint32_t;            // a counter or a flag in shared memory; counters wrap at 2^32
using Address = std::uintptr_t;        // of a tensor, in the memory of the device
using StreamHandle = std::uintptr_t;   // a stream of the caller; 0 is the default stream

// Whether the counter `word` is at `value` or past it, modulo 2^32.
inline bool reached(Word word, Word value) { return static_cast<std::int32_t>(word - value) >= 0; }
inline Word load(const Word* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void store(Word* word, Word value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// A point in a stream's order of work, like a CUDA event.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;  // whether the stream has reached this point
  // Makes the caller's stream wait for this point. Does nothing on host memory, where the host itself waits.
  virtual void block_stream(StreamHandle caller) = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual void copy_to_host(std::byte* host, Address source, std::size_t bytes) = 0;
  virtual void copy_from_host(Address target, const std::byte* host, std::size_t bytes) = 0;
  // Between a tensor and a ring in device memory, which may belong to another device.
  virtual void copy_on_device(Address target, Address source, std::size_t bytes) = 0;
  virtual void fill_with_ones(Address target, std::size_t bytes) = 0;  // memory of this device; all bits become one
  virtual void write_word(Word* word, Word value) = 0;
  virtual void wait_word(const Word* word, Word value) = 0;   // until reached(*word, value)
  virtual void wait_event(std::shared_ptr<Event> event) = 0;  // until the event is done
  virtual std::shared_ptr<Event> record() = 0;                // an event after all work queued so far
  virtual StreamHandle handle() const = 0;
};

// Two words that give high-priority transfers precedence. A high-priority queue closes its gate (0) while copies run
// that have nothing left to wait for, and opens it (1) again. A low-priority chunk starts only while all gates of its
// direction are open. There is one word per direction, because each direction has its own copy engine.
struct Gate {
  Word* out;
  Word* in;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual int numa_node() const { return -1; }  // the node whose memory is nearest; -1 if it is unknown
  virtual std::unique_ptr<Stream> new_stream() = 0;
  virtual std::shared_ptr<Event> record(StreamHandle caller) = 0;  // an event after all work of the caller's stream
  virtual void pin(std::byte* memory, std::size_t bytes) = 0;
  virtual void unpin(std::byte* memory) = 0;

  // Memory of this device that other processes of this host can map. All its bits are one at first. All of these throw
  // std::runtime_error with the reason if the device cannot do it.
  virtual Address allocate_shared(std::size_t bytes) = 0;
  virtual void free_shared(Address memory) = 0;
  virtual std::string handle_of(Address memory) = 0;  // a text without line breaks
  // Maps memory of another process, which may be memory of another device. That process must free it later than this
  // process unmaps it.
  virtual Address map_shared(const std::string& handle, std::size_t bytes) = 0;
  virtual void unmap_shared(Address memory) = 0;

  // The gates of the high-priority queues that are open on this device. The memory of a gate lives as long as the
  // device, because a low-priority stream may still read it after its queue has closed.
  Gate claim_gate();
  void release_gate(const Gate& gate);
  std::vector<Gate> gates() const;

  // How many network threads hold chunks of high-priority queues. While it is not 0, low-priority ones do not send.
  std::atomic<int> urgent_senders{0};

  // Held while a queue issues operations that must stay together. The device may run two streams as one hardware queue,
  // so no wait of another queue for a gate may come between the closing and the opening of that gate.
  std::mutex issue_mutex;

 protected:
  struct alignas(64) GateWords {
    Word out;
    alignas(64) Word in;
  };
  static constexpr std::size_t max_gates = 32;
  // The implementation calls this with pinned, zeroed memory for `max_gates` gates.
  void set_gate_memory(GateWords* words) { gate_words_ = words; }

 private:
  GateWords* gate_words_ = nullptr;
  std::vector<bool> claimed_ = std::vector<bool>(max_gates, false);
  mutable std::mutex gate_mutex_;
};

std::shared_ptr<Device> host_device();
// Throws std::runtime_error with the reason if the driver or the device cannot be used.
std::shared_ptr<Device> cuda_device(int ordinal);

// What the CUDA driver offers on this machine. `problem` is empty if there is a driver and a device.
struct CudaFacts {
  std::string problem;
  int driver_version = 0;  // 13000 means 13.0
  int devices = 0;
};
CudaFacts cuda_facts();

}  // namespace freescale::transport
