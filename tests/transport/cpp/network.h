// Scenarios of the network between hosts: connections, chunks, and the threads that send.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "../../../csrc/transport/tcp_greeting.h"
#include "ranks.h"

namespace {

// Counts the chunks that arrive. Everything else must not happen, unless a scenario expects it.
struct ChunksOnly : WireCallbacks {
  int came = 0;
  void arrived(int, const Chunk&) override { ++came; }
  void announced(int, const Chunk&) override { require(false, "an announcement"); }
  void expected(int, const Chunk&) override { require(false, "an expectation"); }
  void credited(int, Word) override { require(false, "a credit"); }
  void aborted(int, const std::string& why) override { require(false, why); }
  void lost(int, const std::string& why) override { require(false, why); }
};

// The wires of some ranks over TCP, all connected to each other.
std::vector<std::unique_ptr<Wire>> connected_wires(int ranks) {
  std::vector<std::unique_ptr<Wire>> wires;
  std::map<int, WirePeer> addresses;
  for (int rank = 0; rank < ranks; ++rank)
    addresses[rank] = {wires.emplace_back(tcp_wire(rank, "127.0.0.1", "secret", 30))->address(), "secret"};
  on_ranks(ranks, [&](int rank) {
    std::map<int, WirePeer> others = addresses;
    others.erase(rank);
    wires[rank]->connect(others, after_seconds(20), [] {});
  });
  return wires;
}

// After an invalid chunk nothing more is read from that peer. Chunks of another peer still arrive.
void bad_chunk() {
  struct : ChunksOnly {
    std::byte memory[64];
    int asked = 0;
    std::byte* destination(int peer, const Chunk&) override {
      ++asked;
      if (peer == 1) throw std::runtime_error("no such place");
      return memory;
    }
  } callbacks;
  const auto wires = connected_wires(3);
  const auto receiver = wires[0]->receiver({1, 2});
  const auto receive = [&] { receiver->progress(callbacks, std::chrono::milliseconds(20)); };
  const Bytes data(64, 7);
  Chunk chunk{};
  chunk.bytes = data.size();
  const auto bad = wires[1]->sender({0}), good = wires[2]->sender({0});
  for (int i = 0; i < 3; ++i) bad->put(0, chunk, reinterpret_cast<const std::byte*>(data.data()));
  require(has(error_of(receive), "no such place"), "the invalid chunk must be refused");
  for (int i = 0; i < 3; ++i) receive();
  require(callbacks.asked == 1 && callbacks.came == 0, "nothing more may be read from that peer");
  good->put(0, chunk, reinterpret_cast<const std::byte*>(data.data()));
  for (int i = 0; i < 500 && callbacks.came == 0; ++i) receive();
  require(callbacks.came == 1, "the chunk of the other peer must arrive");
  require(std::memcmp(callbacks.memory, data.data(), data.size()) == 0, "its bytes must be right");
}

// Receives large transfers of one peer.
struct LargeChunks : ChunksOnly {
  static constexpr std::size_t bytes = 8 << 20;  // more than fits into the buffers of small_buffers()
  Bytes memory = Bytes(bytes);
  std::size_t next = 0, largest = 0;  // bytes of this transfer so far, and of the largest chunk
  Word credit = 0;
  std::function<void()> at_begin = [] {};  // called when the first bytes of a chunk have come
  std::byte* destination(int, const Chunk& chunk) override {
    at_begin();
    largest = std::max<std::size_t>(largest, chunk.bytes);
    const std::size_t start = next % bytes;
    require(start + chunk.bytes <= bytes, "a chunk must lie inside its transfer");
    next += chunk.bytes;
    return reinterpret_cast<std::byte*>(memory.data()) + start;
  }
  void credited(int, Word received) override { credit = received; }
  // Calls `turn` until chunk number `wanted` has arrived.
  void receive(int wanted, const std::function<void()>& turn) {
    for (int i = 0; came < wanted && i < 100'000; ++i) turn();
    require(came == wanted, "the chunk must arrive");
  }
  // Calls `turn` for much longer than a chunk takes.
  void must_not_arrive(const std::function<void()>& turn) {
    const int before = came;
    for (const auto end = after_seconds(0.3); Clock::now() < end;) turn();
    require(came == before, "the chunk must be held up");
  }
};

// Keeps the system from enlarging the buffers of the connections of a wire.
void small_buffers(const Wire& wire) {
  const int bytes = 64 << 10;
  for (const auto& [peer, socket] : dynamic_cast<const TcpConnections&>(wire).sockets())
    require(setsockopt(socket->file(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes) == 0, "setsockopt");
}

// A sender that is held leaves the rest of a chunk for later. Credits are not held up, unless they are behind that chunk.
void held_chunk() {
  LargeChunks callbacks;
  const auto wires = connected_wires(2);
  small_buffers(*wires[1]);
  const auto sender = wires[0]->sender({1});
  const auto receiver = wires[1]->receiver({0});
  const auto turn = [&] {
    sender->progress(callbacks, std::chrono::milliseconds(1));
    receiver->progress(callbacks, std::chrono::milliseconds(1));
  };
  const Bytes data(LargeChunks::bytes, 7);
  Chunk chunk{};
  chunk.bytes = data.size();
  const auto put = [&] { sender->put(1, chunk, reinterpret_cast<const std::byte*>(data.data())); };
  put();
  require(!sender->idle(1), "the chunk must be larger than the buffers of the socket");
  callbacks.receive(1, turn);
  sender->hold(true);
  sender->credit(1, 5);
  for (int i = 0; i < 1000 && callbacks.credit != 5; ++i) turn();
  require(callbacks.credit == 5, "a credit must not be held up");
  put();
  callbacks.must_not_arrive(turn);
  sender->hold(false);
  callbacks.receive(2, turn);
  require(callbacks.memory == data, "its bytes must be right");
}

// A queue whose peer is a bare wire, so that a scenario decides when the peer reads.
struct QueueWithBarePeer {
  std::shared_ptr<Device> device = host_device();
  Bytes data = Bytes(LargeChunks::bytes), nothing;
  LargeChunks callbacks;
  std::unique_ptr<Wire> wire = tcp_wire(1, "127.0.0.1", "secret", 30);
  std::unique_ptr<Queue> queue;
  std::unique_ptr<WireSender> sender;
  std::unique_ptr<WireReceiver> receiver;

  explicit QueueWithBarePeer(Settings settings) {
    settings.buffer_bytes = 6 * LargeChunks::bytes;
    settings.secret = "secret";
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7 + i / 4096);
    queue = std::make_unique<Queue>(device, 0, std::vector<std::string>{"host0", "host1"}, settings);
    const std::string own = queue->address(), key = "wire=";
    const std::size_t at = own.find(key) + key.size();
    const std::string own_wire = own.substr(at, own.find('\n', at) - at);
    const std::string theirs = own.substr(0, at) + wire->address() + "\n";
    on_ranks(2, [&](int rank) {
      if (rank == 0)
        queue->connect({own, theirs});
      else
        wire->connect({{0, {own_wire, "secret"}}}, after_seconds(20), [] {});
    });
    small_buffers(*wire);
    sender = wire->sender({0});
    receiver = wire->receiver({0});
  }
  auto send() { return queue->exchange("all_to_all", to_peer(1, 2, data), to_peer(1, 2, nothing), 0); }
  void turn() { receiver->progress(callbacks, std::chrono::milliseconds(1)); }
  void receive(int wanted) {
    callbacks.receive(wanted, [this] { turn(); });
  }
};

// The rest of a low-priority chunk waits while a high-priority queue of the same device sends, and is sent afterwards.
void held_queue() {
  Settings settings = small();
  settings.chunk_bytes = settings.tcp_chunk_bytes = LargeChunks::bytes;
  QueueWithBarePeer ranks(settings);
  auto exchange = ranks.send();
  ranks.receive(1);
  ranks.sender->credit(0, 1);
  exchange->wait(60);
  ranks.callbacks.at_begin = [&] { ranks.device->urgent_senders = 1; };
  exchange = ranks.send();
  for (int i = 0; ranks.device->urgent_senders == 0 && i < 100'000; ++i) ranks.turn();
  require(ranks.device->urgent_senders == 1, "the second chunk must begin to arrive");
  ranks.callbacks.must_not_arrive([&] { ranks.turn(); });
  ranks.device->urgent_senders = 0;
  ranks.receive(2);
  require(ranks.callbacks.memory == ranks.data, "its bytes must be right");
  ranks.sender->credit(0, 2);
  exchange->wait(60);
  ranks.queue->close(10);
}

// Over TCP a transfer is divided into smaller chunks than in the host's memory, and urgent ones into the smallest.
void chunks_over_tcp() {
  for (const bool high : {false, true}) {
    Settings settings = small(high);
    settings.chunk_bytes = LargeChunks::bytes;
    const std::size_t most = high ? settings.urgent_tcp_chunk_bytes : settings.tcp_chunk_bytes;
    require(most < settings.chunk_bytes, "the chunks must be smaller");
    QueueWithBarePeer ranks(settings);
    const auto exchange = ranks.send();
    const int count = static_cast<int>(LargeChunks::bytes / most);
    ranks.receive(count);
    require(ranks.callbacks.largest == most, "the chunks must have the size for TCP");
    require(ranks.callbacks.memory == ranks.data, "their bytes must be right");
    ranks.sender->credit(0, static_cast<Word>(count));
    exchange->wait(60);
    ranks.queue->close(10);
  }
}

// The threads of this process by number, which is the order of their start.
std::set<pid_t> threads_of_process() {
  std::set<pid_t> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    threads.insert(static_cast<pid_t>(std::stoi(entry.path().filename())));
  return threads;
}

// As long as it lives, another thread of the processor of `thread` has precedence.
class Slow {
 public:
  explicit Slow(pid_t thread) {
    cpu_set_t all, one;
    require(sched_getaffinity(0, sizeof all, &all) == 0, "sched_getaffinity");
    int cpu = 0;
    while (!CPU_ISSET(cpu, &all)) ++cpu;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    const sched_param none{};
    require(sched_setscheduler(thread, SCHED_IDLE, &none) == 0, "sched_setscheduler");
    require(sched_setaffinity(thread, sizeof one, &one) == 0, "sched_setaffinity");
    busy_ = std::thread([this, one] {
      sched_setaffinity(0, sizeof one, &one);
      while (!stop_) {
      }
    });
  }
  ~Slow() {
    stop_ = true;
    busy_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread busy_;
};

// A queue that is closed at once after a failure still tells its peer the reason, also if its sending thread is slow.
void failure_before_close() {
  for (int i = 0; i < 6; ++i) {
    struct : LargeChunks {
      std::string why;
      bool closed = false;
      void aborted(int, const std::string& reason) override { why = reason; }
      void lost(int, const std::string&) override { closed = true; }
    } callbacks;
    const auto before = threads_of_process();
    QueueWithBarePeer ranks(small());
    std::vector<pid_t> started;
    for (const pid_t thread : threads_of_process())
      if (!before.count(thread)) started.push_back(thread);
    require(started.size() == 5, "a queue has two streams, a sending and a receiving thread, and a watchdog");
    {
      Slow slow(started[2]);
      Bytes more(100), less(50);
      error_of([&] { ranks.queue->exchange("all_to_all", to_peer(0, 2, more), to_peer(0, 2, less), 0); });
      require(ranks.queue->failure().has_value(), "rank 0 must refuse an exchange with itself of two sizes");
      ranks.queue->close(5);
    }
    for (int turn = 0; turn < 1000 && !callbacks.closed; ++turn)
      ranks.receiver->progress(callbacks, std::chrono::milliseconds(10));
    require(has(callbacks.why, "sends 100 bytes to rank 0, which expects 50"), "the peer heard: " + callbacks.why);
  }
}

// A listener that has no descriptor left says so at once, with what to do. A stranger waits to be accepted.
void no_descriptors() {
  const auto wire = tcp_wire(0, "127.0.0.1", "secret", 30);
  const std::string address = wire->address();
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.find(' ') + 1))));
  const Socket stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(::connect(stranger.file(), reinterpret_cast<sockaddr*>(&to), sizeof to) == 0, "the stranger must connect");
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = 3;  // 0, 1 and 2 are open; descriptors that are open stay open
  setrlimit(RLIMIT_NOFILE, &none);
  const std::string error = error_of([&] { wire->connect({{1, {"", "secret"}}}, after_seconds(5), [] {}); });
  setrlimit(RLIMIT_NOFILE, &before);
  require(has(error, "ulimit -n"), error);
}

// Random bytes from a stranger never end the listener, and the rank that comes after them is accepted.
void strangers() {
  const auto wire = tcp_wire(0, "127.0.0.1", "secret", 30);
  const std::string address = wire->address();
  std::atomic<bool> stop{false};
  std::thread noise([&] {
    std::mt19937 random(11);
    std::vector<Socket> open;
    for (int i = 0; i < 200 && !stop; ++i) {
      ResolvedAddress to("127.0.0.1", address.substr(10, address.rfind(' ') - 10), 0);
      Socket stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (::connect(stranger.file(), to.first->ai_addr, to.first->ai_addrlen) != 0) break;
      Hello hello{random() % 2 ? tcp_magic : static_cast<Word>(random()), static_cast<std::int32_t>(random() % 4), {}};
      std::string bytes(reinterpret_cast<const char*>(&hello), sizeof hello);
      for (unsigned n = random() % 200; n > 0; --n) bytes += static_cast<char>(random());
      bytes.resize(random() % bytes.size());
      (void)!::send(stranger.file(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (random() % 2) open.push_back(std::move(stranger));
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::thread peer([&] { tcp_wire(1, "127.0.0.1", "secret", 30)->connect({{0, {address, "secret"}}}, after_seconds(20), [] {}); });
  const std::string error = error_of([&] { wire->connect({{1, {"", "secret"}}}, after_seconds(20), [] {}); });
  stop = true;
  peer.join();
  noise.join();
  require(error.empty(), error);
  const auto impostor = tcp_wire(0, "127.0.0.1", "another secret", 30);
  const auto caller = tcp_wire(1, "127.0.0.1", "secret", 30);
  std::thread listens([&] { error_of([&] { impostor->connect({{1, {"", ""}}}, after_seconds(1), [] {}); }); });
  const std::string refused =
      error_of([&] { caller->connect({{0, {impostor->address(), "secret"}}}, after_seconds(20), [] {}); });
  listens.join();
  require(has(refused, "does not prove that it is rank 0"), refused);
}

}  // namespace
