// Devices for tests: one whose copies a test records and delays, and one that runs all streams as one hardware queue.
#pragma once

#include <algorithm>
#include <functional>

#include "../../../csrc/transport/queue.h"

using namespace freescale::transport;

namespace {

// A device of the tests, whose memory is that of host_device().
class TestDevice : public Device {
 public:
  TestDevice() { set_gate_memory(gates_); }
  std::shared_ptr<Event> record(StreamHandle caller) override { return inner_->record(caller); }
  void pin(std::byte*, std::size_t) override {}
  void unpin(std::byte*) override {}
  Address allocate_shared(std::size_t bytes) override { return inner_->allocate_shared(bytes); }
  void free_shared(Address memory) override { inner_->free_shared(memory); }
  std::string handle_of(Address memory) override { return inner_->handle_of(memory); }
  Address map_shared(const std::string& handle, std::size_t bytes) override {
    return inner_->map_shared(handle, bytes);
  }
  void unmap_shared(Address memory) override { inner_->unmap_shared(memory); }

 protected:
  std::shared_ptr<Device> inner_ = host_device();

 private:
  GateWords gates_[max_gates] = {};
};

// The copies so far, in order, for example "low out". Before each copy the stream's thread calls `before` with the
// number of such copies.
struct Trace {
  std::function<void(const std::string&, long)> before = [](const std::string&, long) {};

  void add(const std::string& what) {
    long count;
    {
      std::lock_guard lock(mutex_);
      copies_.push_back(what);
      count = std::count(copies_.begin(), copies_.end(), what);
    }
    before(what, count);
  }
  std::vector<std::string> copies() const {
    std::lock_guard lock(mutex_);
    return copies_;
  }
  // Waits until `what` has been copied `count` times, at most about 20 s.
  void await(const std::string& what, long count) const {
    for (int i = 0; i < 20'000; ++i) {
      const auto now = copies();
      if (std::count(now.begin(), now.end(), what) >= count) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> copies_;
};

class TracedStream : public Stream {
 public:
  TracedStream(std::unique_ptr<Stream> inner, Trace& trace, std::string name, bool out)
      : inner_(std::move(inner)), trace_(trace), name_(std::move(name)), out_(out) {}
  void copy_to_host(std::byte* host, Address source, std::size_t bytes) override {
    inner_->wait_event(std::make_shared<Step>(trace_, name_ + " out"));
    inner_->copy_to_host(host, source, bytes);
  }
  void copy_from_host(Address target, const std::byte* host, std::size_t bytes) override {
    inner_->wait_event(std::make_shared<Step>(trace_, name_ + " in"));
    inner_->copy_from_host(target, host, bytes);
  }
  void copy_on_device(Address target, Address source, std::size_t bytes) override {
    inner_->wait_event(std::make_shared<Step>(trace_, name_ + (out_ ? " out" : " in")));
    inner_->copy_on_device(target, source, bytes);
  }
  void fill_with_ones(Address target, std::size_t bytes) override { inner_->fill_with_ones(target, bytes); }
  void write_word(Word* word, Word value) override { inner_->write_word(word, value); }
  void wait_word(const Word* word, Word value) override { inner_->wait_word(word, value); }
  void wait_event(std::shared_ptr<Event> event) override { inner_->wait_event(event); }
  std::shared_ptr<Event> record() override { return inner_->record(); }
  StreamHandle handle() const override { return 0; }

 private:
  class Step : public Event {  // the stream's thread calls done() when it gets here
   public:
    Step(Trace& trace, std::string what) : trace_(trace), what_(std::move(what)) {}
    bool done() override {
      trace_.add(what_);
      return true;
    }
    void block_stream(StreamHandle) override {}

   private:
    Trace& trace_;
    std::string what_;
  };
  std::unique_ptr<Stream> inner_;
  Trace& trace_;
  std::string name_;
  const bool out_;
};

class TracedDevice : public TestDevice {
 public:
  explicit TracedDevice(Trace& trace) : trace_(trace) {}
  std::string name() const override { return "traced host memory"; }
  std::unique_ptr<Stream> new_stream() override {
    out_ = !out_;  // a queue makes its outgoing stream first
    return std::make_unique<TracedStream>(inner_->new_stream(), trace_, label, out_);
  }
  std::string label = "low";  // the name of the streams that are created next

 private:
  bool out_ = false;
  Trace& trace_;
};

// A device whose streams take `most` operations. A further one blocks the caller, as CUDA does.
class LimitedDevice : public TestDevice {
 public:
  explicit LimitedDevice(int most) : most_(most) {}
  std::string name() const override { return "host memory, limited streams"; }
  std::unique_ptr<Stream> new_stream() override { return std::make_unique<Limited>(inner_->new_stream(), most_); }

 private:
  class Limited : public Stream {
   public:
    Limited(std::unique_ptr<Stream> inner, int most) : most_(most), inner_(std::move(inner)) {}
    void copy_to_host(std::byte* host, Address source, std::size_t bytes) override {
      counted([&] { inner_->copy_to_host(host, source, bytes); });
    }
    void copy_from_host(Address target, const std::byte* host, std::size_t bytes) override {
      counted([&] { inner_->copy_from_host(target, host, bytes); });
    }
    void copy_on_device(Address target, Address source, std::size_t bytes) override {
      counted([&] { inner_->copy_on_device(target, source, bytes); });
    }
    void fill_with_ones(Address target, std::size_t bytes) override {
      counted([&] { inner_->fill_with_ones(target, bytes); });
    }
    void write_word(Word* word, Word value) override { counted([&] { inner_->write_word(word, value); }); }
    void wait_word(const Word* word, Word value) override { counted([&] { inner_->wait_word(word, value); }); }
    void wait_event(std::shared_ptr<Event> event) override { counted([&] { inner_->wait_event(event); }); }
    std::shared_ptr<Event> record() override { return inner_->record(); }
    StreamHandle handle() const override { return 0; }

   private:
    class Done : public Event {  // the stream's thread calls done() when it has run the operation before
     public:
      explicit Done(std::atomic<int>& count) : count_(count) {}
      bool done() override {
        --count_;
        return true;
      }
      void block_stream(StreamHandle) override {}

     private:
      std::atomic<int>& count_;
    };

    template <typename Issue>
    void counted(Issue issue) {
      while (count_ >= most_) std::this_thread::sleep_for(std::chrono::microseconds(100));
      ++count_;
      issue();
      inner_->wait_event(std::make_shared<Done>(count_));
    }
    const int most_;
    std::atomic<int> count_{0};
    std::unique_ptr<Stream> inner_;
  };
  const int most_;
};

// A device that runs all its streams as one queue, in the order of issue. CUDA may do so with streams that share a
// hardware queue.
class OneQueueDevice : public TestDevice {
 public:
  std::string name() const override { return "host memory, one queue"; }
  std::unique_ptr<Stream> new_stream() override { return std::make_unique<Shared>(queue_); }

 private:
  class Shared : public Stream {
   public:
    explicit Shared(std::shared_ptr<Stream> queue) : queue_(std::move(queue)) {}
    void copy_to_host(std::byte* host, Address source, std::size_t bytes) override {
      queue_->copy_to_host(host, source, bytes);
    }
    void copy_from_host(Address target, const std::byte* host, std::size_t bytes) override {
      queue_->copy_from_host(target, host, bytes);
    }
    void copy_on_device(Address target, Address source, std::size_t bytes) override {
      queue_->copy_on_device(target, source, bytes);
    }
    void fill_with_ones(Address target, std::size_t bytes) override { queue_->fill_with_ones(target, bytes); }
    void write_word(Word* word, Word value) override { queue_->write_word(word, value); }
    void wait_word(const Word* word, Word value) override { queue_->wait_word(word, value); }
    void wait_event(std::shared_ptr<Event> event) override { queue_->wait_event(event); }
    std::shared_ptr<Event> record() override { return queue_->record(); }
    StreamHandle handle() const override { return 0; }

   private:
    std::shared_ptr<Stream> queue_;
  };
  std::shared_ptr<Stream> queue_ = inner_->new_stream();
};

}  // namespace
