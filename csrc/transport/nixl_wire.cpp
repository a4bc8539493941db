// The network over NIXL, which uses RDMA where there is a device for it. The sender writes each chunk directly into the
// ring of the peer. When the chunk is there, it says so over the TCP connection of the two ranks, which also carries
// announcements, credits and failures. So the receiver checks each chunk before its stream may use it, as over plain
// TCP, and peers that have not proved to know the secret never learn where the rings are.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
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
      throw std::runtime_error("NIXL cannot start (status " + std::to_string(started) +
                               "): UCX finds no network that it may use (UCX_TLS=" +
                               (kinds_of_network ? kinds_of_network : "") +
                               "). Is there an RDMA device? Otherwise set FREESCALE_NETWORK=tcp, or transport='nccl'");
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

using RingsOfPeers = std::map<int, std::uintptr_t>;  // by peer: where our chunks go, in the memory of the peer

class NixlSender : public WireSender {
 public:
  NixlSender(NixlAgent& agent, std::unique_ptr<TcpFrames> frames, const RingsOfPeers& rings, std::vector<int> peers)
      : agent_(agent), frames_(std::move(frames)), rings_(rings) {
    for (const int peer : peers) writes_[peer];
  }
  ~NixlSender() override {
    for (auto& [peer, writes] : writes_)
      for (const auto& write : writes) agent_.release(write.request);
  }

  bool idle(int peer) const override { return writes_.at(peer).empty() && frames_->idle(peer); }
  bool ready(int peer) const override { return writes_.at(peer).size() < most_writes; }

  void put(int peer, const Chunk& chunk, const std::byte* data) override {
    if (lost_.count(peer)) return;
    try {
      writes_.at(peer).push_back({chunk, agent_.write(peer, data, rings_.at(peer) + chunk.offset, chunk.bytes), {}});
    } catch (const std::exception& error) {
      lost_[peer] = error.what();
    }
  }
  void announce(int peer, const Chunk& chunk) override {
    // An announcement must not overtake the chunks of earlier exchanges.
    auto& writes = writes_.at(peer);
    if (writes.empty())
      frames_->announce(peer, chunk);
    else
      writes.back().notices.push_back(chunk);
  }
  void credit(int peer, Word received) override { frames_->credit(peer, received); }

  void abort(const std::string& why) override {
    // A write reads from our ring, which our streams may soon overwrite. So all writes end first. A write that does not
    // end in time goes to a peer that cannot be reached, or that fails, too.
    const auto deadline = Clock::now() + longest_end;
    const auto ended = [this](auto& entry) {
      for (auto& write : entry.second)
        if (agent_.status(write.request) == nixl::in_progress) return false;
      return true;
    };
    while (!std::all_of(writes_.begin(), writes_.end(), ended) && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    for (auto& [peer, writes] : writes_) {
      for (const auto& write : writes) agent_.release(write.request);
      writes.clear();
    }
    frames_->abort(why);
  }

  void progress(WireCallbacks& callbacks, std::chrono::microseconds patience) override {
    const auto deadline = Clock::now() + patience;
    while (true) {
      const bool moved = deliver();
      for (const auto& [peer, why] : std::exchange(lost_, {})) {
        frames_->close(peer);
        callbacks.lost(peer, why);
      }
      const bool waits = std::any_of(writes_.begin(), writes_.end(), [](auto& entry) { return !entry.second.empty(); });
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
    nixl::Request request;
    std::vector<Chunk> notices;  // exchanges without bytes that come after it
  };

  // Tells the peers about chunks that have been written, in order. Returns whether there were any.
  bool deliver() {
    bool moved = false;
    for (auto& [peer, writes] : writes_) {
      while (!writes.empty()) {
        const int status = agent_.status(writes.front().request);
        if (status == nixl::in_progress) break;
        const Write write = writes.front();
        agent_.release(write.request);
        writes.pop_front();
        moved = true;
        if (status != nixl::success) {
          lost_[peer] = "NIXL: a write failed with status " + std::to_string(status);
          break;
        }
        frames_->delivered(peer, write.chunk);
        for (const Chunk& notice : write.notices) frames_->announce(peer, notice);
      }
    }
    return moved;
  }

  NixlAgent& agent_;
  const std::unique_ptr<TcpFrames> frames_;
  const RingsOfPeers& rings_;
  std::map<int, std::deque<Write>> writes_;  // by peer, in order
  std::map<int, std::string> lost_;          // peers that progress() has to report
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
  NixlWire(const std::string& library, int rank, const std::string& bind_to, const std::string& secret)
      : agent_(library, rank), connections_(tcp_connections(rank, bind_to, secret)) {}

  std::string address() const override { return connections_->address(); }

  void use_rings(int peer, std::byte* out, std::byte* in, std::size_t bytes) override {
    agent_.register_memory(out, bytes);
    agent_.register_memory(in, bytes);
    own_[peer] = reinterpret_cast<std::uintptr_t>(in);
  }

  void connect(const std::map<int, WirePeer>& peers, Clock::time_point deadline,
               const std::function<void()>& check_failure) override {
    connections_->connect(peers, deadline, check_failure);
    const std::string description = agent_.description();
    std::map<int, std::string> sent;
    for (const auto& [peer, ring] : own_)
      sent[peer] = std::string(reinterpret_cast<const char*>(&ring), sizeof ring) + description;
    for (const auto& [peer, text] : swap_texts(connections_->sockets(), sent, deadline, check_failure)) {
      if (text.size() < sizeof(std::uintptr_t)) throw std::runtime_error("NIXL: a peer sent no description");
      std::memcpy(&theirs_[peer], text.data(), sizeof(std::uintptr_t));
      agent_.add_peer(peer, text.substr(sizeof(std::uintptr_t)));
    }
  }

  std::unique_ptr<WireSender> sender(const std::vector<int>& peers) override {
    return std::make_unique<NixlSender>(agent_, tcp_sender(connections_->sockets(peers)), theirs_, peers);
  }
  std::unique_ptr<WireReceiver> receiver(const std::vector<int>& peers) override {
    return std::make_unique<NixlReceiver>(agent_, tcp_receiver(connections_->sockets(peers)));
  }

 private:
  NixlAgent agent_;
  const std::unique_ptr<TcpConnections> connections_;
  RingsOfPeers own_, theirs_;
};

}  // namespace

std::unique_ptr<Wire> nixl_wire(const std::string& library, int rank, const std::string& bind_to,
                                const std::string& secret) {
  return std::make_unique<NixlWire>(library, rank, bind_to, secret);
}

}  // namespace freescale::transport
