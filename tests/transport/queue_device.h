// A device whose copies are recorded and held up by the test.
#pragma once

#include <algorithm>
#include <functional>

#include "../../csrc/transport/queue.h"

using namespace freescale::transport;

namespace {

// What was copied, in order, as in "low out". Before each copy the stream's thread calls `before` with its count.
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
  // Waits until `what` has been copied `count` times, a while at most.
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
  TracedStream(std::unique_ptr<Stream> inner, Trace& trace, std::string name)
      : inner_(std::move(inner)), trace_(trace), name_(std::move(name)) {}
  void to_host(std::byte* host, Address source, std::size_t bytes) override {
    inner_->after(std::make_shared<Step>(trace_, name_ + " out"));
    inner_->to_host(host, source, bytes);
  }
  void from_host(Address target, const std::byte* host, std::size_t bytes) override {
    inner_->after(std::make_shared<Step>(trace_, name_ + " in"));
    inner_->from_host(target, host, bytes);
  }
  void write(Word* word, Word value) override { inner_->write(word, value); }
  void await(const Word* word, Word value) override { inner_->await(word, value); }
  void after(std::shared_ptr<Mark> mark) override { inner_->after(mark); }
  std::shared_ptr<Mark> mark() override { return inner_->mark(); }
  Handle handle() const override { return 0; }

 private:
  class Step : public Mark {  // the stream's thread asks whether it has passed
   public:
    Step(Trace& trace, std::string what) : trace_(trace), what_(std::move(what)) {}
    bool passed() override {
      trace_.add(what_);
      return true;
    }
    void hold(Handle) override {}

   private:
    Trace& trace_;
    std::string what_;
  };
  std::unique_ptr<Stream> inner_;
  Trace& trace_;
  std::string name_;
};

class TracedDevice : public Device {
 public:
  explicit TracedDevice(Trace& trace) : trace_(trace) { set_gate_memory(gates_); }
  std::string name() const override { return "traced host memory"; }
  std::unique_ptr<Stream> stream() override { return std::make_unique<TracedStream>(inner_->stream(), trace_, label); }
  std::shared_ptr<Mark> mark(Handle caller) override { return inner_->mark(caller); }
  void pin(std::byte*, std::size_t) override {}
  void unpin(std::byte*) override {}
  std::string label = "low";  // of the streams made next

 private:
  Trace& trace_;
  std::shared_ptr<Device> inner_ = host_device();
  GateWords gates_[max_gates] = {};
};

}  // namespace
