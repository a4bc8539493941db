// The network between hosts. The interface is one-sided: a chunk that a sender puts appears in the ring of the peer,
// and then the peer's `arrived` counter grows. TCP implements it (tcp_wire.cpp, tcp_endpoints.cpp), and so does NIXL, which
// writes into the peer's memory over RDMA (nixl_wire.cpp).
//
// Both directions and several peers move at the same time. Each sender and each receiver serves some of the peers, and
// one thread uses it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device.h"

namespace freescale::transport {

using Clock = std::chrono::steady_clock;

struct Chunk {
  Word number;           // in the ring
  Word exchange;         // the exchange that it belongs to
  Word kind;             // hash of the name of the collective
  Word padding;          // explicit, so that a frame has no uninitialized bytes
  std::uint64_t total;   // bytes that the sender sends to this peer in the whole exchange
  std::uint64_t offset;  // from the start of the ring's region
  std::uint64_t bytes;
};

// What senders and receivers report to their queue. progress() calls these.
class WireCallbacks {
 public:
  virtual ~WireCallbacks() = default;
  virtual std::byte* destination(int peer, const Chunk& chunk) = 0;  // where its bytes go; throws on an invalid chunk
  virtual void arrived(int peer, const Chunk& chunk) = 0;            // all its bytes are there
  virtual void announced(int peer, const Chunk& chunk) = 0;          // the peer sends nothing in this exchange
  virtual void expected(int peer, const Chunk& chunk) = 0;           // the peer has issued this exchange, and expects `total`
  virtual void credited(int peer, Word received) = 0;                // the peer has received this many chunks
  virtual void aborted(int peer, const std::string& why) = 0;        // the peer has failed for this reason
  virtual void lost(int peer, const std::string& why) = 0;           // the connection is lost; nothing more will come
};

// One thread's share of the network: a sender or a receiver for some of the peers.
class WireEndpoint {
 public:
  virtual ~WireEndpoint() = default;
  // Moves what can be moved, and waits at most `patience` for more.
  virtual void progress(WireCallbacks& callbacks, std::chrono::microseconds patience) = 0;
  virtual void wake() = 0;  // ends the wait in progress(); any thread may call it
};

class WireReceiver : public WireEndpoint {
 public:
  // From now on what arrives is thrown away, also the rest of a chunk that has begun to arrive.
  virtual void discard() = 0;
};

class WireSender : public WireEndpoint {
 public:
  virtual bool idle(int peer) const = 0;  // whether everything for this peer has been handed to the network
  virtual bool ready(int peer) const { return idle(peer); }  // whether it takes another chunk
  virtual void put(int peer, const Chunk& chunk, const std::byte* data) = 0;  // data stays valid until it is credited
  // While it is held, progress() sends no chunks, not even the rest of one that has begun. A network whose hardware moves
  // the chunks ignores this.
  virtual void hold(bool /*held*/) {}
  virtual void announce(int peer, const Chunk& chunk) = 0;  // an exchange without bytes for this peer
  virtual void credit(int peer, Word received) = 0;
  // Some networks let the peer's stream use a chunk before a thread of the peer has checked it. They need to know what the
  // peer expects: expect() says it to the peer, and permit() says that the peer's word on all exchanges before this one has
  // come and fits. Any thread may call permit().
  virtual bool needs_expectations() const { return false; }
  virtual void expect(int /*peer*/, const Chunk& /*chunk*/) {}
  virtual void permit(int /*peer*/, Word /*exchange*/) {}
  // Tells every peer the reason of a failure. Afterwards the data of put() are not read any more.
  virtual void abort(const std::string& why) = 0;
};

// Where a peer listens, and the secret that it must prove to know.
struct WirePeer {
  std::string address, secret;
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual std::string address() const = 0;  // the address that peers connect to
  // Whether use_rings() registers the whole rings with the network. On a GPU the network may pin them, too, and memory can be
  // pinned only once: so the queue pins such rings before.
  virtual bool registers_rings() const { return false; }
  // Before connect(): the rings for and from this peer, and the counter of the chunks that have arrived from it. They stay
  // valid as long as this object lives.
  virtual void use_rings(int /*peer*/, std::byte* /*out*/, std::byte* /*in*/, std::size_t /*bytes*/, Word* /*arrived*/) {}
  // Connects to all peers at the same time. Calls `check` several times a second; what it throws ends the set-up.
  virtual void connect(const std::map<int, WirePeer>& peers, Clock::time_point deadline,
                       const std::function<void()>& check) = 0;
  // For peers that are connected. Each peer may have one sender and one receiver.
  virtual std::unique_ptr<WireSender> sender(const std::vector<int>& peers) = 0;
  virtual std::unique_ptr<WireReceiver> receiver(const std::vector<int>& peers) = 0;
};

// How many seconds a peer may be silent until it counts as gone, for a group with this timeout. A transfer may take as long, so
// a network that fails for a shorter time does no harm. If the timeout is short, the transfers themselves end in time.
inline double longest_silence(double timeout) { return std::max(30.0, timeout); }

// A rank that listens at `bind_to` and accepts only peers that prove to know `secret`. A connection on which nothing arrives
// for `silence` seconds, although the system asks the peer for a sign of life, is lost.
std::unique_ptr<Wire> tcp_wire(int rank, const std::string& bind_to, const std::string& secret, double silence);
// The same, but chunks are written by NIXL, whose `library` is loaded. Throws with the reason if NIXL cannot start.
std::unique_ptr<Wire> nixl_wire(const std::string& library, int rank, const std::string& bind_to,
                                const std::string& secret, double silence);
// For a forked child, which has none of our threads: closes the sockets that it has inherited. While they were open there, a
// peer would not see that this process has ended. Takes no lock, because a thread of the parent may have held it.
void close_sockets_after_fork();
// Whether only processes of this machine can reach the address.
bool is_loopback(const std::string& address);

}  // namespace freescale::transport
