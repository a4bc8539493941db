// The network over TCP: sends frames to some peers, and receives frames from some peers. Each chunk is one frame.
#include <poll.h>
#include <sys/eventfd.h>
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
  explicit TcpSender(const Sockets& sockets) {
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

  static std::string write_some(Link& link) {
    while (!link.frames.empty()) {
      const OutgoingFrame& first = link.frames.front();
      const std::size_t body = first.frame.body();
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
      const ssize_t size = sendmsg(link.socket->file(), &message, MSG_NOSIGNAL);
      if (size < 0) return errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
      link.written += size;
      if (link.written < sizeof(Frame) + body) return "";
      link.frames.pop_front();
      link.written = 0;
    }
    return "";
  }

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
    for (const auto& [peer, link] : links_) poller_.add(link.broken ? -1 : link.socket->file(), POLLIN);
    if (!poller_.wait(patience)) return;
    std::size_t i = 0;
    for (auto& [peer, link] : links_) {
      if (!poller_.ready(i++)) continue;
      link.broken = true;  // stays true if a callback throws, because the frame is then half read
      const std::string why = discards_ ? throw_away(link) : read_some(peer, link, callbacks);
      link.broken = !why.empty();
      if (link.broken) callbacks.lost(peer, why);
    }
  }

  void wake() override { poller_.wake(); }
  void discard() override { discards_ = true; }

 private:
  struct Link {
    std::shared_ptr<const Socket> socket;
    Frame frame{};
    std::size_t got = 0;  // bytes of the frame and its body so far
    std::byte* destination = nullptr;
    std::string text;  // the text of an abort
    bool broken = false;
  };

  // The peer must be able to send its last frames, so what comes is read.
  std::string throw_away(Link& link) {
    const ssize_t size = recv(link.socket->file(), rest_.data(), rest_.size(), 0);
    if (size == 0) return "it closed the connection";
    return size > 0 || errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
  }

  // Reads at most to the end of one frame, so that every peer gets its turn. Returns an error, or an empty text.
  static std::string read_some(int peer, Link& link, WireCallbacks& callbacks) {
    do {
      const bool in_header = link.got < sizeof(Frame);
      std::byte* target = in_header ? reinterpret_cast<std::byte*>(&link.frame) + link.got
                                  : link.destination + (link.got - sizeof(Frame));
      const std::size_t end = sizeof(Frame) + (in_header ? 0 : link.frame.body());
      const ssize_t size = recv(link.socket->file(), target, end - link.got, 0);
      if (size == 0) return "it closed the connection";
      if (size < 0) return errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
      link.got += size;
      if (in_header && link.got == sizeof(Frame)) begin(peer, link, callbacks);
    } while (link.got < sizeof(Frame) || link.got < sizeof(Frame) + link.frame.body());
    link.got = 0;
    const Frame& frame = link.frame;
    if (frame.type == FrameType::chunk || frame.type == FrameType::delivered) callbacks.arrived(peer, frame.chunk);
    if (frame.type == FrameType::announcement) callbacks.announced(peer, frame.chunk);
    if (frame.type == FrameType::expectation) callbacks.expected(peer, frame.chunk);
    if (frame.type == FrameType::credit) callbacks.credited(peer, frame.chunk.number);
    if (frame.type == FrameType::abort) callbacks.aborted(peer, link.text);
    return "";
  }

  // Called when the header of a frame is complete: finds the memory for its body.
  static void begin(int peer, Link& link, WireCallbacks& callbacks) {
    const Frame& frame = link.frame;
    const bool bare = frame.type == FrameType::credit || frame.type == FrameType::announcement ||
                      frame.type == FrameType::expectation;
    const bool chunk = frame.type == FrameType::chunk || frame.type == FrameType::delivered;
    const bool known = bare || chunk || frame.type == FrameType::abort;
    if (frame.magic != tcp_magic || !known || (bare && frame.chunk.bytes != 0))
      throw std::runtime_error("network: rank " + std::to_string(peer) + " uses another version of the protocol");
    if (chunk) link.destination = callbacks.destination(peer, frame.chunk);  // this also checks the chunk
    if (frame.type == FrameType::abort) {
      link.text.assign(std::min<std::uint64_t>(frame.chunk.bytes, 1 << 20), '\0');
      link.frame.chunk.bytes = link.text.size();
      link.destination = reinterpret_cast<std::byte*>(link.text.data());
    }
  }

  Poller poller_;
  std::map<int, Link> links_;
  bool discards_ = false;
  std::vector<char> rest_ = std::vector<char>(64 << 10);
};

}  // namespace

std::unique_ptr<TcpFrames> tcp_sender(const Sockets& sockets) { return std::make_unique<TcpSender>(sockets); }
std::unique_ptr<WireReceiver> tcp_receiver(const Sockets& sockets) { return std::make_unique<TcpReceiver>(sockets); }

}  // namespace freescale::transport
