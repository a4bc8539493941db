// Host memory as a device. A stream is a thread that runs its operations in order.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "device.h"

namespace freescale::transport {
namespace {

class HostMark : public Mark {
 public:
  bool passed() override { return passed_.load(std::memory_order_acquire); }
  void hold(Handle) override {}
  void pass() { passed_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> passed_{false};
};

// Polls with growing patience until `done()` or `stop` is set.
template <typename Done>
void poll(const std::atomic<bool>& stop, Done done) {
  for (int spins = 0; !done() && !stop.load(std::memory_order_relaxed); ++spins) {
    if (spins < 64)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

class HostStream : public Stream {
 public:
  HostStream() : thread_([this] { run(); }) {}

  ~HostStream() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;  // a stream that waits for a word that never comes ends too
    }
    ready_.notify_one();
    thread_.join();
  }

  void to_host(std::byte* host, Address source, std::size_t bytes) override {
    push([=] { std::memcpy(host, reinterpret_cast<const std::byte*>(source), bytes); });
  }
  void from_host(Address target, const std::byte* host, std::size_t bytes) override {
    push([=] { std::memcpy(reinterpret_cast<std::byte*>(target), host, bytes); });
  }
  void write(Word* word, Word value) override {
    push([=] { store(word, value); });
  }
  void await(const Word* word, Word value) override {
    push([this, word, value] { poll(stop_, [=] { return reached(load(word), value); }); });
  }
  void after(std::shared_ptr<Mark> mark) override {
    push([this, mark] { poll(stop_, [&] { return mark->passed(); }); });
  }
  std::shared_ptr<Mark> mark() override {
    auto mark = std::make_shared<HostMark>();
    push([mark] { mark->pass(); });
    return mark;
  }
  Handle handle() const override { return 0; }

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
  std::thread thread_;  // last: it uses the members above
};

class HostDevice : public Device {
 public:
  HostDevice() { set_gate_memory(gates_); }
  std::string name() const override { return "host memory"; }
  std::unique_ptr<Stream> stream() override { return std::make_unique<HostStream>(); }
  std::shared_ptr<Mark> mark(Handle) override {
    auto mark = std::make_shared<HostMark>();
    mark->pass();  // the caller's tensors are ready when it calls
    return mark;
  }
  void pin(std::byte*, std::size_t) override {}
  void unpin(std::byte*) override {}

 private:
  GateWords gates_[max_gates] = {};
};

}  // namespace

std::shared_ptr<Device> host_device() { return std::make_shared<HostDevice>(); }

}  // namespace freescale::transport
