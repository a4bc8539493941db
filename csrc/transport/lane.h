// What two ranks share: counters, a ring of chunks, and a ledger of what each has said it will send.
//
// Chunk k of a lane is written into slot k of the ring (modulo its slots), then the sender's counter `sent` becomes
// k + 1. The receiver waits for that, takes the chunk, and its counter `received` becomes k + 1. The sender waits for
// `received` before it writes the slot again. Counters never go back; they wrap at 2^32. Each word has one writer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device.h"

namespace freescale::transport {

// ---- what lies in a rank's segment ---------------------------------------------------------------------------------

enum State : Word { running = 0, closed = 1, failed = 2 };

struct Header {  // written by the owner
  Word state;    // set last: `error` is complete when it reads `failed`
  std::int32_t process;
  std::uint64_t started;    // of the process, so that a reused number is noticed
  std::uint64_t namespace_; // of process numbers
  std::uint64_t heartbeat;  // CLOCK_MONOTONIC, nanoseconds
  char error[2048];
};

struct Line {                 // the counters of the owner towards one peer
  alignas(64) Word sent;      // chunks the owner has put into its ring for the peer
  alignas(64) Word received;  // chunks of the peer that the owner has taken
  alignas(64) Word arrived;   // for a peer on another host: its chunks that the network has brought
  alignas(64) Word credit;    // for a peer on another host: its `received`, as the network reports it
};

// What a rank says about one exchange with one peer, before a byte moves.
struct Claim {
  static constexpr std::uint64_t unknown = ~std::uint64_t{0};
  Word kind = 0;
  std::uint64_t sends = 0, receives = 0;  // bytes
};

// The latest claims of a rank towards one peer. Both ranks write theirs and then read the other's, so whoever comes
// second sees a disagreement before it moves a byte.
class Ledger {
 public:
  void announce(Word exchange, const Claim& claim);
  std::optional<Claim> find(Word exchange) const;  // empty when it is not there yet, or no more

 private:
  static constexpr std::size_t kept = 64;
  struct Entry {
    Word valid_for;  // exchange + 1, 0 while it is written
    Word kind;
    std::uint64_t sends, receives;
  };
  Entry entries_[kept];
};

// ---- the ring ------------------------------------------------------------------------------------------------------

// Where the chunks of a lane lie. Sender and receiver each keep one and see the same sizes, so they agree without
// talking. A ring starts small and moves to a larger place when a larger transfer comes; the larger place lies behind
// the smaller one, which is not used again.
class Ring {
 public:
  struct Slot {
    Word number;              // of the chunk, in the lane
    std::size_t offset;       // from the start of the ring's region
    std::size_t bytes;
    std::optional<Word> free; // what the receiver's counter must reach before the slot may be written
  };
  struct Place {
    std::size_t offset, bytes;
  };

  Ring() = default;
  Ring(std::size_t largest, std::size_t chunk, Word first = 0);
  // The slots of the next `bytes` bytes.
  std::vector<Slot> take(std::size_t bytes);
  Place place() const { return places_[level_]; }
  std::size_t level() const { return level_; }
  std::size_t slots() const { return place().bytes / slot_bytes(); }
  std::size_t region() const { return places_.back().offset + places_.back().bytes; }
  Word next() const { return static_cast<Word>(count_); }

 private:
  std::size_t slot_bytes() const { return std::min(chunk_, place().bytes / 2); }

  std::vector<Place> places_;
  std::size_t chunk_ = 0, level_ = 0;
  std::uint64_t count_ = 0, first_ = 0;  // chunks so far; chunks before the present place
};

// ---- sizes ---------------------------------------------------------------------------------------------------------

inline constexpr std::size_t page = 4096;
inline std::size_t to_pages(std::size_t bytes) { return (bytes + page - 1) / page * page; }

// A view of one rank's segment.
class Layout {
 public:
  Layout() = default;
  Layout(std::byte* base, std::size_t world, std::size_t ring) : base_(base), world_(world), ring_(ring) {}

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Line& line(std::size_t peer) const { return reinterpret_cast<Line*>(base_ + page)[peer]; }
  Ledger& ledger(std::size_t peer) const { return reinterpret_cast<Ledger*>(base_ + page + lines())[peer]; }
  // Chunks for `peer` on their way out, and, where the peer is on another host, its chunks that came in.
  std::byte* outgoing(std::size_t peer) const { return base_ + outgoing_offset(peer); }
  std::byte* incoming(std::size_t peer) const { return base_ + incoming_offset(peer); }
  std::size_t outgoing_offset(std::size_t peer) const { return control() + 2 * peer * ring_; }
  std::size_t incoming_offset(std::size_t peer) const { return outgoing_offset(peer) + ring_; }
  // Header, lines and ledgers: the part that is pinned from the start.
  std::size_t control() const { return page + lines() + to_pages(world_ * sizeof(Ledger)); }
  std::size_t total() const { return control() + 2 * world_ * ring_; }

 private:
  std::size_t lines() const { return to_pages(world_ * sizeof(Line)); }

  std::byte* base_ = nullptr;
  std::size_t world_ = 0, ring_ = 0;
};

static_assert(sizeof(Header) <= page);

}  // namespace freescale::transport
