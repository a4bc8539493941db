// The queue of one group on one device: it moves exchanges between the ranks, by streams of the device and through host
// memory. For each chunk, the streams do this:
//
//   sender's stream      wait until the slot is free | copy to the ring | sent += 1
//   receiver's stream    wait for sent | copy from the ring | received += 1
//
// Between ranks of one host the counters and rings lie in shared memory, and no host thread moves data. The rings may
// instead lie in the memory of the receiving device (device_rings.h). Between hosts, the network threads of each rank
// carry chunks and counters; for the streams nothing changes.
//
// Why there is no deadlock. Number the operations of an exchange by (exchange, round, distance, send before receive).
// In a round each rank sends one chunk to every peer and receives one chunk from every peer, nearest peer first. Each
// operation waits only for operations with a smaller number: those before it in its own stream, the matching send (send
// before receive), and the receiver's release of the slot (an earlier round). Every rank issues them in this order, so
// the smallest unfinished one can always run, even if the device ran all streams as one hardware queue. (A
// high-priority queue issues several rounds of sends before the matching receives, at most as many as half of the slots
// of its shortest ring, and each wait for a slot still goes back by at least as many rounds.) The callers must issue
// exchanges in the same order on every rank.
//
// Priority. A low-priority queue waits for the gates of the device before each of its chunks. A high-priority queue
// closes its gate only around copies that have nothing left to wait for, so a closed gate always opens again.
//
// Failure. A rank that fails tells all others, and every rank stops to issue exchanges. What both ranks of a pair have
// issued still completes, by the rules above and with the right bytes. Then each rank knows which chunks it waits for
// will never come (watchdog.cpp). It fills the ring with bytes of ones, which are NaN as numbers, and ends those waits. So
// work that was queued behind an exchange sees either the right bytes or NaN, and never old bytes of the ring. A peer on
// this host that does not answer for 10 s is not waited for any longer. If it was only stopped and goes on later, it may
// read other bytes in the last chunk before it learns of the failure.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "device_rings.h"
#include "ring.h"
#include "segment.h"
#include "segment_layout.h"
#include "wire.h"

namespace freescale::transport {

inline Clock::time_point after_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

struct Settings {
  bool high_priority = false;
  std::size_t chunk_bytes = 8 << 20;     // largest chunk
  std::size_t tcp_chunk_bytes = 2 << 20;           // largest chunk over TCP, if `chunk_bytes` is larger,
  std::size_t urgent_tcp_chunk_bytes = 512 << 10;  // and that of a high-priority queue
  std::size_t buffer_bytes = 256 << 20;  // most bytes of the rings that a rank sends from
  double timeout = 1800;                 // seconds that an exchange may take
  std::string bind_to = "127.0.0.1";     // the address at which peers on other hosts connect to this rank
  std::string secret = "";               // that ranks on several hosts share; without it they must be on one machine
  std::size_t network_threads = 4;       // most threads per direction; never more than there are peers on other hosts
  bool device_rings = false;             // try to put the rings between ranks of one host into device memory
  std::string nixl_library = "";         // the path of NIXL, which moves chunks between hosts; empty: TCP moves them
  bool early_flag = false;               // a fault for tests: announce chunks before they are copied
  Word first_chunk = 0;                  // for tests: the first value of the counters, e.g. shortly before they wrap
};

// The memory that goes to one rank, or comes from one rank.
struct Buffer {
  Address address = 0;
  std::size_t bytes = 0;
};

struct Report {
  std::size_t pinned_bytes = 0;      // host memory that this rank has pinned
  std::size_t ring_bytes = 0;        // memory of the rings that this rank sends from, so far
  std::size_t ring_bound_bytes = 0;  // the most that it can become
  std::size_t device_bytes = 0;      // device memory of the rings that this rank receives into
  std::uint64_t exchanges = 0, sent_bytes = 0, received_bytes = 0;
};

// Why a queue has failed, once it has. The queue shares it with its exchanges, which may outlive the queue.
class Failure {
 public:
  bool set(const std::string& reason);  // keeps the first reason; returns false if there was one already
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }
  std::string reason() const;
  void throw_if_set() const;

 private:
  mutable std::mutex mutex_;
  std::string reason_;
  std::atomic<bool> is_set_{false};
};

// One collective that has been issued.
class Exchange {
 public:
  // All three throw the reason if the queue has failed.
  bool done();
  void block_stream(StreamHandle caller);  // makes the caller's stream wait for it; the host does not wait
  void wait(double seconds);  // makes the host wait; when it throws a failure, the tensors are no longer accessed
  const std::string& name() const { return name_; }

 private:
  friend class Queue;
  void drain();
  struct Side {
    std::vector<std::size_t> bytes;         // per rank
    std::vector<std::optional<Word>> last;  // per rank: value of the counter after the last chunk; none without chunks
    std::shared_ptr<Event> event;           // at the end of the stream's part of the exchange
  };
  std::string name_;  // for example "all_to_all #17"
  Word number_ = 0;
  Side out_, in_;
  std::vector<std::optional<Word>> slot_free_at_;  // per rank: when its counter reaches this, our last chunk has a slot
  std::shared_ptr<const Failure> failure_;
};

class Queue {
 public:
  // `hosts` names the host of every rank. Ranks with equal names share memory.
  Queue(std::shared_ptr<Device> device, int rank, std::vector<std::string> hosts, Settings settings);
  ~Queue();

  // The set-up has three steps. All ranks must finish a step before any rank starts the next: each rank publishes its
  // address, connects to the addresses of all ranks, and unlinks its segment. With `device_rings` there is a step before
  // the second one: each rank maps the rings of its host. If one of them cannot, all ranks of the host drop the rings.
  std::string address() const;
  std::string map_device_rings(const std::vector<std::string>& addresses);  // returns why it cannot; empty if it can
  void drop_device_rings();  // the rings lie in shared memory then
  // `check` is called several times a second while this rank waits for others; what it throws ends the set-up.
  void connect(const std::vector<std::string>& addresses, const std::function<void()>& check = [] {});
  void unlink_segment();

  // Sends `out[i]` to rank i and receives `in[i]` from rank i. Returns at once. The exchange starts when the work that
  // the stream `caller` holds now is done.
  std::shared_ptr<Exchange> exchange(const std::string& kind, const std::vector<Buffer>& out,
                                     const std::vector<Buffer>& in, StreamHandle caller);

  std::optional<std::string> failure() const;
  Report report() const;
  std::pair<StreamHandle, StreamHandle> streams() const { return {out_->handle(), in_->handle()}; }

  // Waits until every exchange is done, at most `seconds`, and frees everything. An exchange that is not done by then
  // makes the queue fail. A second call waits for the first.
  void close(double seconds);

 private:
  // The connection of this rank to one peer, or to itself.
  struct Channel {
    bool remote = false;      // the peer is on another host
    Segment* peer = nullptr;  // the peer's segment, if it is on the same host
    SegmentLayout view;       // of the peer's segment
    Ring out, in;
    std::byte *out_ring = nullptr, *in_ring = nullptr;  // rings in host memory
    Address out_device = 0, in_device = 0;              // rings in device memory; 0 if they are in host memory
    std::optional<std::size_t> out_level, in_level;  // levels of the rings whose memory is committed and pinned
    bool pinned = false;                             // both rings, in whole, since set-up
    Word *sent = nullptr, *received = nullptr;       // our streams write these
    Word *freed = nullptr, *arrived = nullptr;       // our streams wait for these
    Announcements *ours = nullptr, *theirs = nullptr;
    Word issued_out = 0, issued_in = 0;           // values of `sent` and `received` after the chunks on our streams
    std::optional<Word> freed_release, arrived_release;  // after a failure: values that end every wait
    // Only for a peer on another host:
    std::unique_ptr<Announcements> their_announcements;  // built from the chunks that arrive
    std::deque<Chunk> pending;        // guarded by pending_mutex_
    std::deque<Chunk> notices;        // exchanges without bytes for the peer; guarded by pending_mutex_
    std::deque<Chunk> expectations;   // what the peer has to be told; guarded by pending_mutex_
    Word last_heard = 0;              // the number after the latest exchange that the peer has announced
    std::optional<std::string> lost;  // guarded by pending_mutex_
    Word posted = 0, credited = 0;    // only the thread that sends to the peer uses these
    Word next_arrival = 0;            // only the thread that receives from the peer uses this
  };
  // Two threads that serve some of the peers on other hosts.
  struct NetworkThreads {
    std::vector<int> peers;
    std::unique_ptr<WireSender> sender;
    std::unique_ptr<WireReceiver> receiver;
    std::atomic<bool> sleeps{false};  // the sending thread has nothing to look for, until it is woken
    std::size_t turn = 0;             // the peer that the sending thread serves first
    bool urgent = false;  // whether the device's `urgent_senders` counts the sending thread, which alone uses this
    std::thread send_thread, receive_thread;
  };
  using SlotsByRank = std::vector<std::vector<Ring::Slot>>;
  struct ChunkOfRound {
    int peer;
    std::size_t round;
  };
  // Chunks on a stream that may not be done, in order: the counter that shows it, and its value then.
  using ChunksInFlight = std::deque<std::pair<const Word*, Word>>;
  class Callbacks;

  // queue.cpp: set-up and end
  void open_wire();
  int world() const { return static_cast<int>(hosts_.size()); }
  std::size_t largest_chunk(int peer) const;
  void agree_on_ring_size(const std::vector<std::string>& addresses);
  void reserve_memory();
  void open_channel(int peer, const std::string& segment);
  void close_device_rings();
  void pin(std::byte* memory, std::size_t bytes);
  bool streams_idle();
  bool all_delivered() const;

  // exchange.cpp: issue an exchange
  void prepare_ring(Channel& channel, int peer, bool out);
  void announce(const Exchange& exchange, Word number, Word kind);
  std::optional<std::string> mismatch(int peer, Word number) const;
  void enqueue(const std::vector<Buffer>& out, const std::vector<Buffer>& in, const SlotsByRank& sends,
               const SlotsByRank& receives);
  void wait_for_room(ChunksInFlight& chunks, std::size_t more);
  void wait_for_slot(const Channel& channel, const Ring::Slot& slot);
  std::vector<ChunkOfRound> in_order(const SlotsByRank& slots, std::size_t first, std::size_t last, bool out) const;
  void send(const std::vector<Buffer>& out, const SlotsByRank& sends, const ChunkOfRound* first, std::size_t count);
  void receive(const std::vector<Buffer>& in, const SlotsByRank& receives, const ChunkOfRound* first,
               std::size_t count);

  // watchdog.cpp: detect timeouts and dead peers
  void run_watchdog();
  bool has_completed(const Exchange& exchange) const;
  void check_peers();
  void check_exchange(const Exchange& exchange, double seconds);
  std::optional<std::string> why_gone(int peer);
  static std::optional<std::string> why_gone(const Header& header, double silence);  // without the name of the rank
  void fail(const std::string& why);
  // After a failure: end the waits of our streams.
  void publish_final_counters();
  bool nothing_more_arrives(int peer);
  bool nothing_more_is_read(int peer);
  bool network_threads_have_stopped() const { return stopped_threads_ == 2 * network_.size(); }
  void release_waits();

  // network_threads.cpp: move chunks and counters between hosts
  void start_network_threads();
  void stop_network_threads();
  void wake_network_threads();
  void wake_sender_of(int peer);
  struct SendState {
    bool progress = false;  // something was sent
    bool waits = false;     // the device has work that will have to be sent
  };
  SendState send_ready(NetworkThreads& threads);
  bool post_next_chunk(NetworkThreads& threads, int peer);
  bool send_notices(NetworkThreads& threads, int peer);
  bool send_expectations(NetworkThreads& threads, int peer);
  void send_chunks(NetworkThreads& threads);
  void receive_chunks(NetworkThreads& threads);

  const int rank_;
  const std::vector<std::string> hosts_;
  const Settings settings_;
  const std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> out_, in_;
  std::optional<Gate> gate_;
  std::unique_ptr<Wire> wire_;
  std::unique_ptr<DeviceRings> device_rings_;   // empty if all rings are in host memory
  std::unique_ptr<DeviceRings> dropped_rings_;  // not used, but other ranks may still have them mapped
  std::string ring_problem_;                    // why there are no device rings, although they are wanted

  Segment own_segment_;
  std::size_t ring_capacity_ = 0;
  SegmentLayout layout_;  // of our own segment
  std::vector<std::shared_ptr<Segment>> peer_segments_;  // rings that are left behind need them after us
  std::vector<Channel> channels_;
  std::vector<std::byte*> pinned_;

  std::mutex close_mutex_;    // held while the queue is closed; taken before all others
  mutable std::mutex mutex_;  // held while an exchange is issued
  std::uint64_t exchanges_ = 0;
  ChunksInFlight out_flight_, in_flight_;
  Report report_;
  const std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();

  std::mutex fail_mutex_;
  std::atomic<Clock::rep> failed_at_{0};
  std::mutex watchdog_mutex_;  // guards the four members below; never held during a call of the driver
  std::deque<std::shared_ptr<Exchange>> outstanding_;
  std::vector<std::shared_ptr<Exchange>> finished_;  // kept until the next exchange: freeing one calls the driver
  Clock::time_point oldest_since_;                   // when the first of `outstanding_` became the oldest
  bool stop_ = false;
  std::condition_variable watchdog_wakes_;
  mutable std::mutex pending_mutex_;
  std::atomic<bool> stop_sending_{false}, stop_receiving_{false};
  std::atomic<std::size_t> stopped_threads_{0};  // network threads that no longer use the rings, after a failure
  std::vector<std::unique_ptr<NetworkThreads>> network_;
  std::unique_ptr<std::thread> watchdog_;
  bool connected_ = false, closed_ = false;
};

}  // namespace freescale::transport
