// The network over NIXL, which uses RDMA where there is a device for it. The sender writes each chunk directly into the
// ring of the peer, and when the chunk is there, its number into the peer's counter, for which the peer's stream waits. No
// thread of the peer takes part. The TCP connection of the two ranks carries announcements, credits and failures. Each rank
// also says there which exchanges it has issued and what it expects, and the sender writes the counter only after it has
// seen that this fits. So ranks that disagree find it out before bytes are used, as over plain TCP. Peers that have not
// proved to know the secret never learn where the rings are.
//
// After a failure of the receiver, a chunk that was on its way may still land in a ring that was filled with ones. Its slot
// was free for it, so it replaces ones, and never a chunk that is still needed.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "nixl_library.h"
#include "tcp.h"

namespace freescale::transport {
namespace {

using nixl::check;
using nixl::host_memory;

// The agent of one rank. NIXL is not asked to lock, so this class does.
class NixlAgent {
 public:
  NixlAgent(const std::string& library, int rank) : api_(library), name_("rank" + std::to_string(rank)) {
    const nixl::AgentConfig config{false, false, 0, 0, 1, 0, 0, false};
    check(api_.create_configured_agent(name_.c_str(), &config, &agent_), "creating an agent");
    nixl::MemoryKinds kinds;
    nixl::Parameters parameters;
    check(api_.get_plugin_params(agent_, "UCX", &kinds, &parameters), "looking for its UCX plugin");
    const int started = api_.create_backend(agent_, "UCX", parameters, &backend_);
    api_.destroy_mem_list(kinds);
    api_.destroy_params(parameters);
    if (started != nixl::success) {
      api_.destroy_agent(agent_);
      const char* kinds_of_network = std::getenv("UCX_TLS");
      throw std::runtime_error("NIXL cannot start (status " + std::to_string(started) + ", UCX_TLS=" +
                               (kinds_of_network ? kinds_of_network : "") +
                               "): UCX finds no network that it may use, or UCX_TLS leaves out cuda_copy on a machine with "
                               "a GPU. NIXL has printed which. Without an RDMA device set FREESCALE_NETWORK=tcp, or "
                               "transport='nccl'");
    }
    check(api_.create_opt_args(&arguments_), "creating arguments");
    check(api_.opt_args_add_backend(arguments_, backend_), "creating arguments");
    check(api_.create_notif_map(&messages_), "creating a list of messages");
  }

  ~NixlAgent() {
    for (const auto& [peer, name] : peers_) api_.invalidate_remote_md(agent_, name.c_str());
    for (const auto list : registered_) {
      api_.deregister_mem(agent_, list, arguments_);
      api_.destroy_reg_dlist(list);
    }
    api_.destroy_notif_map(messages_);
    api_.destroy_opt_args(arguments_);
    api_.destroy_backend(backend_);
    api_.destroy_agent(agent_);
  }
  NixlAgent(const NixlAgent&) = delete;
  NixlAgent& operator=(const NixlAgent&) = delete;

  void register_memory(std::byte* memory, std::size_t bytes) {
    nixl::MemoryList list;
    check(api_.create_reg_dlist(host_memory, &list), "making a list");
    registered_.push_back(list);
    check(api_.reg_dlist_add_desc(list, reinterpret_cast<std::uintptr_t>(memory), bytes, 0, nullptr, 0), "making a list");
    check(api_.register_mem(agent_, list, arguments_), "registering the rings");
  }

  // What other agents need to write into the memory that is registered.
  std::string description() {
    void* text;
    std::size_t bytes;
    check(api_.get_local_md(agent_, &text, &bytes), "describing the rings");
    const std::string description(static_cast<const char*>(text), bytes);
    std::free(text);
    return description;
  }

  void add_peer(int peer, const std::string& description) {
    char* name;
    check(api_.load_remote_md(agent_, description.data(), description.size(), &name), "reading the rings of a peer");
    peers_[peer] = name;
    std::free(name);
    check(api_.agent_make_connection(agent_, peers_[peer].c_str(), arguments_), "connecting");
  }

  nixl::Request write(int peer, const std::byte* from, std::uintptr_t to, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    nixl::TransferList local, remote;
    check(api_.create_xfer_dlist(host_memory, &local), "making a list");
    check(api_.create_xfer_dlist(host_memory, &remote), "making a list");
    check(api_.xfer_dlist_add_desc(local, reinterpret_cast<std::uintptr_t>(from), bytes, 0), "making a list");
    check(api_.xfer_dlist_add_desc(remote, to, bytes, 0), "making a list");
    nixl::Request request = nullptr;
    const int made = api_.create_xfer_req(agent_, nixl::write_operation, local, remote, peers_.at(peer).c_str(),
                                          &request, arguments_);
    api_.destroy_xfer_dlist(local);
    api_.destroy_xfer_dlist(remote);
    check(made, "preparing a write");
    if (const int status = api_.post_xfer_req(agent_, request, arguments_); status < 0) {
      forget(request);
      check(status, "a write");
    }
    return request;
  }

  // Also lets NIXL move what it has to move.
  int status(nixl::Request request) {
    std::lock_guard lock(mutex_);
    return api_.get_xfer_status(agent_, request);
  }
  void release(nixl::Request request) {
    std::lock_guard lock(mutex_);
    forget(request);
  }
  // Where UCX does not have RDMA, it writes by messages, which the receiver must help to receive.
  void help() {
    std::lock_guard lock(mutex_);
    check(api_.get_notifs(agent_, messages_, arguments_), "receiving");
  }

 private:
  void forget(nixl::Request request) {
    api_.release_xfer_req(agent_, request);
    api_.destroy_xfer_req(request);
  }

  const nixl::Library api_;
  const std::string name_;
  std::mutex mutex_;
  nixl::Agent agent_ = nullptr;
  nixl::Backend backend_ = nullptr;
  nixl::Arguments arguments_ = nullptr;
  nixl::Messages messages_ = nullptr;
  std::vector<nixl::MemoryList> registered_;
  std::map<int, std::string> peers_;
};

// Where our chunks and their counter go, in the memory of a peer.
struct RemoteRing {
  std::uintptr_t ring = 0, arrived = 0;
};
struct alignas(64) CounterSource {  // from which the counter of a peer is written
  Word value = 0;
};
struct Link {
  RemoteRing ours, theirs;
  std::unique_ptr<CounterSource> source = std::make_unique<CounterSource>();
};
using Links = std::map<int, Link>;  // by peer

class NixlSender : public WireSender {
 public:
  NixlSender(NixlAgent& agent, std::unique_ptr<TcpFrames> frames, Links& links, const std::vector<int>& peers)
      : agent_(agent), frames_(std::move(frames)), links_(links) {
    for (const int peer : peers) outgoing_[peer];
  }
  ~NixlSender() override {
    for (auto& [peer, outgoing] : outgoing_) release(outgoing);
  }

  bool idle(int peer) const override { return outgoing_.at(peer).writes.empty() && frames_->idle(peer); }
  bool ready(int peer) const override { return outgoing_.at(peer).writes.size() < most_writes; }

  void put(int peer, const Chunk& chunk, const std::byte* data) override {
    if (outgoing_.at(peer).lost) return;
    guarded(peer, [&] {
      const auto request = agent_.write(peer, data, links_.at(peer).theirs.ring + chunk.offset, chunk.bytes);
      outgoing_.at(peer).writes.push_back({chunk, request, {}});
    });
  }
  void announce(int peer, const Chunk& chunk) override {
    // An announcement must not overtake the chunks of earlier exchanges.
    auto& writes = outgoing_.at(peer).writes;
    if (writes.empty())
      frames_->announce(peer, chunk);
    else
      writes.back().notices.push_back(chunk);
  }
  bool needs_expectations() const override { return true; }
  void expect(int peer, const Chunk& chunk) override { frames_->expect(peer, chunk); }
  void permit(int peer, Word exchange) override {
    const auto outgoing = outgoing_.find(peer);
    if (outgoing == outgoing_.end()) return;  // another sender serves it
    outgoing->second.permitted = exchange;
    wake();
  }
  void credit(int peer, Word received) override { frames_->credit(peer, received); }

  void abort(const std::string& why) override {
    // A write reads from our ring, which our streams may soon overwrite. So all writes end first. A write that does not
    // end in time goes to a peer that cannot be reached, or that fails, too.
    const auto deadline = Clock::now() + longest_end;
    const auto ended = [this](auto& entry) {
      const Outgoing& outgoing = entry.second;
      const auto moves = [this](nixl::Request request) { return request && agent_.status(request) == nixl::in_progress; };
      return !moves(outgoing.counter) && std::none_of(outgoing.writes.begin(), outgoing.writes.end(),
                                                      [&](const Write& write) { return moves(write.request); });
    };
    while (!std::all_of(outgoing_.begin(), outgoing_.end(), ended) && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    for (auto& [peer, outgoing] : outgoing_) release(outgoing);
    frames_->abort(why);
  }

  void progress(WireCallbacks& callbacks, std::chrono::microseconds patience) override {
    const auto deadline = Clock::now() + patience;
    while (true) {
      bool moved = false, waits = false;
      for (auto& [peer, outgoing] : outgoing_) {
        guarded(peer, [&, peer = peer, &outgoing = outgoing] { moved |= deliver(peer, outgoing); });
        if (outgoing.lost && !outgoing.reported) {
          outgoing.reported = true;
          release(outgoing);
          frames_->close(peer);
          callbacks.lost(peer, *outgoing.lost);
        }
        waits |= !outgoing.writes.empty();
      }
      const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
      const auto slice = moved ? std::chrono::microseconds(0) : waits ? std::min(left, look_interval) : left;
      frames_->progress(callbacks, std::max(slice, std::chrono::microseconds(0)));
      if (moved || woken_.exchange(false) || Clock::now() >= deadline) return;
    }
  }

  void wake() override {
    woken_ = true;
    frames_->wake();
  }

 private:
  static constexpr std::size_t most_writes = 8;  // to one peer at a time
  static constexpr std::chrono::microseconds look_interval{50};
  static constexpr std::chrono::seconds longest_end{2};
  struct Write {
    Chunk chunk;
    nixl::Request request;       // null when the chunk is there
    std::vector<Chunk> notices;  // exchanges without bytes that come after it
  };
  struct Outgoing {                  // to one peer
    std::deque<Write> writes;        // chunks, in order
    nixl::Request counter = nullptr;  // the write of the counter, if one is on its way
    std::size_t counted = 0;         // chunks that this write of the counter covers
    std::atomic<Word> permitted{0};  // the peer has issued all exchanges before this one
    std::optional<std::string> lost;
    bool reported = false;
  };

  template <typename Body>
  void guarded(int peer, Body body) {
    try {
      body();
    } catch (const std::exception& error) {
      if (!outgoing_.at(peer).lost) outgoing_.at(peer).lost = error.what();
    }
  }

  // Whether a write is done; throws if it has failed.
  bool finished(nixl::Request& request) {
    const int status = agent_.status(request);
    if (status == nixl::in_progress) return false;
    agent_.release(std::exchange(request, nullptr));
    check(status, "a write");
    return true;
  }

  // Writes the counter of the peer, and says which chunks are there when it is written. Returns whether something was done.
  bool deliver(int peer, Outgoing& outgoing) {
    if (outgoing.counter) {
      if (!finished(outgoing.counter)) return false;
      for (; outgoing.counted > 0; --outgoing.counted, outgoing.writes.pop_front()) {
        frames_->delivered(peer, outgoing.writes.front().chunk);
        for (const Chunk& notice : outgoing.writes.front().notices) frames_->announce(peer, notice);
      }
    }
    // One write of the counter covers all chunks that are there by now, up to the first one that is not.
    Word count = 0;
    for (Write& write : outgoing.writes) {
      if (write.request && !finished(write.request)) break;
      if (!reached(outgoing.permitted, write.chunk.exchange + 1)) break;
      count = write.chunk.number + 1;
      ++outgoing.counted;
    }
    if (outgoing.counted == 0) return false;
    Link& link = links_.at(peer);
    link.source->value = count;
    outgoing.counter = agent_.write(peer, reinterpret_cast<const std::byte*>(&link.source->value), link.theirs.arrived,
                                    sizeof count);
    return true;
  }

  void release(Outgoing& outgoing) {
    for (const auto& write : outgoing.writes)
      if (write.request) agent_.release(write.request);
    if (outgoing.counter) agent_.release(std::exchange(outgoing.counter, nullptr));
    outgoing.writes.clear();
    outgoing.counted = 0;
  }

  NixlAgent& agent_;
  const std::unique_ptr<TcpFrames> frames_;
  Links& links_;
  std::map<int, Outgoing> outgoing_;  // by peer
  std::atomic<bool> woken_{false};
};

class NixlReceiver : public WireReceiver {
 public:
  NixlReceiver(NixlAgent& agent, std::unique_ptr<WireReceiver> frames) : agent_(agent), frames_(std::move(frames)) {}

  void progress(WireCallbacks& callbacks, std::chrono::microseconds patience) override {
    const auto deadline = Clock::now() + patience;
    do {
      agent_.help();
      frames_->progress(callbacks, std::min(patience, help_interval()));
    } while (!woken_.exchange(false) && Clock::now() < deadline);
  }
  void wake() override {
    woken_ = true;
    frames_->wake();
  }
  void discard() override { frames_->discard(); }

 private:
  // Without RDMA the receiver must help often. UCX_TLS says whether TCP is permitted.
  static std::chrono::microseconds help_interval() {
    const char* kinds = std::getenv("UCX_TLS");
    const bool tcp = kinds && kinds[0] != '^' && std::strstr(kinds, "tcp");
    return std::chrono::microseconds(tcp ? 200 : 10'000);
  }
  NixlAgent& agent_;
  const std::unique_ptr<WireReceiver> frames_;
  std::atomic<bool> woken_{false};
};

class NixlWire : public Wire {
 public:
  NixlWire(const std::string& library, int rank, const std::string& bind_to, const std::string& secret, double silence)
      : agent_(library, rank), connections_(tcp_connections(rank, bind_to, secret, silence)) {}

  std::string address() const override { return connections_->address(); }
  bool registers_rings() const override { return true; }

  void use_rings(int peer, std::byte* out, std::byte* in, std::size_t bytes, Word* arrived) override {
    Link& link = links_[peer];
    agent_.register_memory(out, bytes);
    agent_.register_memory(in, bytes);
    agent_.register_memory(reinterpret_cast<std::byte*>(arrived), sizeof *arrived);
    agent_.register_memory(reinterpret_cast<std::byte*>(link.source.get()), sizeof *link.source);
    link.ours = {reinterpret_cast<std::uintptr_t>(in), reinterpret_cast<std::uintptr_t>(arrived)};
  }

  void connect(const std::map<int, WirePeer>& peers, Clock::time_point deadline,
               const std::function<void()>& check_failure) override {
    connections_->connect(peers, deadline, check_failure);
    const std::string description = agent_.description();
    std::map<int, std::string> sent;
    for (const auto& [peer, link] : links_)
      sent[peer] = std::string(reinterpret_cast<const char*>(&link.ours), sizeof link.ours) + description;
    for (const auto& [peer, text] : swap_texts(connections_->sockets(), sent, deadline, check_failure)) {
      if (text.size() < sizeof(RemoteRing)) throw std::runtime_error("NIXL: a peer sent no description");
      std::memcpy(&links_[peer].theirs, text.data(), sizeof(RemoteRing));
      agent_.add_peer(peer, text.substr(sizeof(RemoteRing)));
    }
  }

  std::unique_ptr<WireSender> sender(const std::vector<int>& peers) override {
    return std::make_unique<NixlSender>(agent_, tcp_sender(connections_->sockets(peers)), links_, peers);
  }
  std::unique_ptr<WireReceiver> receiver(const std::vector<int>& peers) override {
    return std::make_unique<NixlReceiver>(agent_, tcp_receiver(connections_->sockets(peers)));
  }

 private:
  Links links_;  // declared before the agent, which has registered parts of it
  NixlAgent agent_;
  const std::unique_ptr<TcpConnections> connections_;
};

}  // namespace

std::unique_ptr<Wire> nixl_wire(const std::string& library, int rank, const std::string& bind_to,
                                const std::string& secret, double silence) {
  return std::make_unique<NixlWire>(library, rank, bind_to, secret, silence);
}

}  // namespace freescale::transport
