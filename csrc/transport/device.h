// What the transport needs of a device: streams that copy, set words and wait for words, each in order and none of them
// blocking the host. Two devices exist: CUDA, through its driver, where copies run on copy engines; and host memory,
// whose streams are threads, so that the whole protocol runs and is tested where no GPU is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace freescale::transport {

using Word = std::uint32_t;      // a counter in shared memory; it wraps
using Address = std::uintptr_t;  // of a tensor, in the device's memory
using Handle = std::uintptr_t;   // the caller's stream; 0 is the default one

// True when counter `word` has come to `value` or past it, modulo 2^32.
inline bool reached(Word word, Word value) { return static_cast<std::int32_t>(word - value) >= 0; }
inline Word load(const Word* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void store(Word* word, Word value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// A point in a stream's order of work.
class Mark {
 public:
  virtual ~Mark() = default;
  virtual bool passed() = 0;
  // The caller's stream goes on only when this point has passed. No-op on host memory: there the host itself waits.
  virtual void hold(Handle caller) = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual void to_host(std::byte* host, Address source, std::size_t bytes) = 0;
  virtual void from_host(Address target, const std::byte* host, std::size_t bytes) = 0;
  virtual void write(Word* word, Word value) = 0;
  virtual void await(const Word* word, Word value) = 0;  // until reached(*word, value)
  virtual void after(std::shared_ptr<Mark> mark) = 0;    // what follows waits for the mark
  virtual std::shared_ptr<Mark> mark() = 0;
  virtual Handle handle() const = 0;
};

// Words that a high-priority transfer closes (0) while its copies run and opens (1) again; a low-priority chunk starts
// only when they are open. One gate per direction, since each direction has a copy engine of its own.
struct Gate {
  Word* out;
  Word* in;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual std::unique_ptr<Stream> stream() = 0;
  virtual std::shared_ptr<Mark> mark(Handle caller) = 0;  // what the caller's stream holds now
  virtual void pin(std::byte* memory, std::size_t bytes) = 0;
  virtual void unpin(std::byte* memory) = 0;

  // The gates of the high-priority queues open on this device. Their memory lives as long as the device: a
  // low-priority stream may still read a gate whose queue has closed.
  Gate claim_gate();
  void release_gate(const Gate& gate);
  std::vector<Gate> gates() const;
  std::atomic<int> urgent{0};  // high-priority queues with chunks for the network: low-priority ones let them go first

  // Held while a queue issues operations that belong together. The device may run two streams as one queue: the
  // closing and the opening of a gate must then not have another queue's wait for that gate between them.
  std::mutex issue;

 protected:
  struct alignas(64) GateWords {
    Word out;
    alignas(64) Word in;
  };
  static constexpr std::size_t max_gates = 32;
  // Called by the implementation with pinned, zeroed memory for `max_gates` gates.
  void set_gate_memory(GateWords* words) { gate_words_ = words; }

 private:
  GateWords* gate_words_ = nullptr;
  std::vector<bool> claimed_ = std::vector<bool>(max_gates, false);
  mutable std::mutex gate_mutex_;
};

std::shared_ptr<Device> host_device();
// Throws std::runtime_error that says what is missing.
std::shared_ptr<Device> cuda_device(int ordinal);

// What the CUDA driver offers here. `problem` is empty when there is a driver and a device.
struct CudaFacts {
  std::string problem;
  int driver_version = 0;  // 13000 is 13.0
  int devices = 0;
};
CudaFacts cuda_facts();

}  // namespace freescale::transport
