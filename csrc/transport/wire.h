// Between hosts. A wire is one-sided: a chunk that is put on it appears in the peer's ring and then in its `arrived`
// counter. TCP is the wire of today; an RDMA engine implements the same calls with writes into the peer's memory.
//
// Both directions of a link move at the same time, and several links: each sender and each receiver serves some of the
// peers, and is used by one thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device.h"

namespace freescale::transport {

using Clock = std::chrono::steady_clock;

struct Chunk {
  Word number;           // in the lane
  Word exchange;         // it belongs to, for which
  Word kind;             // the sender says what it is
  Word unused;           // no byte of a frame is left to chance
  std::uint64_t total;   // and how many bytes it sends to this peer in all
  std::uint64_t offset;  // in the ring's region
  std::uint64_t bytes;
};

// What senders and receivers report to their queue, from within progress().
class WireEvents {
 public:
  virtual ~WireEvents() = default;
  virtual std::byte* landing(int peer, const Chunk& chunk) = 0;  // where its bytes belong; throws on a bad chunk
  virtual void arrived(int peer, const Chunk& chunk) = 0;        // all its bytes are there
  virtual void credited(int peer, Word received) = 0;            // the peer has taken chunks up to this count
  virtual void aborted(int peer, const std::string& why) = 0;    // the peer has failed and says why
  virtual void lost(int peer, const std::string& why) = 0;       // nothing will come from it any more
};

// What one thread does for some of a wire's peers.
class WireEnd {
 public:
  virtual ~WireEnd() = default;
  virtual void progress(WireEvents& events, std::chrono::microseconds patience) = 0;
  virtual void wake() = 0;  // ends the patience of progress(); callable from any thread
};

class Sender : public WireEnd {
 public:
  virtual bool idle(int peer) const = 0;  // everything given to it for this peer is on its way
  virtual void put(int peer, const Chunk& chunk, const std::byte* data) = 0;  // data stays valid until it is credited
  virtual void credit(int peer, Word received) = 0;
  virtual void abort(const std::string& why) = 0;  // tells every peer
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual std::string address() const = 0;  // what peers connect to
  virtual void connect(const std::map<int, std::string>& peers, Clock::time_point deadline) = 0;
  // Of peers that are connected, each with one sender and one receiver.
  virtual std::unique_ptr<Sender> sender(const std::vector<int>& peers) = 0;
  virtual std::unique_ptr<WireEnd> receiver(const std::vector<int>& peers) = 0;
};

std::unique_ptr<Wire> tcp_wire(int rank, const std::string& bind_to);

}  // namespace freescale::transport
