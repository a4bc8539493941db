// Set-up and end of a queue.
#include "queue.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>

#include "process.h"

namespace freescale::transport {
namespace {

// An address is lines of "key=value".
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
      own_(Segment::create()) {
  if (rank_ < 0 || rank_ >= world())
    throw std::invalid_argument("rank " + std::to_string(rank_) + " of " + std::to_string(world()));
  out_ = device_->stream();
  in_ = device_->stream();
  if (settings_.high) gate_ = device_->claim_gate();
  if (std::any_of(hosts_.begin(), hosts_.end(), [&](const auto& host) { return host != hosts_[rank_]; }))
    wire_ = tcp_wire(rank_, settings_.bind_to);
}

std::string Queue::address() const {
  std::ostringstream text;
  text << "segment=" << own_.name() << "\nchunk=" << settings_.chunk_bytes << "\nbuffer=" << settings_.buffer_bytes
       << "\npriority=" << settings_.high << "\nfree=" << Segment::free_bytes() << "\n";
  if (wire_) text << "wire=" << wire_->address() << "\n";
  return text.str();
}

// Every rank computes the same ring size from the same addresses.
void Queue::agree(const std::vector<std::string>& addresses) {
  if (static_cast<int>(addresses.size()) != world())
    throw std::invalid_argument(std::to_string(addresses.size()) + " addresses for " + std::to_string(world()) +
                                " ranks");
  const auto mine = parse(addresses[rank_]);
  std::map<std::string, std::pair<std::size_t, std::size_t>> hosts;  // free bytes, ranks
  for (int peer = 0; peer < world(); ++peer) {
    const auto theirs = parse(addresses[peer]);
    for (const char* key : {"chunk", "buffer", "priority"})
      if (theirs.at(key) != mine.at(key))
        throw std::runtime_error("the options of the group differ: " + std::string(key) + " is " + mine.at(key) +
                                 " on rank " + std::to_string(rank_) + " and " + theirs.at(key) + " on rank " +
                                 std::to_string(peer));
    auto& [free, ranks] = hosts.try_emplace(hosts_[peer], std::stoull(theirs.at("free")), 0).first->second;
    free = std::min<std::size_t>(free, std::stoull(theirs.at("free")));
    ++ranks;
  }
  // Half of what is free at most, and where there are other hosts, half of that is for what they send.
  std::size_t budget = settings_.buffer_bytes;
  for (const auto& [host, found] : hosts)
    budget = std::min(budget, found.first / found.second / (hosts.size() > 1 ? 4 : 2));
  const std::size_t share = budget / world() / page * page;
  ring_capacity_ = share;
  while (ring_capacity_ >= 2 * page && Ring(ring_capacity_, settings_.chunk_bytes).region() > share)
    ring_capacity_ = (ring_capacity_ - ring_capacity_ / 8) / page * page;
  if (ring_capacity_ < 2 * page)
    throw std::runtime_error("too little shared memory: " + std::to_string(budget) + " bytes for the rings of " +
                             std::to_string(world()) + " ranks; enlarge /dev/shm (e.g. docker run --shm-size) or "
                             "FREESCALE_BUFFER_BYTES");
}

void Queue::connect(const std::vector<std::string>& addresses) {
  agree(addresses);
  const Ring ring(ring_capacity_, settings_.chunk_bytes);
  const std::size_t region = ring.region();
  own_.map(Layout(nullptr, world(), region).total());
  layout_ = Layout(own_.data(), world(), region);
  own_.commit(0, layout_.control());
  const Process self = this_process();
  Header& header = layout_.header();
  header.process = self.number;
  header.started = self.started;
  header.namespace_ = self.namespace_;
  __atomic_store_n(&header.heartbeat, now_ns(), __ATOMIC_RELEASE);
  pin(own_.data(), layout_.control());

  lanes_.resize(world());
  peers_.resize(world());
  std::map<int, std::string> others;
  for (int peer = 0; peer < world(); ++peer) {
    const auto fields = parse(addresses[peer]);
    open_lane(peer, fields.at("segment"));
    if (lanes_[peer].remote) others[peer] = fields.at("wire");
  }
  report_.ring_bound_bytes = world() * region;
  if (wire_) wire_->connect(others, after_seconds(settings_.timeout));
  connected_ = true;
  start_pumps();
  watch_ = std::make_unique<std::thread>([this] { watch(); });
}

void Queue::open_lane(int peer, const std::string& segment) {
  Lane& lane = lanes_[peer];
  lane.out = lane.in = Ring(ring_capacity_, settings_.chunk_bytes, settings_.first_chunk);
  lane.remote = hosts_[peer] != hosts_[rank_];
  lane.sent = &layout_.line(peer).sent;
  lane.received = &layout_.line(peer).received;
  lane.ours = &layout_.ledger(peer);
  lane.out_ring = layout_.outgoing(peer);
  Line& line = layout_.line(peer);
  for (Word* word : {&line.sent, &line.received, &line.arrived, &line.credit}) store(word, settings_.first_chunk);
  lane.posted = lane.credited = lane.landed = settings_.first_chunk;
  if (lane.remote) {
    lane.told = std::make_unique<Ledger>();
    lane.theirs = lane.told.get();
    lane.freed = &layout_.line(peer).credit;
    lane.arrived = &layout_.line(peer).arrived;
    lane.in_ring = layout_.incoming(peer);
    return;
  }
  if (peer == rank_) {
    lane.view = layout_;
    lane.peer = &own_;
  } else {
    peers_[peer] = std::make_unique<Segment>(Segment::open(segment));
    lane.peer = peers_[peer].get();
    lane.peer->map(layout_.total());
    lane.view = Layout(lane.peer->data(), world(), lane.out.region());
    lane.peer->commit(0, lane.view.control());
    pin(lane.peer->data(), lane.view.control());
  }
  lane.theirs = &lane.view.ledger(rank_);
  lane.freed = &lane.view.line(rank_).received;
  lane.arrived = &lane.view.line(rank_).sent;
  lane.in_ring = lane.view.outgoing(rank_);
}

void Queue::seal() { own_.unlink(); }

void Queue::pin(std::byte* memory, std::size_t bytes) {
  device_->pin(memory, bytes);
  pinned_.push_back(memory);
  report_.pinned_bytes += bytes;
}

std::optional<std::string> Queue::failure() const {
  return verdict_->given() ? std::optional<std::string>(verdict_->why()) : std::nullopt;
}

Report Queue::report() const {
  std::lock_guard lock(mutex_);
  return report_;
}

void Queue::close(double seconds) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  bool quiet = true;
  if (connected_) {
    const auto finished = [this] {
      std::lock_guard lock(watch_mutex_);
      return outstanding_.empty() && delivered();
    };
    const auto deadline = after_seconds(seconds);
    while (!finished() && !verdict_->given() && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (!finished() && !verdict_->given())
      fail("rank " + std::to_string(rank_) + ": closed while exchanges were on their way");
    // After a failure the watch thread lets the streams run out; what they hold must not be unmapped before.
    const auto drained = after_seconds(10);
    while (!(quiet = finished_streams()) && Clock::now() < drained)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    {
      std::lock_guard lock(watch_mutex_);
      stop_ = true;
    }
    watch_wakes_.notify_one();
    if (watch_) watch_->join();
    stop_pumps();
    outstanding_.clear();
    finished_.clear();
    if (!verdict_->given()) store(&layout_.header().state, State::closed);
  }
  own_.unlink();
  if (gate_) device_->release_gate(*gate_);
  if (!quiet) {  // a stream that cannot be stopped may still touch this memory: leave it to the end of the process
    new std::vector<std::unique_ptr<Segment>>(std::move(peers_));
    new Segment(std::move(own_));
    out_.release();
    in_.release();
    return;
  }
  out_.reset();
  in_.reset();
  for (std::byte* memory : pinned_) device_->unpin(memory);
  pinned_.clear();
}

bool Queue::finished_streams() {
  std::vector<std::shared_ptr<Exchange>> all;
  {
    std::lock_guard lock(watch_mutex_);
    all = finished_;
    all.insert(all.end(), outstanding_.begin(), outstanding_.end());
  }
  return std::all_of(all.begin(), all.end(), [](const auto& exchange) {
    return exchange->out_.mark->passed() && exchange->in_.mark->passed();
  });
}

// Peers on other hosts have all we sent. (On this host they find it in our segment after we are gone.)
bool Queue::delivered() const {
  std::lock_guard lock(pending_mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return !lane.remote || lane.lost || load(lane.freed) == lane.out.next();
  });
}

Queue::~Queue() {
  try {
    close(5);
  } catch (const std::exception&) {
    // The driver may have shut down before; the process is about to end.
  }
}

}  // namespace freescale::transport
