// The wire over TCP: one socket per pair of ranks, one frame per chunk.
#include "transport_wire.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace freescale::transport {
namespace {

constexpr Word magic = 0xF5CA1E01;  // also tells a peer of the other byte order

enum class What : Word { chunk = 1, credit = 2, abort = 3 };

struct Frame {
  Word magic;
  What what;
  Chunk chunk;  // `bytes` follow: of the chunk, or of an abort's text; the `number` of a credit is its count
};

struct Hello {
  Word magic;
  std::int32_t rank;
  char token[32];  // of the listener: whoever knows it belongs to the group
};

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error("network: " + what + ": " + std::strerror(error));
}

class Socket {
 public:
  explicit Socket(int file = -1) : file_(file) {}
  Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~Socket() {
    if (file_ >= 0) close(file_);
  }
  int file() const { return file_; }
  explicit operator bool() const { return file_ >= 0; }

 private:
  int file_;
};

void set(const Socket& socket, int level, int option, int value) {
  setsockopt(socket.file(), level, option, &value, sizeof value);  // each of these only makes things faster or clearer
}

bool wait_for(const Socket& socket, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd one{socket.file(), events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<long long>(left, 1000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail("poll", errno);
  }
}

struct Resolved {
  explicit Resolved(const std::string& host, const std::string& port, int flags) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &first))
      throw std::runtime_error("network: cannot resolve '" + host + "': " + gai_strerror(error));
  }
  ~Resolved() { freeaddrinfo(first); }
  addrinfo* first = nullptr;
};

std::string random_token() {
  static constexpr char digits[] = "0123456789abcdef";
  std::random_device entropy;
  std::string token;
  for (std::size_t i = 0; i < sizeof Hello{}.token; ++i) token += digits[entropy() % 16];
  return token;
}

// One peer: a socket, the frame being read, and the frames still to be written.
struct Link {
  Socket socket;
  Frame reading{};
  std::size_t got = 0;          // bytes of the frame and what follows it, so far
  std::byte* landing = nullptr;
  std::string text;             // of an abort
  struct Outgoing {
    Frame frame;
    const std::byte* data;
    std::string text;  // owns the data of an abort
  };
  std::deque<Outgoing> writing;
  std::size_t written = 0;  // of the first one
};

class TcpWire : public Wire {
 public:
  TcpWire(int rank, const std::string& bind_to) : rank_(rank), token_(random_token()) {
    Resolved address(bind_to, "0", AI_PASSIVE);
    listener_ = Socket(::socket(address.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener_) fail("socket", errno);
    if (bind(listener_.file(), address.first->ai_addr, address.first->ai_addrlen) != 0)
      fail("cannot bind " + bind_to, errno);
    if (listen(listener_.file(), 128) != 0) fail("listen", errno);
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    getsockname(listener_.file(), reinterpret_cast<sockaddr*>(&bound), &size);
    char port[16];
    if (getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0)
      throw std::runtime_error("network: the listening port is unknown");
    address_ = bind_to + " " + port + " " + token_;
    wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) fail("eventfd", errno);
  }

  std::string address() const override { return address_; }

  // The higher rank of a pair calls the lower one.
  void connect(const std::map<int, std::string>& peers, Clock::time_point deadline) override {
    std::size_t expected = 0;
    for (const auto& [peer, address] : peers) {
      if (peer < rank_)
        adopt(peer, call(peer, address, deadline));
      else
        ++expected;
    }
    while (expected > 0) {
      if (!wait_for(listener_, POLLIN, deadline))
        throw std::runtime_error("network: rank " + std::to_string(rank_) + " waited in vain for " +
                                 std::to_string(expected) + " rank(s) to connect to " +
                                 address_.substr(0, address_.rfind(' ')));
      Socket socket(accept4(listener_.file(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) continue;
      const int peer = greeting(socket, deadline);
      if (peer <= rank_ || !peers.count(peer) || links_.count(peer)) continue;  // a stranger: hang up
      adopt(peer, std::move(socket));
      --expected;
    }
    listener_ = Socket();
  }

  bool idle(int peer) const override {
    const auto link = links_.find(peer);
    return link == links_.end() || link->second.writing.empty();
  }

  void put(int peer, const Chunk& chunk, const std::byte* data) override {
    send(peer, {{magic, What::chunk, chunk}, data, {}});
  }
  void credit(int peer, Word received) override {
    Chunk count{};
    count.number = received;
    send(peer, {{magic, What::credit, count}, nullptr, {}});
  }
  void abort(const std::string& why) override {
    for (auto& [peer, link] : links_) {
      if (!link.socket) continue;
      Link::Outgoing frame{{magic, What::abort, {}}, nullptr, why};
      frame.frame.chunk.bytes = why.size();
      // Behind the frame that is half written, before the rest: those will not be wanted.
      const std::size_t keep = link.written > 0 ? 1 : 0;
      link.writing.erase(link.writing.begin() + keep, link.writing.end());
      link.writing.push_back(std::move(frame));
    }
  }

  void progress(WireEvents& events, std::chrono::microseconds patience) override {
    std::vector<pollfd> files{{wake_.file(), POLLIN, 0}};
    std::vector<int> peers{-1};
    for (auto& [peer, link] : links_) {
      if (!link.socket) continue;
      files.push_back({link.socket.file(), static_cast<short>(link.writing.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      peers.push_back(peer);
    }
    const timespec wait{patience.count() / 1000000, patience.count() % 1000000 * 1000};
    if (ppoll(files.data(), files.size(), &wait, nullptr) <= 0) return;
    if (files[0].revents) {
      std::uint64_t count;
      if (read(wake_.file(), &count, sizeof count) < 0 && errno != EAGAIN) fail("eventfd", errno);
    }
    for (std::size_t i = 1; i < files.size(); ++i) {
      Link& link = links_.at(peers[i]);
      std::string broken;
      if (files[i].revents & POLLOUT) broken = write_some(link);
      if (broken.empty() && files[i].revents & (POLLIN | POLLHUP | POLLERR)) broken = read_some(peers[i], link, events);
      if (broken.empty()) continue;
      link.socket = Socket();
      link.writing.clear();
      events.lost(peers[i], broken);
    }
  }

  void wake() override {
    const std::uint64_t one = 1;
    if (::write(wake_.file(), &one, sizeof one) < 0) return;  // full: it is awake already
  }

 private:
  void adopt(int peer, Socket socket) {
    set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);  // milliseconds: a host that lost power is noticed
    set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
    fcntl(socket.file(), F_SETFL, fcntl(socket.file(), F_GETFL) | O_NONBLOCK);
    links_[peer].socket = std::move(socket);
  }

  Socket call(int peer, const std::string& address, Clock::time_point deadline) const {
    const std::size_t first = address.find(' '), last = address.rfind(' ');
    if (first == std::string::npos || last <= first || address.size() - last - 1 != sizeof Hello{}.token)
      throw std::runtime_error("network: rank " + std::to_string(peer) + " gave no address");
    Resolved resolved(address.substr(0, first), address.substr(first + 1, last - first - 1), 0);
    Socket socket(::socket(resolved.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) fail("socket", errno);
    while (::connect(socket.file(), resolved.first->ai_addr, resolved.first->ai_addrlen) != 0) {
      if (errno != EINTR && (errno != ECONNREFUSED || Clock::now() > deadline))
        fail("rank " + std::to_string(rank_) + " cannot reach rank " + std::to_string(peer) + " at " +
                 address.substr(0, last),
             errno);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    Hello hello{magic, rank_, {}};
    std::memcpy(hello.token, address.data() + last + 1, sizeof hello.token);
    if (::send(socket.file(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
      fail("send", errno);
    return socket;
  }

  // The rank that calls, or -1 for a stranger.
  int greeting(const Socket& socket, Clock::time_point deadline) const {
    Hello hello{};
    std::size_t got = 0;
    deadline = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    while (got < sizeof hello) {
      if (!wait_for(socket, POLLIN, deadline)) return -1;
      const ssize_t size = recv(socket.file(), reinterpret_cast<char*>(&hello) + got, sizeof hello - got, 0);
      if (size <= 0) return -1;
      got += size;
    }
    const bool friendly = hello.magic == magic && std::memcmp(hello.token, token_.data(), sizeof hello.token) == 0;
    return friendly ? hello.rank : -1;
  }

  void send(int peer, Link::Outgoing frame) {
    Link& link = links_.at(peer);
    if (!link.socket) return;  // lost, and reported
    link.writing.push_back(std::move(frame));
    if (link.writing.size() == 1) write_some(link);  // an error shows again in progress()
  }

  static std::string write_some(Link& link) {
    while (!link.writing.empty()) {
      const Link::Outgoing& first = link.writing.front();
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
      const ssize_t size = sendmsg(link.socket.file(), &message, MSG_NOSIGNAL);
      if (size < 0) return errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
      link.written += size;
      if (link.written < sizeof(Frame) + body) return "";
      link.writing.pop_front();
      link.written = 0;
    }
    return "";
  }

  // Reads to the end of one frame at most, so that every peer gets its turn.
  static std::string read_some(int peer, Link& link, WireEvents& events) {
    do {
      const bool in_head = link.got < sizeof(Frame);
      std::byte* target = in_head ? reinterpret_cast<std::byte*>(&link.reading) + link.got
                                  : link.landing + (link.got - sizeof(Frame));
      const std::size_t end = sizeof(Frame) + (in_head ? 0 : link.reading.chunk.bytes);
      const ssize_t size = recv(link.socket.file(), target, end - link.got, 0);
      if (size == 0) return "it closed the connection";
      if (size < 0) return errno == EAGAIN || errno == EINTR ? "" : std::strerror(errno);
      link.got += size;
      if (in_head && link.got == sizeof(Frame)) begin(peer, link, events);
    } while (link.got < sizeof(Frame) || link.got < sizeof(Frame) + link.reading.chunk.bytes);
    link.got = 0;
    const Frame& frame = link.reading;
    if (frame.what == What::chunk) events.arrived(peer, frame.chunk);
    if (frame.what == What::credit) events.credited(peer, frame.chunk.number);
    if (frame.what == What::abort) events.aborted(peer, link.text);
    return "";
  }

  // The head of a frame is there: find a place for its body.
  static void begin(int peer, Link& link, WireEvents& events) {
    const Frame& frame = link.reading;
    if (frame.magic != magic)
      throw std::runtime_error("network: rank " + std::to_string(peer) + " speaks another protocol");
    if (frame.what == What::chunk) link.landing = events.landing(peer, frame.chunk);
    if (frame.what == What::abort) {
      link.text.assign(std::min<std::uint64_t>(frame.chunk.bytes, 1 << 20), '\0');
      link.reading.chunk.bytes = link.text.size();
      link.landing = reinterpret_cast<std::byte*>(link.text.data());
    }
  }

  int rank_;
  std::string token_, address_;
  Socket listener_, wake_;
  std::map<int, Link> links_;
};

}  // namespace

std::unique_ptr<Wire> tcp_wire(int rank, const std::string& bind_to) {
  return std::make_unique<TcpWire>(rank, bind_to);
}

}  // namespace freescale::transport
