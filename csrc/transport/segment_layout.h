// What the shared memory segment of one rank contains: a header, counters and announcements for each peer, and the
// rings from which the peers receive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "device.h"
#include "segment.h"

namespace freescale::transport {

enum State : Word { running = 0, closed = 1, failed = 2 };

struct Header {  // only the owner of the segment writes it
  char key[Segment::key_bytes];
  Word state;  // written last: when it is `failed`, `error` is complete
  Word unmapped;  // 1 when the owner has unmapped the device memory of all other ranks
  Word final;  // 1 after a failure, when nothing more will be issued and the final counters below are there
  std::int32_t process;
  std::uint64_t started;    // start time of the process, which tells it from a later process with the same number
  std::uint64_t namespace_; // the namespace of process numbers
  std::uint64_t heartbeat;  // CLOCK_MONOTONIC, nanoseconds
  char error[2048];
};

struct Counters {             // of the owner, for one peer
  alignas(64) Word sent;      // chunks that the owner has written into its ring for the peer
  alignas(64) Word received;  // chunks of the peer that the owner has copied out
  alignas(64) Word arrived;   // peer on another host: its chunks that have arrived over the network
  alignas(64) Word credit;    // peer on another host: its `received`, as reported over the network
  // After a failure: the last values that the owner's streams will write to `sent` and `received`.
  alignas(64) Word final_sent;
  Word final_received;
};

// What a rank announces to one peer about one exchange, before any byte moves.
struct Announcement {
  static constexpr std::uint64_t unknown = ~std::uint64_t{0};
  Word kind = 0;  // hash of the name of the collective
  std::uint64_t sends = 0, receives = 0;  // bytes
};

// The latest announcements of a rank to one peer. Each rank first writes its own and then reads the peer's, so at least
// the second of the two sees a mismatch before it moves a byte.
class Announcements {
 public:
  void announce(Word exchange, const Announcement& announcement);
  std::optional<Announcement> find(Word exchange) const;  // empty if it is not there yet, or already overwritten

 private:
  static constexpr std::size_t kept = 64;
  struct Entry {
    Word valid_for;  // exchange + 1; 0 while the entry is written
    Word kind;
    std::uint64_t sends, receives;
  };
  Entry entries_[kept];
};

// Where everything lies in a segment. `ring` is the region of one ring in bytes.
class SegmentLayout {
 public:
  SegmentLayout() = default;
  SegmentLayout(std::byte* base, std::size_t world, std::size_t ring) : base_(base), world_(world), ring_(ring) {}

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Counters& counters(std::size_t peer) const { return reinterpret_cast<Counters*>(base_ + page)[peer]; }
  Announcements& announcements(std::size_t peer) const {
    return reinterpret_cast<Announcements*>(base_ + page + counters_bytes())[peer];
  }
  // The ring of chunks for `peer` and, if the peer is on another host, the ring of chunks that arrived from it.
  std::byte* outgoing(std::size_t peer) const { return base_ + outgoing_offset(peer); }
  std::byte* incoming(std::size_t peer) const { return base_ + incoming_offset(peer); }
  std::size_t outgoing_offset(std::size_t peer) const { return control() + peer * ring_; }
  std::size_t incoming_offset(std::size_t peer) const { return outgoing_offset(world_ + peer); }
  // Bytes of header, counters and announcements, the part that is pinned from the start.
  std::size_t control() const { return page + counters_bytes() + to_pages(world_ * sizeof(Announcements)); }
  std::size_t total() const { return control() + 2 * world_ * ring_; }

 private:
  std::size_t counters_bytes() const { return to_pages(world_ * sizeof(Counters)); }

  std::byte* base_ = nullptr;
  std::size_t world_ = 0, ring_ = 0;
};

static_assert(sizeof(Header) <= page);

}  // namespace freescale::transport
