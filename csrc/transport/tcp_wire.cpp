// The network over TCP: makes the connections, one socket for each pair of ranks on different hosts.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <thread>
#include <vector>

#include "tcp_greeting.h"

namespace freescale::transport {
namespace {

constexpr auto check_interval = std::chrono::milliseconds(100);
constexpr double longest_limit = 24 * 3600;  // seconds
constexpr std::size_t most_strangers = 64;  // connections that prove nothing; the oldest is dropped for a new one

void set(const Socket& socket, int level, int option, int value) {
  setsockopt(socket.file(), level, option, &value, sizeof value);  // a failure changes speed, not correctness
}

class TcpWire : public TcpConnections {
 public:
  TcpWire(int rank, const std::string& bind_to, std::string secret, double silence)
      : rank_(rank), secret_(std::move(secret)), silence_(silence) {
    ResolvedAddress address(bind_to, "0", AI_PASSIVE);
    listener_ = Socket(::socket(address.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener_) network_error("socket", errno);
    if (bind(listener_.file(), address.first->ai_addr, address.first->ai_addrlen) != 0)
      network_error("cannot bind " + bind_to + ", the address of this host (FREESCALE_ADDRESS)", errno);
    if (listen(listener_.file(), 1024) != 0) network_error("listen", errno);
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    getsockname(listener_.file(), reinterpret_cast<sockaddr*>(&bound), &size);
    char port[16];
    if (getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0)
      throw std::runtime_error("network: the listening port is unknown");
    address_ = bind_to + " " + port + " " + random_text();  // the text tells it from an earlier one at this address
  }

  std::string address() const override { return address_; }

  // Of each pair, the higher rank connects to the lower one. All connections are made at the same time, so a stranger
  // that connects and says nothing delays nobody.
  void connect(const std::map<int, WirePeer>& peers, Clock::time_point deadline,
               const std::function<void()>& check) override {
    for (const auto& [peer, to] : peers) {
      if (peer < rank_)
        connecting_.emplace_back(rank_, peer, to);
      else
        expected_.push_back(peer);
    }
    Clock::time_point next_check{};
    while (!connecting_.empty() || !expected_.empty()) {
      const auto now = Clock::now();
      if (now > deadline) throw std::runtime_error("network: " + what_is_missing());
      if (now >= next_check) {
        check();
        next_check = now + check_interval;
      }
      wait();
      step();
    }
    listener_ = Socket();
    accepted_.clear();
  }

  std::unique_ptr<WireSender> sender(const std::vector<int>& peers) override {
    return tcp_sender(sockets(peers));
  }
  std::unique_ptr<WireReceiver> receiver(const std::vector<int>& peers) override {
    return tcp_receiver(sockets(peers));
  }
  const Sockets& sockets() const override { return sockets_; }
  Sockets sockets(const std::vector<int>& peers) const override {
    Sockets some;
    for (const int peer : peers) some[peer] = sockets_.at(peer);
    return some;
  }

 private:
  std::string what_is_missing() const {
    if (!connecting_.empty()) return connecting_.front().problem();
    std::string ranks;
    for (const int peer : expected_) ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
    return "rank " + ranks + " did not connect to rank " + std::to_string(rank_) + " at " +
           address_.substr(0, address_.rfind(' ')) +
           " in time; check that the other hosts can reach this address and that their FREESCALE_SECRET is the same, "
           "or set FREESCALE_ADDRESS";
  }

  // Waits a short time until a socket has something to do.
  void wait() {
    std::vector<pollfd> files;
    if (!expected_.empty()) files.push_back({listener_.file(), POLLIN, 0});
    for (const auto& greeting : connecting_)
      if (greeting.file() >= 0) files.push_back({greeting.file(), greeting.events(), 0});
    for (const auto& greeting : accepted_) files.push_back({greeting.file(), POLLIN, 0});
    if (::poll(files.data(), files.size(), 20) < 0 && errno != EINTR) network_error("poll", errno);
  }

  void step() {
    const auto now = Clock::now();
    if (!expected_.empty()) accept_all(now);
    for (auto greeting = connecting_.begin(); greeting != connecting_.end();) {
      if (!greeting->step(now)) {
        ++greeting;
        continue;
      }
      add_socket(greeting->peer(), greeting->take());
      greeting = connecting_.erase(greeting);
    }
    for (auto greeting = accepted_.begin(); greeting != accepted_.end();) {
      const auto state = greeting->step(now);
      if (state == ListeningGreeting::State::waiting) {
        ++greeting;
        continue;
      }
      const auto place = std::find(expected_.begin(), expected_.end(), greeting->peer());
      if (state == ListeningGreeting::State::accepted && place != expected_.end()) {
        add_socket(greeting->peer(), greeting->take());
        expected_.erase(place);
      }
      greeting = accepted_.erase(greeting);
    }
  }

  void accept_all(Clock::time_point now) {
    while (true) {
      Socket socket(accept4(listener_.file(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
          network_error("rank " + std::to_string(rank_) +
                            " cannot accept a connection of another rank; raise the limit of open files (ulimit -n)",
                        errno);
        return;  // nobody waits, or the one who waited has gone
      }
      if (accepted_.size() >= expected_.size() + most_strangers) accepted_.pop_front();
      accepted_.emplace_back(std::move(socket), rank_, address_, secret_, now);
    }
  }

  void add_socket(int peer, Socket socket) {
    set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    // The kernel accepts more bytes only while fewer than this wait to be sent. The rest stays in our buffers, where urgent
    // chunks can overtake it and where it stays in the processor's cache until it is sent.
    set(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 512 << 10);
    // Detects a host that lost power. The system also takes this limit for the probes of an idle connection.
    set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min(silence_, longest_limit) * 1000));  // milliseconds
    set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    sockets_[peer] = std::make_shared<const Socket>(std::move(socket));
  }

  const int rank_;
  const std::string secret_;
  const double silence_;  // seconds
  std::string address_;
  Socket listener_;
  std::list<ConnectingGreeting> connecting_;
  std::list<ListeningGreeting> accepted_;
  std::vector<int> expected_;  // the higher ranks that have not connected yet
  Sockets sockets_;
};

// A text that is sent to a peer, and one that is received from it. Before each of them goes its size.
struct Swap {
  std::string out, in;
  std::size_t written = 0;
  bool done() const {
    std::uint64_t size;
    if (written < out.size() || in.size() < sizeof size) return false;
    std::memcpy(&size, in.data(), sizeof size);
    if (size > longest) throw std::runtime_error("network: a peer uses another version of the protocol");
    return in.size() == sizeof size + size;
  }
  void step(const Socket& socket) {
    const ssize_t sent = ::send(socket.file(), out.data() + written, out.size() - written, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) network_error("a peer cannot be reached", errno);
    if (sent > 0) written += sent;
    // Reads no more than this text, because frames of the peer may follow.
    std::uint64_t size = 0;
    if (in.size() >= sizeof size) std::memcpy(&size, in.data(), sizeof size);
    char buffer[4096];
    const std::size_t end = sizeof size + (in.size() < sizeof size ? 0 : std::min<std::uint64_t>(size, longest));
    const std::size_t wanted = std::min(sizeof buffer, (in.size() < sizeof size ? sizeof size : end) - in.size());
    if (wanted == 0) return;
    const ssize_t got = recv(socket.file(), buffer, wanted, 0);
    if (got == 0) throw std::runtime_error("network: a peer closed the connection during the set-up");
    if (got < 0 && errno != EAGAIN && errno != EINTR) network_error("a peer cannot be reached", errno);
    if (got > 0) in.append(buffer, got);
  }
  static constexpr std::uint64_t longest = 16 << 20;
};

}  // namespace

std::map<int, std::string> swap_texts(const Sockets& sockets, const std::map<int, std::string>& texts,
                                      Clock::time_point deadline, const std::function<void()>& check) {
  std::map<int, Swap> swaps;
  for (const auto& [peer, text] : texts) {
    const std::uint64_t size = text.size();
    swaps[peer].out = std::string(reinterpret_cast<const char*>(&size), sizeof size) + text;
  }
  const auto done = [](const auto& entry) { return entry.second.done(); };
  Clock::time_point next_check{};
  while (!std::all_of(swaps.begin(), swaps.end(), done)) {
    const auto now = Clock::now();
    if (now > deadline) throw std::runtime_error("network: not all peers have described their rings in time");
    if (now >= next_check) {
      check();
      next_check = now + check_interval;
    }
    for (auto& [peer, swap] : swaps)
      if (!swap.done()) swap.step(*sockets.at(peer));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  std::map<int, std::string> received;
  for (auto& [peer, swap] : swaps) received[peer] = swap.in.substr(sizeof(std::uint64_t));
  return received;
}

std::unique_ptr<TcpConnections> tcp_connections(int rank, const std::string& bind_to, const std::string& secret,
                                                double silence) {
  return std::make_unique<TcpWire>(rank, bind_to, secret, silence);
}

std::unique_ptr<Wire> tcp_wire(int rank, const std::string& bind_to, const std::string& secret, double silence) {
  return tcp_connections(rank, bind_to, secret, silence);
}

bool is_loopback(const std::string& address) {
  const ResolvedAddress resolved(address, "0", AI_PASSIVE);
  if (resolved.first->ai_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(resolved.first->ai_addr);
    return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(resolved.first->ai_addr);
  return resolved.first->ai_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

}  // namespace freescale::transport
