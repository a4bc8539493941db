// Host memory as a device, for tests without a GPU. A stream is a thread that runs its operations in order. What other
// processes can map is a segment of shared memory.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <thread>

#include "backoff.h"
#include "device.h"
#include "segment.h"

namespace freescale::transport {
namespace {

class HostEvent : public Event {
 public:
  bool done() override { return done_.load(std::memory_order_acquire); }
  void block_stream(StreamHandle) override {}
  void set_done() { done_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> done_{false};
};

// Polls until `done()` or `stop`, at first without sleeping.
template <typename Done>
void poll(const std::atomic<bool>& stop, Done done) {
  const Backoff backoff;
  for (int spins = 0; !done() && !stop.load(std::memory_order_relaxed); ++spins) {
    if (spins < 64)
      std::this_thread::yield();
    else
      backoff.sleep();
  }
}

class HostStream : public Stream {
 public:
  HostStream() : thread_([this] { run(); }) {}

  ~HostStream() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;  // this also ends a wait for a word that never changes
    }
    ready_.notify_one();
    thread_.join();
  }

  void copy_to_host(std::byte* host, Address source, std::size_t bytes) override {
    push([=] { std::memcpy(host, reinterpret_cast<const std::byte*>(source), bytes); });
  }
  void copy_from_host(Address target, const std::byte* host, std::size_t bytes) override {
    push([=] { std::memcpy(reinterpret_cast<std::byte*>(target), host, bytes); });
  }
  void copy_on_device(Address target, Address source, std::size_t bytes) override {
    push([=] { std::memcpy(reinterpret_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(source), bytes); });
  }
  void fill_with_ones(Address target, std::size_t bytes) override {
    push([=] { std::memset(reinterpret_cast<std::byte*>(target), 0xFF, bytes); });
  }
  void write_word(Word* word, Word value) override {
    push([=] { store(word, value); });
  }
  void wait_word(const Word* word, Word value) override {
    push([this, word, value] { poll(stop_, [=] { return reached(load(word), value); }); });
  }
  void wait_event(std::shared_ptr<Event> event) override {
    push([this, event] { poll(stop_, [&] { return event->done(); }); });
  }
  std::shared_ptr<Event> record() override {
    auto event = std::make_shared<HostEvent>();
    push([event] { event->set_done(); });
    return event;
  }
  StreamHandle handle() const override { return 0; }

 private:
  void push(std::function<void()> operation) {
    {
      std::lock_guard lock(mutex_);
      operations_.push_back(std::move(operation));
    }
    ready_.notify_one();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      ready_.wait(lock, [this] { return stop_ || !operations_.empty(); });
      if (stop_) return;
      const auto operation = std::move(operations_.front());
      operations_.pop_front();
      lock.unlock();
      operation();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> operations_;
  std::atomic<bool> stop_{false};
  std::thread thread_;  // declared last, because it uses the members above
};

class HostDevice : public Device {
 public:
  HostDevice() { set_gate_memory(gates_); }
  std::string name() const override { return "host memory"; }
  std::unique_ptr<Stream> new_stream() override { return std::make_unique<HostStream>(); }
  std::shared_ptr<Event> record(StreamHandle) override {
    auto event = std::make_shared<HostEvent>();
    event->set_done();  // tensors in host memory are ready when the caller passes them
    return event;
  }
  void pin(std::byte*, std::size_t) override {}
  void unpin(std::byte*) override {}

  Address allocate_shared(std::size_t bytes) override {
    Segment segment = Segment::create();
    segment.map(bytes);
    segment.reserve(0, bytes);
    std::memset(segment.data(), 0xFF, bytes);
    return keep(std::move(segment));
  }
  void free_shared(Address memory) override { drop(memory); }
  std::string handle_of(Address memory) override {
    std::lock_guard lock(mutex_);
    return shared_.at(memory).name();
  }
  Address map_shared(const std::string& handle, std::size_t bytes) override {
    Segment segment = Segment::open(handle);
    segment.map(bytes);
    segment.close_file();
    return keep(std::move(segment));
  }
  void unmap_shared(Address memory) override { drop(memory); }

 private:
  Address keep(Segment segment) {
    const auto address = reinterpret_cast<Address>(segment.data());
    std::lock_guard lock(mutex_);
    shared_.emplace(address, std::move(segment));
    return address;
  }
  void drop(Address memory) {
    std::lock_guard lock(mutex_);
    shared_.erase(memory);
  }

  std::mutex mutex_;
  std::map<Address, Segment> shared_;
  GateWords gates_[max_gates] = {};
};

}  // namespace

std::shared_ptr<Device> host_device() { return std::make_shared<HostDevice>(); }

}  // namespace freescale::transport
