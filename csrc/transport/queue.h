// Exchanges between the ranks of one group, moved by the streams of a device through host memory.
//
//   sender's stream      wait until the slot is free | copy to host | sent += 1
//   receiver's stream    wait for sent | copy from host | received += 1
//
// Between ranks of one host the words and the ring lie in shared memory and no thread takes part. Between hosts, each
// rank's pumps carry chunks and counters over a wire; the streams see no difference.
//
// No deadlock. Number the operations of an exchange by (exchange, round, distance, out before in), where in a round
// each rank sends one chunk to, and takes one chunk from, every peer, nearest first. Each operation waits only for
// operations with a smaller number: those before it in its own stream, the matching send (out before in), and the
// receiver's freeing of the slot (an earlier round). Every rank issues them in this order, so the smallest unfinished
// one can always run, even if the device ran all streams as one queue. (A high-priority queue issues several rounds of
// sends before the matching takes, at most half of its shortest ring: each wait still goes back by at least as much.)
// The callers must issue exchanges in the same order on every rank.
//
// Priority. Before each of its chunks a low-priority queue waits for the gates of the device. A high-priority queue
// closes its gate only around copies that have nothing left to wait for, so a closed gate always opens again.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "lane.h"
#include "segment.h"
#include "wire.h"

namespace freescale::transport {

inline Clock::time_point after_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

struct Settings {
  bool high = false;                       // priority class
  std::size_t chunk_bytes = 8 << 20;       // largest chunk
  std::size_t buffer_bytes = 256 << 20;    // bound of the rings a rank sends from
  double timeout = 1800;                   // seconds an exchange may take
  std::string bind_to = "127.0.0.1";       // address peers on other hosts connect to
  std::size_t network_threads = 2;         // for either direction, at most; no more than there are peers on other hosts
  bool early_flag = false;                 // a fault, for tests: chunks are announced before they are copied
  Word first_chunk = 0;                    // for tests: where the counters start, say shortly before they wrap
};

struct Part {
  Address address = 0;
  std::size_t bytes = 0;
};

struct Report {
  std::size_t pinned_bytes = 0;       // of host memory, by this rank
  std::size_t ring_bytes = 0;         // of the rings this rank sends from, so far
  std::size_t ring_bound_bytes = 0;   // and at most
  std::uint64_t exchanges = 0, sent_bytes = 0, received_bytes = 0;
};

// Why the queue has failed; shared with its exchanges, which may outlive it.
class Verdict {
 public:
  bool give(const std::string& why);  // false when there is one already
  bool given() const { return given_.load(std::memory_order_acquire); }
  std::string why() const;
  void check() const;  // throws when given

 private:
  mutable std::mutex mutex_;
  std::string why_;
  std::atomic<bool> given_{false};
};

// One collective on its way.
class Exchange {
 public:
  // All three throw what the queue failed with.
  bool done();
  void hold(Handle caller);     // the caller's stream waits for it; the host does not
  void block(double seconds);   // the host waits for it; when it throws, the tensors are no longer touched
  const std::string& name() const { return name_; }

 private:
  friend class Queue;
  void run_out();
  struct Side {
    std::vector<std::size_t> bytes;  // per rank
    std::vector<std::optional<Word>> last;  // where the counter of chunks is after the last of them; none: no chunks
    std::shared_ptr<Mark> mark;
  };
  std::string name_;  // as in "all_to_all #17"
  Side out_, in_;
  std::vector<std::optional<Word>> room_;  // per rank: what it must have taken before our last chunk has a slot
  std::shared_ptr<const Verdict> verdict_;
};

class Queue {
 public:
  // `hosts` names the host of every rank; ranks with equal names share memory.
  Queue(std::shared_ptr<Device> device, int rank, std::vector<std::string> hosts, Settings settings);
  ~Queue();

  // Set-up, in three steps with a meeting of all ranks after each: every rank tells its address, connects to all
  // addresses, and removes the name of its segment.
  std::string address() const;
  void connect(const std::vector<std::string>& addresses);
  void seal();

  // `out[i]` goes to rank i, `in[i]` comes from rank i. Starts when what `caller` holds now is done. Returns at once.
  std::shared_ptr<Exchange> exchange(const std::string& kind, const std::vector<Part>& out,
                                     const std::vector<Part>& in, Handle caller);

  std::optional<std::string> failure() const;
  Report report() const;
  std::pair<Handle, Handle> streams() const { return {out_->handle(), in_->handle()}; }

  // Waits until everything issued is done, at most `seconds`, and ends. Throws if something was not done.
  void close(double seconds);

 private:
  struct Lane {  // this rank and one peer; also itself
    bool remote = false;
    Segment* peer = nullptr;  // on the same host
    Layout view;              // of the peer's segment
    Ring out, in;
    std::byte *out_ring = nullptr, *in_ring = nullptr;
    std::optional<std::size_t> out_level, in_level;  // places that are committed and pinned
    Word *sent = nullptr, *received = nullptr;       // written by our streams
    Word *freed = nullptr, *arrived = nullptr;       // awaited by our streams
    Ledger *ours = nullptr, *theirs = nullptr;
    Word freed_release = 0, arrived_release = 0;     // after a failure: values that let every wait pass
    // Of a remote peer:
    std::unique_ptr<Ledger> told;
    std::deque<Chunk> pending;        // guarded by pending_mutex_
    std::optional<std::string> lost;  // guarded by pending_mutex_
    Word posted = 0, credited = 0;    // of the thread that sends to it
    Word landed = 0;                  // of the thread that receives from it
    std::size_t committed = 0;        // bytes from the start of its ring, likewise
  };
  struct Pump {  // two threads, and the remote peers they serve
    std::vector<int> peers;
    std::unique_ptr<Sender> sender;
    std::unique_ptr<WireEnd> receiver;
    bool urgent = false;  // of the thread that sends: counted in the device's `urgent`
    std::thread sends, receives;
  };
  using Pieces = std::vector<std::vector<Ring::Slot>>;  // per rank
  class Events;

  int world() const { return static_cast<int>(hosts_.size()); }
  void agree(const std::vector<std::string>& addresses);
  void open_lane(int peer, const std::string& segment);

  void place_ring(Lane& lane, int peer, bool out);
  void pin(std::byte* memory, std::size_t bytes);
  void claim(const Exchange& exchange, Word number, Word kind);
  std::optional<std::string> disagreement(int peer, Word number) const;
  void enqueue(const std::vector<Part>& out, const std::vector<Part>& in, const Pieces& sends, const Pieces& takes);
  void await_slot(const Lane& lane, const Ring::Slot& slot);
  void send_rounds(const std::vector<Part>& out, const Pieces& sends, std::size_t first, std::size_t last);
  void take_rounds(const std::vector<Part>& in, const Pieces& takes, std::size_t first, std::size_t last);
  bool through(const Exchange& exchange) const;
  bool finished_streams();
  bool delivered() const;

  // watch.cpp: off the path of the data
  void watch();
  void look_after(const Exchange& exchange, double seconds);
  std::optional<std::string> gone(int peer);
  void fail(const std::string& why);
  void release_waits();

  // pump.cpp: between hosts
  void start_pumps();
  void stop_pumps();
  void wake_senders();
  bool put_ready(Pump& pump);
  void send_chunks(Pump& pump);
  void receive_chunks(WireEnd& receiver);

  const int rank_;
  const std::vector<std::string> hosts_;
  const Settings settings_;
  const std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> out_, in_;
  std::optional<Gate> gate_;
  std::unique_ptr<Wire> wire_;

  Segment own_;
  std::size_t ring_capacity_ = 0;
  Layout layout_;
  std::vector<std::unique_ptr<Segment>> peers_;
  std::vector<Lane> lanes_;
  std::vector<std::byte*> pinned_;

  mutable std::mutex mutex_;  // held while an exchange is issued
  std::uint64_t exchanges_ = 0;
  Report report_;
  const std::shared_ptr<Verdict> verdict_ = std::make_shared<Verdict>();

  std::mutex fail_mutex_;
  std::mutex watch_mutex_;  // guards the four below; never held in a call of the driver
  std::deque<std::shared_ptr<Exchange>> outstanding_;
  std::vector<std::shared_ptr<Exchange>> finished_;  // until the next is issued: to free one is a call of the driver
  Clock::time_point oldest_since_;  // when the first of them became the oldest
  bool stop_ = false;
  std::condition_variable watch_wakes_;
  mutable std::mutex pending_mutex_;
  std::atomic<bool> stop_sending_{false}, stop_receiving_{false};
  std::vector<std::unique_ptr<Pump>> pumps_;
  std::unique_ptr<std::thread> watch_;
  bool connected_ = false, closed_ = false;
};

}  // namespace freescale::transport
