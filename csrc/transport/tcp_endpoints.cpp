// The network over TCP: sends frames to some peers, and receives frames from some peers. Each chunk is one frame.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <vector>

#include "tcp.h"

namespace freescale::transport {
namespace {

enum class FrameType : Word { chunk = 1, credit = 2, abort = 3, announcement = 4, delivered = 5, expectation = 6 };

struct Frame {
  Word magic;
  FrameType type;
  Chunk chunk;  // `body()` bytes follow: those of the chunk or the text of an abort. In a credit, `number` is the count
  // The bytes of a chunk that was delivered by other means are not in the frame.
  std::uint64_t body() const { return type == FrameType::delivered ? 0 : chunk.bytes; }
};

// A smaller chunk is copied. That needs one call of the system, and sending from the file needs two.
constexpr std::size_t smallest_from_file = 16 << 10;

// Waits for some sockets. Another thread can end the wait.
class Poller {
 public:
  Poller() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) network_error("eventfd", errno);
  }

  void wake() {
    const std::uint64_t one = 1;
    if (::write(wake_.file(), &one, sizeof one) < 0) return;  // the counter is full, so a wake-up is pending already
  }

  void clear() { files_.assign(1, {wake_.file(), POLLIN, 0}); }
  void add(int file, short events) { files_.push_back({file, events, 0}); }

  // Waits at most `patience`. Returns whether something happened.
  bool wait(std::chrono::microseconds patience) {
    const timespec limit{patience.count() / 1000000, patience.count() % 1000000 * 1000};
    if (ppoll(files_.data(), files_.size(), &limit, nullptr) <= 0) return false;
    std::uint64_t count;
    if (files_[0].revents && read(wake_.file(), &count, sizeof count) < 0 && errno != EAGAIN)
      network_error("eventfd", errno);
    return true;
  }

  bool ready(std::size_t i) const { return files_[i + 1].revents != 0; }  // the i-th socket that was added

 private:
  Socket wake_;
  std::vector<pollfd> files_;
};

class TcpSender : public TcpFrames {
 public:
  TcpSender(const Sockets& sockets, const MappedFile& memory) : memory_(memory) {
    for (const auto& [peer, socket] : sockets) links_[peer].socket = socket;
  }

  bool idle(int peer) const override { return links_.at(peer).frames.empty(); }
  void hold(bool held) override { held_ = held; }

  void put(int peer, const Chunk& chunk, const std::byte* data) override {
    send(peer, {{tcp_magic, FrameType::chunk, chunk}, data, {}});
  }
  void delivered(int peer, const Chunk& chunk) override {
    send(peer, {{tcp_magic, FrameType::delivered, chunk}, nullptr, {}});
  }
  void expect(int peer, const Chunk& chunk) override {
    send(peer, {{tcp_magic, FrameType::expectation, chunk}, nullptr, {}});
  }
  void close(int peer) override {
    Link& link = links_.at(peer);
    link.broken = true;
    link.frames.clear();
    shutdown(link.socket->file(), SHUT_RDWR);  // so that our receiver and the peer notice it, too
  }
  void announce(int peer, const Chunk& chunk) override {
    send(peer, {{tcp_magic, FrameType::announcement, chunk}, nullptr, {}});
  }
  void credit(int peer, Word received) override {
    Chunk count{};
    count.number = received;
    send(peer, {{tcp_magic, FrameType::credit, count}, nullptr, {}});
  }
  void abort(const std::string& why) override {
    for (auto& [peer, link] : links_) {
      if (link.broken) continue;
      OutgoingFrame frame{{tcp_magic, FrameType::abort, {}}, nullptr, why};
      frame.frame.chunk.bytes = why.size();
      // A frame that is half written must be completed. The streams may soon overwrite its data, so it is copied.
      // Nobody needs the frames behind it after a failure.
      const std::size_t keep = link.written > 0 ? 1 : 0;
      link.frames.erase(link.frames.begin() + keep, link.frames.end());
      if (keep && link.frames[0].data) {
        OutgoingFrame& half = link.frames[0];
        half.text.assign(reinterpret_cast<const char*>(half.data), half.frame.body());
        half.data = nullptr;
      }
      link.frames.push_back(std::move(frame));
    }
  }

  void progress(WireCallbacks& callbacks, std::chrono::microseconds patience) override {
    std::vector<std::pair<const int, Link>*> waiting;
    poller_.clear();
    for (auto& entry : links_) {
      if (entry.second.frames.empty() || (held_ && entry.second.frames.front().is_chunk())) continue;
      poller_.add(entry.second.socket->file(), POLLOUT);
      waiting.push_back(&entry);
    }
    if (!poller_.wait(patience)) return;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (!poller_.ready(i)) continue;
      auto& [peer, link] = *waiting[i];
      const std::string why = write_some(link);
      if (why.empty()) continue;
      close(peer);
      callbacks.lost(peer, why);
    }
  }

  void wake() override { poller_.wake(); }

 private:
  struct OutgoingFrame {
    Frame frame;
    const std::byte* data;
    std::string text;  // the text of an abort, or a copy of a chunk; `data` is null then
    bool is_chunk() const { return frame.type == FrameType::chunk; }
  };
  struct Link {
    std::shared_ptr<const Socket> socket;
    std::deque<OutgoingFrame> frames;
    std::size_t written = 0;  // bytes of the first frame
    bool broken = false;
  };

  void send(int peer, OutgoingFrame frame) {
    Link& link = links_.at(peer);
    if (link.broken) return;  // progress() has reported it
    link.frames.push_back(std::move(frame));
    if (link.frames.size() == 1) write_some(link);  // progress() will see an error again and report it
  }

  // Writes as much as the socket takes. Returns an error, or an empty text.
  std::string write_some(Link& link) const {
    while (!link.frames.empty()) {
      const OutgoingFrame& first = link.frames.front();
      const std::size_t end = sizeof(Frame) + first.frame.body();
      const bool from_file = first.data && memory_.has(first.data) && first.frame.body() >= smallest_from_file;
      const bool in_header = link.written < sizeof(Frame);
      const ssize_t size = from_file && !in_header ? write_from_file(link) : write_copy(link, from_file);
      if (size < 0) return errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
      link.written += size;
      if (link.written == end) {
        link.frames.pop_front();
        link.written = 0;
      } else if (!from_file || !in_header) {
        return "";  // the socket is full
      }
    }
    return "";
  }

  // Writes from the file of the memory: the system sends its pages, and does not copy them. So the peer receives what the
  // memory holds at that time. It is written to again when the peer has received it, or has said that it will not use it.
  ssize_t write_from_file(const Link& link) const {
    const OutgoingFrame& first = link.frames.front();
    const std::size_t done = link.written - sizeof(Frame);
    off_t place = first.data - memory_.start + static_cast<off_t>(done);
    return sendfile(link.socket->file(), memory_.file, &place, first.frame.body() - done);
  }

  static ssize_t write_copy(const Link& link, bool only_header) {
    const OutgoingFrame& first = link.frames.front();
    const std::size_t body = only_header ? 0 : first.frame.body();
    const auto* data = first.data ? first.data : reinterpret_cast<const std::byte*>(first.text.data());
    iovec parts[2];
    int count = 0;
    if (link.written < sizeof(Frame)) {
      auto* head = reinterpret_cast<const std::byte*>(&first.frame);
      parts[count++] = {const_cast<std::byte*>(head) + link.written, sizeof(Frame) - link.written};
    }
    const std::size_t offset = link.written < sizeof(Frame) ? 0 : link.written - sizeof(Frame);
    if (offset < body) parts[count++] = {const_cast<std::byte*>(data) + offset, body - offset};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    return sendmsg(link.socket->file(), &message, MSG_NOSIGNAL | (only_header ? MSG_MORE : 0));
  }

  const MappedFile memory_;
  Poller poller_;
  std::map<int, Link> links_;
  bool held_ = false;
};

class TcpReceiver : public WireReceiver {
 public:
  explicit TcpReceiver(const Sockets& sockets) {
    for (const auto& [peer, socket] : sockets) links_[peer].socket = socket;
  }

  void progress(WireCallbacks& callbacks, std::chrono::microseconds patience) override {
    poller_.clear();
    for (const auto& [peer, link] : links_)
      poller_.add(link.lost || (link.refused && !discards_) ? -1 : link.socket->file(), POLLIN);
    if (!poller_.wait(patience)) return;
    std::size_t i = 0;
    for (auto& [peer, link] : links_) {
      if (!poller_.ready(i++)) continue;
      link.refused = true;  // stays true if a callback throws
      const std::string why = read_some(peer, link, callbacks);
      link.refused = false;
      link.lost = !why.empty();
      if (link.lost) callbacks.lost(peer, why);
    }
  }

  void wake() override { poller_.wake(); }
  // The peers must be able to send their last frames, and say that they have failed, too. So what comes is still read.
  void discard() override {
    discards_ = true;
    for (auto& [peer, link] : links_)
      if (link.frame.type != FrameType::abort) link.destination = nullptr;
  }

 private:
  struct Link {
    std::shared_ptr<const Socket> socket;
    Frame frame{};
    std::size_t got = 0;  // bytes of the frame and its body so far
    std::byte* destination = nullptr;  // of the body; null if it is thrown away
    std::string text;                  // the text of an abort
    bool lost = false;                 // nothing can be read any more
    bool refused = false;              // a callback threw; nothing is read until discard()
  };

  // Reads at most to the end of one frame, so that every peer gets its turn. Returns an error, or an empty text.
  std::string read_some(int peer, Link& link, WireCallbacks& callbacks) {
    do {
      const bool in_header = link.got < sizeof(Frame);
      std::byte* target = in_header          ? reinterpret_cast<std::byte*>(&link.frame) + link.got
                          : link.destination ? link.destination + (link.got - sizeof(Frame))
                                             : rest_.data();
      std::size_t wanted = sizeof(Frame) + (in_header ? 0 : link.frame.body()) - link.got;
      if (!in_header && !link.destination) wanted = std::min(wanted, rest_.size());
      const ssize_t size = recv(link.socket->file(), target, wanted, 0);
      if (size == 0) return "it closed the connection";
      if (size < 0) return errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
      link.got += size;
      if (in_header && link.got == sizeof(Frame)) begin(peer, link, callbacks);
    } while (link.got < sizeof(Frame) || link.got < sizeof(Frame) + link.frame.body());
    link.got = 0;
    const Frame& frame = link.frame;
    if (frame.type == FrameType::abort) callbacks.aborted(peer, link.text);
    if (discards_) return "";
    if (frame.type == FrameType::chunk || frame.type == FrameType::delivered) callbacks.arrived(peer, frame.chunk);
    if (frame.type == FrameType::announcement) callbacks.announced(peer, frame.chunk);
    if (frame.type == FrameType::expectation) callbacks.expected(peer, frame.chunk);
    if (frame.type == FrameType::credit) callbacks.credited(peer, frame.chunk.number);
    return "";
  }

  // Called when the header of a frame is complete: finds the memory for its body.
  void begin(int peer, Link& link, WireCallbacks& callbacks) {
    const Frame& frame = link.frame;
    link.destination = nullptr;
    const bool bare = frame.type == FrameType::credit || frame.type == FrameType::announcement ||
                      frame.type == FrameType::expectation;
    const bool chunk = frame.type == FrameType::chunk || frame.type == FrameType::delivered;
    const bool known = bare || chunk || frame.type == FrameType::abort;
    if (frame.magic != tcp_magic || !known || (bare && frame.chunk.bytes != 0)) {
      link.lost = true;  // nobody knows where the next frame begins
      throw std::runtime_error("network: rank " + std::to_string(peer) + " uses another version of the protocol");
    }
    if (chunk && !discards_) link.destination = callbacks.destination(peer, frame.chunk);  // this also checks the chunk
    if (frame.type == FrameType::abort) {
      link.text.assign(std::min<std::uint64_t>(frame.chunk.bytes, 1 << 20), '\0');
      link.frame.chunk.bytes = link.text.size();
      link.destination = reinterpret_cast<std::byte*>(link.text.data());
    }
  }

  Poller poller_;
  std::map<int, Link> links_;
  bool discards_ = false;
  std::vector<std::byte> rest_ = std::vector<std::byte>(64 << 10);
};

}  // namespace

std::unique_ptr<TcpFrames> tcp_sender(const Sockets& sockets, const MappedFile& memory) {
  return std::make_unique<TcpSender>(sockets, memory);
}
std::unique_ptr<WireReceiver> tcp_receiver(const Sockets& sockets) { return std::make_unique<TcpReceiver>(sockets); }

}  // namespace freescale::transport
