// The queue on host memory, its ranks as threads of one process. Built and run by test_queue.py, under the
// thread and address sanitizers. Usage: queue_test SCENARIO; exit status 0 is success.
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>

#include "queue_device.h"
#include "queue_ranks.h"

namespace {

// Many random uneven exchanges, several outstanding, slots reused many times over.
long run_random(Group& group, int exchanges, std::size_t largest) {
  std::atomic<long> wrong{0};
  on_ranks(group.world, [&](int rank) {
    auto queue = group.open(rank);
    std::deque<std::unique_ptr<Buffers>> flying;
    for (int number = 0; number < exchanges; ++number) {
      flying.push_back(std::make_unique<Buffers>(fill(rank, group.world, number, largest)));
      Buffers& buffers = *flying.back();
      buffers.exchange = queue->exchange("all_to_all", buffers.sends, buffers.takes, 0);
      if (flying.size() < 8) continue;
      flying.front()->exchange->block(60);
      wrong += wrong_bytes(*flying.front(), rank);
      flying.pop_front();
    }
    for (auto& buffers : flying) {
      buffers->exchange->block(60);
      wrong += wrong_bytes(*buffers, rank);
    }
    const Report report = queue->report();
    require(report.exchanges == static_cast<std::uint64_t>(exchanges), "exchanges are counted");
    require(report.ring_bytes <= report.ring_bound_bytes, "the rings stay within their bound");
    require(report.ring_bound_bytes <= group.settings.buffer_bytes, "and the bound within the option");
    queue->close(30);
  });
  return wrong;
}

void random_exchanges(int world, int hosts, bool high, Word first = 0, std::size_t network_threads = 2) {
  Settings settings = small(high);
  settings.first_chunk = first;
  settings.network_threads = network_threads;
  Group group(world, hosts, settings);
  require(run_random(group, 40, 60'000) == 0, "every byte is right");
}

// ---- priorities ----------------------------------------------------------------------------------------------------

// While a low-priority exchange of many chunks is under way, a second one of three chunks is issued. The third low one
// is held up until the first chunk of the second exchange goes. Returns the low chunks that go between its first and
// last.
long overtaken(bool second_is_high) {
  constexpr int world = 2;
  constexpr std::size_t low_bytes = 40 * 4096, second_bytes = 3 * 4096;
  Group low(world, 1, small(false)), second(world, 1, small(second_is_high));
  std::vector<Trace> traces(world);
  on_ranks(world, [&](int rank) {
    Trace& trace = traces[rank];
    trace.before = [&](const std::string& what, long count) {
      if (what == "low out" && count == 3) trace.await("second out", 1);
      if (what == "second out" && count == 2) {
        if (second_is_high)
          std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the low one has its chance to be wrong
        else
          trace.await("low out", 4);
      }
    };
    auto device = std::make_shared<TracedDevice>(trace);
    low.devices[rank] = second.devices[rank] = device;
    auto slow = low.open(rank);
    device->label = "second";
    auto fast = second.open(rank);
    Bytes out(low_bytes, 1), in(low_bytes), urgent_out(second_bytes, 2), urgent_in(second_bytes);
    const int peer = 1 - rank;
    const auto parts = [&](Bytes& bytes) {
      std::vector<Part> list(world);
      list[peer] = {reinterpret_cast<Address>(bytes.data()), bytes.size()};
      return list;
    };
    auto first = slow->exchange("low", parts(out), parts(in), 0);
    trace.await("low out", 3);
    auto next = fast->exchange("second", parts(urgent_out), parts(urgent_in), 0);
    next->block(60);
    first->block(60);
    require(in == out && urgent_in == urgent_out, "both are right");
    low.meeting.wait();
    slow->close(10);
    fast->close(10);
  });
  long between = 0;
  for (const Trace& trace : traces) {
    std::vector<std::string> out = trace.copies();
    out.erase(std::remove_if(out.begin(), out.end(), [](auto& copy) { return copy.find(" out") == std::string::npos; }),
              out.end());
    const auto first = std::find(out.begin(), out.end(), "second out");
    const auto last = std::find(out.rbegin(), out.rend(), "second out").base();
    require(std::count(first, last, "second out") == 3, "all chunks went");
    between += std::count(first, last, "low out");
    require(!second_is_high || std::count(last, out.end(), "low out") == 37, "the rest of the low chunks went after");
  }
  return between;
}

void priority() {
  require(overtaken(true) == 0, "low-priority chunks went between high-priority ones");
  require(overtaken(false) >= 2, "between equals they do, so the check above can fail");
}

// A device that runs all its streams as one queue, in the order of issue, as CUDA may do with streams that share a
// hardware queue.
class OneQueueDevice : public Device {
 public:
  OneQueueDevice() { set_gate_memory(gates_); }
  std::string name() const override { return "host memory, one queue"; }
  std::unique_ptr<Stream> stream() override { return std::make_unique<Shared>(queue_); }
  std::shared_ptr<Mark> mark(Handle caller) override { return inner_->mark(caller); }
  void pin(std::byte*, std::size_t) override {}
  void unpin(std::byte*) override {}

 private:
  class Shared : public Stream {
   public:
    explicit Shared(std::shared_ptr<Stream> queue) : queue_(std::move(queue)) {}
    void to_host(std::byte* host, Address source, std::size_t bytes) override { queue_->to_host(host, source, bytes); }
    void from_host(Address target, const std::byte* host, std::size_t bytes) override {
      queue_->from_host(target, host, bytes);
    }
    void write(Word* word, Word value) override { queue_->write(word, value); }
    void await(const Word* word, Word value) override { queue_->await(word, value); }
    void after(std::shared_ptr<Mark> mark) override { queue_->after(mark); }
    std::shared_ptr<Mark> mark() override { return queue_->mark(); }
    Handle handle() const override { return 0; }

   private:
    std::shared_ptr<Stream> queue_;
  };
  std::shared_ptr<Device> inner_ = host_device();
  std::shared_ptr<Stream> queue_ = inner_->stream();
  GateWords gates_[max_gates] = {};
};

// No deadlock, although nothing can overtake: two groups of both priorities, exchanges larger than their rings.
void one_queue() {
  constexpr int world = 3, exchanges = 30;
  Group low(world, 1, small(false)), high(world, 1, small(true));
  on_ranks(world, [&](int rank) {
    low.devices[rank] = high.devices[rank] = std::make_shared<OneQueueDevice>();
    auto slow = low.open(rank), fast = high.open(rank);
    std::deque<Buffers> all;
    for (int number = 0; number < exchanges; ++number) {
      all.push_back(fill(rank, world, number, 300'000));
      Buffers& buffers = all.back();
      buffers.exchange = (number % 2 ? fast : slow)->exchange("all_to_all", buffers.sends, buffers.takes, 0);
    }
    for (Buffers& buffers : all) {
      buffers.exchange->block(60);
      require(wrong_bytes(buffers, rank) == 0, "every byte is right");
    }
    low.meeting.wait();
    slow->close(10);
    fast->close(10);
  });
}

// Chunks that are announced before they are there must be seen as wrong bytes by the checks above.
void early_flag() {
  Settings settings = small();
  settings.early_flag = true;
  Group group(2, 1, settings);
  std::vector<Trace> traces(2);
  for (int rank = 0; rank < 2; ++rank) {
    traces[rank].before = [](const std::string& what, long) {
      if (what == "low out") std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    group.devices[rank] = std::make_shared<TracedDevice>(traces[rank]);
  }
  require(run_random(group, 10, 20'000) > 0, "the fault is seen");
}

// ---- failures ------------------------------------------------------------------------------------------------------

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<Part> to_peer(int peer, int world, Bytes& bytes) {
  std::vector<Part> list(world);
  list[peer] = {reinterpret_cast<Address>(bytes.data()), bytes.size()};
  return list;
}

// Rank 1 does not take part: rank 0 times out, and rank 2, which needs rank 0 alone, ends with the same error.
void timeout(int hosts) {
  Settings settings = small();
  settings.timeout = 0.3;
  Group group(3, hosts, settings);
  on_ranks(3, [&](int rank) {
    auto queue = group.open(rank);
    Bytes bytes(70'000, 1), more(100, 1);
    const std::vector<Part> nothing(3);
    std::string error;
    if (rank == 0) {
      auto exchange = queue->exchange("all_to_all", nothing, to_peer(1, 3, bytes), 0);
      error = error_of([&] { exchange->block(30); });
      require(has(error, "rank 0") && has(error, "all_to_all #0") && has(error, "70000 bytes from rank 1"), error);
      require(has(error, "not done after"), error);
      require(!error_of([&] { queue->exchange("all_to_all", nothing, nothing, 0); }).empty(), "later ones are refused");
    } else if (rank == 2) {
      queue->exchange("all_to_all", nothing, nothing, 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 is the first to be late
      auto exchange = queue->exchange("all_to_all", nothing, to_peer(0, 3, more), 0);
      error = error_of([&] { exchange->block(30); });
      require(has(error, "rank 0, all_to_all #0"), "rank 2 should report rank 0's error, not: " + error);
    }
    group.meeting.wait();
    error_of([&] { queue->close(10); });
  });
}

// A rank that leaves while another needs it.
void leaver(int hosts) {
  Group group(2, hosts, small());
  on_ranks(2, [&](int rank) {
    auto queue = group.open(rank);
    if (rank == 1) {
      queue->close(10);
      queue.reset();
      group.meeting.wait();
      return;
    }
    group.meeting.wait();
    Bytes bytes(5000);
    auto exchange = queue->exchange("all_gather", std::vector<Part>(2), to_peer(1, 2, bytes), 0);
    const std::string error = error_of([&] { exchange->block(30); });
    require(has(error, "5000 bytes from rank 1") && has(error, hosts == 1 ? "has left" : "is gone"), error);
  });
}

// Two ranks that disagree about sizes or about which collective comes next are told before bytes are mixed up.
void disagreement(int hosts) {
  for (const bool kind : {false, true}) {
    Group group(2, hosts, small());
    std::atomic<int> told{0};
    on_ranks(2, [&](int rank) {
      auto queue = group.open(rank);
      Bytes out(100, 1), in(kind || rank == 1 ? 100 : 200, 0);
      const std::string error = error_of([&] {
        auto exchange = queue->exchange(kind && rank == 1 ? "broadcast" : "all_to_all", to_peer(1 - rank, 2, out),
                                        to_peer(1 - rank, 2, in), 0);
        exchange->block(30);
        group.meeting.wait();
      });
      if (has(error, kind ? "another collective" : "200")) ++told;
      else require(error.empty(), error);
      if (!error.empty()) group.meeting.wait();
      error_of([&] { queue->close(10); });
    });
    require(told >= 1, "nobody noticed");
  }
}

// A chunk that has no place is not read, nor anything after it; what comes from another peer still is.
void bad_chunk() {
  struct : WireEvents {
    std::byte memory[64];
    int landed = 0, came = 0;
    std::byte* landing(int peer, const Chunk&) override {
      ++landed;
      if (peer == 1) throw std::runtime_error("no such place");
      return memory;
    }
    void arrived(int, const Chunk&) override { ++came; }
    void credited(int, Word) override { require(false, "a credit"); }
    void aborted(int, const std::string& why) override { require(false, why); }
    void lost(int, const std::string& why) override { require(false, why); }
  } events;
  std::vector<std::unique_ptr<Wire>> wires;
  std::map<int, std::string> addresses;
  for (int rank = 0; rank < 3; ++rank) addresses[rank] = wires.emplace_back(tcp_wire(rank, "127.0.0.1"))->address();
  on_ranks(3, [&](int rank) {
    std::map<int, std::string> others = addresses;
    others.erase(rank);
    wires[rank]->connect(others, after_seconds(20));
  });
  const auto receiver = wires[0]->receiver({1, 2});
  const auto receive = [&] { receiver->progress(events, std::chrono::milliseconds(20)); };
  const Bytes data(64, 7);
  Chunk chunk{};
  chunk.bytes = data.size();
  const auto bad = wires[1]->sender({0}), good = wires[2]->sender({0});
  for (int i = 0; i < 3; ++i) bad->put(0, chunk, reinterpret_cast<const std::byte*>(data.data()));
  require(has(error_of(receive), "no such place"), "it is refused");
  for (int i = 0; i < 3; ++i) receive();
  require(events.landed == 1 && events.came == 0, "no more is read of it");
  good->put(0, chunk, reinterpret_cast<const std::byte*>(data.data()));
  for (int i = 0; i < 500 && events.came == 0; ++i) receive();
  require(events.came == 1 && std::memcmp(events.memory, data.data(), data.size()) == 0, "the other peer is heard");
}

// Ring: sender and receiver agree on every slot, and no slot is used again before it is free.
void ring() {
  std::mt19937 random(3);
  for (const std::size_t largest : {std::size_t{8192}, std::size_t{100 * 4096}, std::size_t{3 << 20}}) {
    Ring sender(largest, 64 << 10, 0xFFFFFF00u), receiver(largest, 64 << 10, 0xFFFFFF00u);
    std::map<std::size_t, Word> owner;  // byte offset of a slot to the chunk it holds
    Word taken = 0xFFFFFF00u;           // the receiver's counter: it takes as late as the sender's waits allow
    std::size_t level = 0;
    for (int i = 0; i < 400; ++i) {
      const std::size_t bytes = random() % (2 * largest);
      const auto slots = sender.take(bytes), same = receiver.take(bytes);
      require(slots.size() == same.size(), "as many slots");
      std::size_t total = 0;
      for (std::size_t s = 0; s < slots.size(); ++s) {
        require(slots[s].number == same[s].number && slots[s].offset == same[s].offset, "the same slots");
        require(slots[s].bytes == same[s].bytes, "the same sizes");
        require(slots[s].offset + slots[s].bytes <= sender.region(), "inside the region");
        total += slots[s].bytes;
        if (slots[s].free && !reached(taken, *slots[s].free)) taken = *slots[s].free;
        if (const auto before = owner.find(slots[s].offset); before != owner.end() && sender.level() == level)
          require(reached(taken, before->second + 1), "a slot is written before it is free");
        level = sender.level();
        owner[slots[s].offset] = slots[s].number;
      }
      require(total == bytes, "all bytes have a place");
    }
  }
}

// Names of shared memory: unguessable, refused when they are not ours, gone when told.
void segments() {
  Segment own = Segment::create();
  own.map(1 << 20);
  own.commit(0, 1 << 20);
  require(Segment::create().name() != own.name(), "names differ");
  struct stat status {};
  require(stat(("/dev/shm/" + own.name()).c_str(), &status) == 0 && (status.st_mode & 0777) == 0600, "it is private");
  require(!error_of([] { Segment::open("freescale-nobody"); }).empty(), "an unknown name is refused");
  require(!error_of([] { Segment::open("../etc/passwd"); }).empty(), "a foreign name is refused");
  own.unlink();
  require(!error_of([&] { Segment other = Segment::open(own.name()); }).empty(), "the name is gone");
  own.data()[100] = std::byte{1};  // the memory is not
}

const std::map<std::string, std::function<void()>> scenarios{
    {"random2", [] { random_exchanges(2, 1, false); }},
    {"random4", [] { random_exchanges(4, 1, false); }},
    {"random_high", [] { random_exchanges(3, 1, true); }},
    {"random_hosts", [] { random_exchanges(4, 2, false); }},
    {"random_hosts_high", [] { random_exchanges(2, 2, true); }},
    {"random_hosts_apart", [] { random_exchanges(4, 4, false); }},
    {"random_hosts_one_thread", [] { random_exchanges(4, 4, true, 0, 1); }},
    {"random_wrap", [] { random_exchanges(2, 1, false, 0xFFFFFFF0u); }},
    {"random_hosts_wrap", [] { random_exchanges(2, 2, false, 0xFFFFFFF0u); }},
    {"priority", priority},
    {"one_queue", one_queue},
    {"early_flag", early_flag},
    {"timeout", [] { timeout(1); }},
    {"timeout_hosts", [] { timeout(3); }},
    {"leaver", [] { leaver(1); }},
    {"leaver_hosts", [] { leaver(2); }},
    {"disagreement", [] { disagreement(1); }},
    {"disagreement_hosts", [] { disagreement(2); }},
    {"bad_chunk", bad_chunk},
    {"ring", ring},
    {"segments", segments},
};

}  // namespace

int main(int count, char** arguments) {
  try {
    for (int i = 1; i < count; ++i) {
      const auto scenario = scenarios.find(arguments[i]);
      if (scenario == scenarios.end()) throw std::runtime_error(std::string("no scenario ") + arguments[i]);
      scenario->second();
      std::printf("%s ok\n", arguments[i]);
      std::fflush(stdout);
    }
    if (count == 1)
      for (const auto& scenario : scenarios) std::printf("%s\n", scenario.first.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
