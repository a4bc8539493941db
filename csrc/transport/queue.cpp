// The set-up and the end of a queue.
#include "queue.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>

#include "process.h"

namespace freescale::transport {
namespace {

// An address consists of lines "key=value".
std::map<std::string, std::string> parse(const std::string& address) {
  std::map<std::string, std::string> fields;
  std::istringstream lines(address);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t split = line.find('=');
    if (split != std::string::npos) fields[line.substr(0, split)] = line.substr(split + 1);
  }
  return fields;
}

}  // namespace

Queue::Queue(std::shared_ptr<Device> device, int rank, std::vector<std::string> hosts, Settings settings)
    : rank_(rank),
      hosts_(std::move(hosts)),
      settings_(std::move(settings)),
      device_(std::move(device)),
      own_segment_(Segment::create()) {
  if (rank_ < 0 || rank_ >= world())
    throw std::invalid_argument("rank " + std::to_string(rank_) + " is outside 0 .. " + std::to_string(world() - 1));
  free_unused_rings();
  out_ = device_->new_stream();
  in_ = device_->new_stream();
  open_wire();
  // The destructor does not run if this constructor throws, so nothing may throw behind these.
  if (settings_.high_priority) gate_ = device_->claim_gate();
  if (settings_.device_rings) try {
      device_rings_ = std::make_unique<DeviceRings>(device_, rank_, settings_.buffer_bytes);
    } catch (const std::exception& error) {
      ring_problem_ = error.what();
    }
}

// Listens for the ranks on other hosts, if there are any.
void Queue::open_wire() {
  if (std::all_of(hosts_.begin(), hosts_.end(), [&](const auto& host) { return host == hosts_[rank_]; })) return;
  if (settings_.secret.empty() && !is_loopback(settings_.bind_to))
    throw std::runtime_error(
        "the ranks are on several hosts and no secret is set, so any process that reaches " + settings_.bind_to +
        " could take the place of a rank; set the environment variable FREESCALE_SECRET to the same random text on "
        "every host (openssl rand -hex 32), or choose transport='nccl'");
  const std::string secret = settings_.secret.empty() ? Segment::key_of(own_segment_.name()) : settings_.secret;
  const double silence = longest_silence(settings_.timeout);
  wire_ = settings_.nixl_library.empty() ? tcp_wire(rank_, settings_.bind_to, secret, silence)
                                         : nixl_wire(settings_.nixl_library, rank_, settings_.bind_to, secret, silence);
}

std::string Queue::address() const {
  std::ostringstream text;
  text << "segment=" << own_segment_.name() << "\nchunk=" << settings_.chunk_bytes
       << "\ntcp_chunk=" << settings_.tcp_chunk_bytes << "\nurgent_tcp_chunk=" << settings_.urgent_tcp_chunk_bytes
       << "\nbuffer=" << settings_.buffer_bytes << "\npriority=" << settings_.high_priority
       << "\nnetwork=" << (settings_.nixl_library.empty() ? "tcp" : "nixl")
       << "\nfree=" << Segment::free_bytes() << "\n";
  text << "device_rings=" << settings_.device_rings << "\n";
  if (device_rings_) text << "rings=" << device_rings_->handle() << "\n";
  if (wire_) text << "wire=" << wire_->address() << "\n";
  return text.str();
}

std::string Queue::map_device_rings(const std::vector<std::string>& addresses) {
  if (!device_rings_) return ring_problem_;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_ || hosts_.at(peer) != hosts_[rank_]) continue;
    const auto fields = parse(addresses.at(peer));
    const auto rings = fields.find("rings");
    const std::string who = "rank " + std::to_string(rank_) + ": ";
    if (rings == fields.end()) return who + "rank " + std::to_string(peer) + " has no rings in device memory";
    try {
      device_rings_->map(peer, rings->second);
    } catch (const std::exception& error) {
      return who + "the device memory of rank " + std::to_string(peer) + " cannot be mapped: " + error.what();
    }
  }
  return "";
}

void Queue::drop_device_rings() {
  if (!device_rings_) return;
  device_rings_->unmap();
  dropped_rings_ = std::move(device_rings_);
}

// A chunk is sent when our device has written all of it, and the peer's device reads it when all of it has arrived. TCP
// takes longer than these copies, and smaller chunks let all three overlap. But for each chunk the network
// threads also have to read and send counters.
std::size_t Queue::largest_chunk(int peer) const {
  const bool over_tcp = hosts_[peer] != hosts_[rank_] && settings_.nixl_library.empty();
  const std::size_t most = settings_.high_priority ? settings_.urgent_tcp_chunk_bytes : settings_.tcp_chunk_bytes;
  return over_tcp ? std::min(settings_.chunk_bytes, most) : settings_.chunk_bytes;
}

// Checks the settings of all ranks, and computes the ring size. Every rank gets the same result from the same
// addresses.
void Queue::agree_on_ring_size(const std::vector<std::string>& addresses) {
  if (static_cast<int>(addresses.size()) != world())
    throw std::invalid_argument(std::to_string(addresses.size()) + " addresses for " + std::to_string(world()) +
                                " ranks");
  const auto mine = parse(addresses[rank_]);
  std::map<std::string, std::pair<std::size_t, std::size_t>> hosts;  // free bytes, ranks
  for (int peer = 0; peer < world(); ++peer) {
    const auto theirs = parse(addresses[peer]);
    for (const char* key : {"chunk", "tcp_chunk", "urgent_tcp_chunk", "buffer", "priority", "network"})
      if (theirs.at(key) != mine.at(key))
        throw std::runtime_error("the options of the group differ between ranks: " + std::string(key) + " is " +
                                 mine.at(key) + " on rank " + std::to_string(rank_) + " and " + theirs.at(key) +
                                 " on rank " + std::to_string(peer));
    if (hosts_[peer] == hosts_[rank_] && theirs.at("device_rings") != mine.at("device_rings"))
      throw std::runtime_error("the options of the group differ between ranks: only one of rank " +
                               std::to_string(rank_) + " and rank " + std::to_string(peer) +
                               " wants its rings in device memory");
    auto& [free, ranks] = hosts.try_emplace(hosts_[peer], std::stoull(theirs.at("free")), 0).first->second;
    free = std::min<std::size_t>(free, std::stoull(theirs.at("free")));
    ++ranks;
  }
  // The rings take at most half of the free memory. With several hosts, half of that is left for the incoming rings.
  // With one host and its rings in device memory, no ring is in shared memory.
  std::size_t budget = settings_.buffer_bytes;
  for (const auto& [host, found] : hosts)
    if (!device_rings_ || hosts.size() > 1) budget = std::min(budget, found.first / found.second / (hosts.size() > 1 ? 4 : 2));
  const std::size_t share = budget / world() / page * page;
  ring_capacity_ = share;
  while (ring_capacity_ >= 2 * page && Ring(ring_capacity_, settings_.chunk_bytes, 0).region() > share)
    ring_capacity_ = (ring_capacity_ - ring_capacity_ / 8) / page * page;
  if (ring_capacity_ < 2 * page)
    throw std::runtime_error("too little shared memory: there are " + std::to_string(budget) +
                             " bytes for the rings of " + std::to_string(world()) +
                             " ranks; enlarge /dev/shm (docker run --shm-size=2g) or raise FREESCALE_BUFFER_BYTES");
}

// Takes all memory that this rank will ever write to, so that no exchange finds /dev/shm full. Each group takes at most
// half of what the groups before it have left, so all groups of the process share one budget.
void Queue::reserve_memory() {
  own_segment_.reserve(0, layout_.control());
  const std::size_t region = channels_[rank_].out.region();
  for (int peer = 0; peer < world(); ++peer) {
    if (channels_[peer].remote || !device_rings_) own_segment_.reserve(layout_.outgoing_offset(peer), region);
    if (channels_[peer].remote) own_segment_.reserve(layout_.incoming_offset(peer), region);
  }
}

void Queue::connect(const std::vector<std::string>& addresses, const std::function<void()>& check) {
  agree_on_ring_size(addresses);
  const std::size_t region = Ring(ring_capacity_, settings_.chunk_bytes, 0).region();
  own_segment_.map(SegmentLayout(nullptr, world(), region).total());
  own_segment_.prefer_node(device_->numa_node());
  layout_ = SegmentLayout(own_segment_.data(), world(), region);
  channels_.resize(world());
  peer_segments_.resize(world());
  for (int peer = 0; peer < world(); ++peer) {
    channels_[peer].out = channels_[peer].in =
        Ring(ring_capacity_, largest_chunk(peer), settings_.chunk_bytes, settings_.first_chunk);
    channels_[peer].remote = hosts_[peer] != hosts_[rank_];
  }
  reserve_memory();
  const Process self = this_process();
  Header& header = layout_.header();
  header.process = self.number;
  header.started = self.started;
  header.namespace_ = self.namespace_;
  __atomic_store_n(&header.heartbeat, now_ns(), __ATOMIC_RELEASE);
  pin(own_segment_.data(), layout_.control());

  std::map<int, WirePeer> others;
  for (int peer = 0; peer < world(); ++peer) {
    const auto fields = parse(addresses[peer]);
    open_channel(peer, fields.at("segment"));
    if (!channels_[peer].remote) continue;
    // Without a secret the peer must be a process of this user on this machine, which has a key in its segment.
    const bool key_is_here = settings_.secret.empty() && peer < rank_;
    if (wire_->registers_rings()) {
      pin(channels_[peer].out_ring, region);
      pin(channels_[peer].in_ring, region);
      channels_[peer].pinned = true;
    }
    wire_->use_rings(peer, channels_[peer].out_ring, channels_[peer].in_ring, region,
                     channels_[peer].arrived);
    others[peer] = {fields.at("wire"), key_is_here ? Segment::key_of(fields.at("segment")) : settings_.secret};
  }
  report_.ring_bound_bytes = world() * region;
  if (device_rings_) report_.device_bytes = device_rings_->bytes();
  if (wire_) wire_->connect(others, after_seconds(settings_.timeout), check);
  connected_ = true;
  start_network_threads();
  watchdog_ = std::make_unique<std::thread>([this] { run_watchdog(); });
}

void Queue::open_channel(int peer, const std::string& segment) {
  Channel& channel = channels_[peer];
  channel.sent = &layout_.counters(peer).sent;
  channel.received = &layout_.counters(peer).received;
  channel.ours = &layout_.announcements(peer);
  channel.out_ring = layout_.outgoing(peer);
  Counters& counters = layout_.counters(peer);
  for (Word* word : {&counters.sent, &counters.received, &counters.arrived, &counters.credit})
    store(word, settings_.first_chunk);
  channel.posted = channel.credited = channel.next_arrival = settings_.first_chunk;
  channel.issued_out = channel.issued_in = settings_.first_chunk;
  if (channel.remote) {
    channel.their_announcements = std::make_unique<Announcements>();
    channel.theirs = channel.their_announcements.get();
    channel.freed = &layout_.counters(peer).credit;
    channel.arrived = &layout_.counters(peer).arrived;
    channel.in_ring = layout_.incoming(peer);
    return;
  }
  if (peer == rank_) {
    channel.view = layout_;
    channel.peer = &own_segment_;
  } else {
    peer_segments_[peer] = std::make_shared<Segment>(Segment::open(segment));
    channel.peer = peer_segments_[peer].get();
    channel.peer->map(layout_.total());
    channel.view = SegmentLayout(channel.peer->data(), world(), channel.out.region());
    channel.peer->reserve(0, channel.view.control());  // the peer may not have come to this point yet
    channel.peer->close_file();
    pin(channel.peer->data(), channel.view.control());
  }
  channel.theirs = &channel.view.announcements(rank_);
  channel.freed = &channel.view.counters(rank_).received;
  channel.arrived = &channel.view.counters(rank_).sent;
  channel.in_ring = channel.view.outgoing(rank_);
  if (!device_rings_) return;
  channel.out_device = device_rings_->ring(rank_, peer, channel.out.region());
  channel.in_device = device_rings_->ring(peer, rank_, channel.in.region());
}

void Queue::unlink_segment() {
  own_segment_.unlink();
  if (dropped_rings_) dropped_rings_->free();  // every rank has dropped the rings, too
  dropped_rings_.reset();
}

void Queue::pin(std::byte* memory, std::size_t bytes) {
  device_->pin(memory, bytes);
  pinned_.push_back(memory);
  report_.pinned_bytes += bytes;
}

std::optional<std::string> Queue::failure() const {
  return failure_->is_set() ? std::optional<std::string>(failure_->reason()) : std::nullopt;
}

Report Queue::report() const {
  std::lock_guard lock(mutex_);
  return report_;
}

void Queue::close(double seconds) {
  std::lock_guard closing(close_mutex_);
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  free_unused_rings();  // of other queues
  bool idle = true;
  if (connected_) {
    const auto finished = [this] {
      std::lock_guard lock(watchdog_mutex_);
      return outstanding_.empty() && all_delivered();
    };
    const auto deadline = after_seconds(seconds);
    while (!finished() && !failure_->is_set() && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (!finished() && !failure_->is_set())
      fail("rank " + std::to_string(rank_) + ": the group was closed before all exchanges were done");
    // After a failure the watchdog ends the waits of the streams. Their memory must not be unmapped before they are
    // idle.
    const auto drained = after_seconds(10);
    while (!(idle = streams_idle()) && Clock::now() < drained)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    {
      std::lock_guard lock(watchdog_mutex_);
      stop_ = true;
    }
    watchdog_wakes_.notify_one();
    if (watchdog_) watchdog_->join();
    stop_network_threads();
    network_.clear();
    wire_.reset();  // before the rings that it uses
    outstanding_.clear();
    finished_.clear();
    if (idle) close_device_rings();
    if (!failure_->is_set()) store(&layout_.header().state, State::closed);
  } else {
    wire_.reset();  // it may have registered the rings
    drop_device_rings();
  }
  unlink_segment();
  if (gate_) device_->release_gate(*gate_);
  if (!idle) {  // a stream that does not end may still access this memory, so it stays until the process ends
    new std::vector<std::shared_ptr<Segment>>(std::move(peer_segments_));
    new Segment(std::move(own_segment_));
    out_.release();
    in_.release();
    device_rings_.release();
    return;
  }
  out_.reset();
  in_.reset();
  for (std::byte* memory : pinned_) device_->unpin(memory);
  pinned_.clear();
}

// Frees our device memory when all ranks of this host have unmapped it, which is later if one of them goes on using the group.
void Queue::close_device_rings() {
  if (!device_rings_) return;
  try {
    device_rings_->unmap();
  } catch (const std::exception&) {  // after an error of the device, which ends with its process
    device_rings_.reset();
    return;
  }
  store(&layout_.header().unmapped, 1);
  const auto in_use = [peers = peer_segments_, silence = longest_silence(settings_.timeout)] {
    return std::any_of(peers.begin(), peers.end(), [&](const auto& segment) {
      if (!segment) return false;  // this rank, or one of another host
      const Header& header = SegmentLayout(segment->data(), 0, 0).header();
      return !load(&header.unmapped) && !why_gone(header, silence);
    });
  };
  const auto deadline = after_seconds(2);
  while (in_use() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  free_when_unused(std::move(device_rings_), in_use);
}

bool Queue::streams_idle() {
  std::vector<std::shared_ptr<Exchange>> all;
  {
    std::lock_guard lock(watchdog_mutex_);
    all = finished_;
    all.insert(all.end(), outstanding_.begin(), outstanding_.end());
  }
  return std::all_of(all.begin(), all.end(), [](const auto& exchange) {
    const bool issued = exchange->out_.event && exchange->in_.event;
    return issued && exchange->out_.event->done() && exchange->in_.event->done();
  });
}

// Whether peers on other hosts have received all chunks. (Peers on this host can read our segment after we have left.)
bool Queue::all_delivered() const {
  std::lock_guard lock(pending_mutex_);
  return std::all_of(channels_.begin(), channels_.end(), [](const Channel& channel) {
    return !channel.remote || channel.lost || load(channel.freed) == channel.out.next();
  });
}

Queue::~Queue() {
  try {
    close(5);
  } catch (const std::exception&) {
    // At the end of the process the driver may have shut down already.
  }
}

}  // namespace freescale::transport
