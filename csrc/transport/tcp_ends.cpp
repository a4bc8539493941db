// The ends of TCP links: frames to some peers, and frames from some peers. One frame per chunk.
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

enum class What : Word { chunk = 1, credit = 2, abort = 3 };

struct Frame {
  Word magic;
  What what;
  Chunk chunk;  // `bytes` follow: of the chunk, or of an abort's text; the `number` of a credit is its count
};

// Some sockets, and a way to end the wait for them.
class Poll {
 public:
  Poll() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) network_error("eventfd", errno);
  }

  void wake() {
    const std::uint64_t one = 1;
    if (::write(wake_.file(), &one, sizeof one) < 0) return;  // full: it is awake already
  }

  void clear() { files_.assign(1, {wake_.file(), POLLIN, 0}); }
  void add(int file, short events) { files_.push_back({file, events, 0}); }

  // Whether something happened within `patience`.
  bool wait(std::chrono::microseconds patience) {
    const timespec limit{patience.count() / 1000000, patience.count() % 1000000 * 1000};
    if (ppoll(files_.data(), files_.size(), &limit, nullptr) <= 0) return false;
    std::uint64_t count;
    if (files_[0].revents && read(wake_.file(), &count, sizeof count) < 0 && errno != EAGAIN)
      network_error("eventfd", errno);
    return true;
  }

  bool ready(std::size_t i) const { return files_[i + 1].revents != 0; }  // the i-th that was added

 private:
  Socket wake_;
  std::vector<pollfd> files_;
};

class TcpSender : public Sender {
 public:
  explicit TcpSender(const Sockets& sockets) {
    for (const auto& [peer, socket] : sockets) links_[peer].socket = socket;
  }

  bool idle(int peer) const override { return links_.at(peer).frames.empty(); }

  void put(int peer, const Chunk& chunk, const std::byte* data) override {
    send(peer, {{tcp_magic, What::chunk, chunk}, data, {}});
  }
  void credit(int peer, Word received) override {
    Chunk count{};
    count.number = received;
    send(peer, {{tcp_magic, What::credit, count}, nullptr, {}});
  }
  void abort(const std::string& why) override {
    for (auto& [peer, link] : links_) {
      if (link.broken) continue;
      Outgoing frame{{tcp_magic, What::abort, {}}, nullptr, why};
      frame.frame.chunk.bytes = why.size();
      // Behind the frame that is half written, before the rest: those will not be wanted.
      const std::size_t keep = link.written > 0 ? 1 : 0;
      link.frames.erase(link.frames.begin() + keep, link.frames.end());
      link.frames.push_back(std::move(frame));
    }
  }

  void progress(WireEvents& events, std::chrono::microseconds patience) override {
    std::vector<std::pair<const int, Link>*> waiting;
    poll_.clear();
    for (auto& entry : links_) {
      if (entry.second.frames.empty()) continue;
      poll_.add(entry.second.socket->file(), POLLOUT);
      waiting.push_back(&entry);
    }
    if (!poll_.wait(patience)) return;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (!poll_.ready(i)) continue;
      auto& [peer, link] = *waiting[i];
      const std::string why = write_some(link);
      if (why.empty()) continue;
      link.broken = true;
      link.frames.clear();
      shutdown(link.socket->file(), SHUT_RDWR);  // the receiver sees it, too
      events.lost(peer, why);
    }
  }

  void wake() override { poll_.wake(); }

 private:
  struct Outgoing {
    Frame frame;
    const std::byte* data;
    std::string text;  // owns the data of an abort
  };
  struct Link {
    std::shared_ptr<const Socket> socket;
    std::deque<Outgoing> frames;
    std::size_t written = 0;  // of the first one
    bool broken = false;
  };

  void send(int peer, Outgoing frame) {
    Link& link = links_.at(peer);
    if (link.broken) return;  // and reported
    link.frames.push_back(std::move(frame));
    if (link.frames.size() == 1) write_some(link);  // an error shows again in progress()
  }

  static std::string write_some(Link& link) {
    while (!link.frames.empty()) {
      const Outgoing& first = link.frames.front();
      const std::size_t body = first.frame.chunk.bytes;
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

  Poll poll_;
  std::map<int, Link> links_;
};

class TcpReceiver : public WireEnd {
 public:
  explicit TcpReceiver(const Sockets& sockets) {
    for (const auto& [peer, socket] : sockets) links_[peer].socket = socket;
  }

  void progress(WireEvents& events, std::chrono::microseconds patience) override {
    poll_.clear();
    for (const auto& [peer, link] : links_) poll_.add(link.broken ? -1 : link.socket->file(), POLLIN);
    if (!poll_.wait(patience)) return;
    std::size_t i = 0;
    for (auto& [peer, link] : links_) {
      if (!poll_.ready(i++)) continue;
      link.broken = true;  // what throws leaves a frame half read
      const std::string why = read_some(peer, link, events);
      link.broken = !why.empty();
      if (link.broken) events.lost(peer, why);
    }
  }

  void wake() override { poll_.wake(); }

 private:
  struct Link {
    std::shared_ptr<const Socket> socket;
    Frame frame{};
    std::size_t got = 0;  // bytes of the frame and what follows it, so far
    std::byte* landing = nullptr;
    std::string text;  // of an abort
    bool broken = false;
  };

  // Reads to the end of one frame at most, so that every peer gets its turn.
  static std::string read_some(int peer, Link& link, WireEvents& events) {
    do {
      const bool in_head = link.got < sizeof(Frame);
      std::byte* target = in_head ? reinterpret_cast<std::byte*>(&link.frame) + link.got
                                  : link.landing + (link.got - sizeof(Frame));
      const std::size_t end = sizeof(Frame) + (in_head ? 0 : link.frame.chunk.bytes);
      const ssize_t size = recv(link.socket->file(), target, end - link.got, 0);
      if (size == 0) return "it closed the connection";
      if (size < 0) return errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
      link.got += size;
      if (in_head && link.got == sizeof(Frame)) begin(peer, link, events);
    } while (link.got < sizeof(Frame) || link.got < sizeof(Frame) + link.frame.chunk.bytes);
    link.got = 0;
    const Frame& frame = link.frame;
    if (frame.what == What::chunk) events.arrived(peer, frame.chunk);
    if (frame.what == What::credit) events.credited(peer, frame.chunk.number);
    if (frame.what == What::abort) events.aborted(peer, link.text);
    return "";
  }

  // The head of a frame is there: find a place for its body.
  static void begin(int peer, Link& link, WireEvents& events) {
    const Frame& frame = link.frame;
    const bool known = frame.what == What::chunk || frame.what == What::credit || frame.what == What::abort;
    if (frame.magic != tcp_magic || !known || (frame.what == What::credit && frame.chunk.bytes != 0))
      throw std::runtime_error("network: rank " + std::to_string(peer) + " speaks another protocol");
    if (frame.what == What::chunk) link.landing = events.landing(peer, frame.chunk);
    if (frame.what == What::abort) {
      link.text.assign(std::min<std::uint64_t>(frame.chunk.bytes, 1 << 20), '\0');
      link.frame.chunk.bytes = link.text.size();
      link.landing = reinterpret_cast<std::byte*>(link.text.data());
    }
  }

  Poll poll_;
  std::map<int, Link> links_;
};

}  // namespace

std::unique_ptr<Sender> tcp_sender(const Sockets& sockets) { return std::make_unique<TcpSender>(sockets); }
std::unique_ptr<WireEnd> tcp_receiver(const Sockets& sockets) { return std::make_unique<TcpReceiver>(sockets); }

}  // namespace freescale::transport
