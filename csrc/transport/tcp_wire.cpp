// The network over TCP: makes the connections, one socket for each pair of ranks on different hosts.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <thread>
#include <vector>

#include "tcp.h"

namespace freescale::transport {
namespace {

struct Hello {
  Word magic;
  std::int32_t rank;
  char token[32];  // the random token of the listener, which only ranks of the group know
};

void set(const Socket& socket, int level, int option, int value) {
  setsockopt(socket.file(), level, option, &value, sizeof value);  // a failure changes speed, not correctness
}

bool wait_for(const Socket& socket, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd one{socket.file(), events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<long long>(left, 1000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) network_error("poll", errno);
  }
}

struct ResolvedAddress {
  explicit ResolvedAddress(const std::string& host, const std::string& port, int flags) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &first))
      throw std::runtime_error("network: cannot resolve '" + host + "': " + gai_strerror(error));
  }
  ~ResolvedAddress() { freeaddrinfo(first); }
  addrinfo* first = nullptr;
};

std::string random_token() {
  static constexpr char digits[] = "0123456789abcdef";
  std::random_device entropy;
  std::string token;
  for (std::size_t i = 0; i < sizeof Hello{}.token; ++i) token += digits[entropy() % 16];
  return token;
}

class TcpWire : public Wire {
 public:
  TcpWire(int rank, const std::string& bind_to) : rank_(rank), token_(random_token()) {
    ResolvedAddress address(bind_to, "0", AI_PASSIVE);
    listener_ = Socket(::socket(address.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener_) network_error("socket", errno);
    if (bind(listener_.file(), address.first->ai_addr, address.first->ai_addrlen) != 0)
      network_error("cannot bind " + bind_to, errno);
    if (listen(listener_.file(), 128) != 0) network_error("listen", errno);
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    getsockname(listener_.file(), reinterpret_cast<sockaddr*>(&bound), &size);
    char port[16];
    if (getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0)
      throw std::runtime_error("network: the listening port is unknown");
    address_ = bind_to + " " + port + " " + token_;
  }

  std::string address() const override { return address_; }

  // Of each pair, the higher rank connects to the lower one.
  void connect(const std::map<int, std::string>& peers, Clock::time_point deadline) override {
    std::size_t expected = 0;
    for (const auto& [peer, address] : peers) {
      if (peer < rank_)
        add_socket(peer, connect_to(peer, address, deadline));
      else
        ++expected;
    }
    while (expected > 0) {
      if (!wait_for(listener_, POLLIN, deadline))
        throw std::runtime_error("network: " + std::to_string(expected) + " rank(s) did not connect to rank " +
                                 std::to_string(rank_) + " at " + address_.substr(0, address_.rfind(' ')) +
                                 " in time; check that the other hosts can reach this address, or set "
                                 "FREESCALE_ADDRESS");
      Socket socket(accept4(listener_.file(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) continue;
      const int peer = read_hello(socket, deadline);
      if (peer <= rank_ || !peers.count(peer) || sockets_.count(peer)) continue;  // not an expected rank: disconnect
      add_socket(peer, std::move(socket));
      --expected;
    }
    listener_ = Socket();
  }

  std::unique_ptr<WireSender> sender(const std::vector<int>& peers) override {
    return tcp_sender(sockets_of(peers));
  }
  std::unique_ptr<WireEndpoint> receiver(const std::vector<int>& peers) override {
    return tcp_receiver(sockets_of(peers));
  }

 private:
  Sockets sockets_of(const std::vector<int>& peers) const {
    Sockets some;
    for (const int peer : peers) some[peer] = sockets_.at(peer);
    return some;
  }

  void add_socket(int peer, Socket socket) {
    set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);  // milliseconds; detects a host that lost power
    set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
    fcntl(socket.file(), F_SETFL, fcntl(socket.file(), F_GETFL) | O_NONBLOCK);
    sockets_[peer] = std::make_shared<const Socket>(std::move(socket));
  }

  Socket connect_to(int peer, const std::string& address, Clock::time_point deadline) const {
    const std::size_t first = address.find(' '), last = address.rfind(' ');
    if (first == std::string::npos || last <= first || address.size() - last - 1 != sizeof Hello{}.token)
      throw std::runtime_error("network: rank " + std::to_string(peer) + " published no valid address");
    ResolvedAddress resolved(address.substr(0, first), address.substr(first + 1, last - first - 1), 0);
    Socket socket(::socket(resolved.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) network_error("socket", errno);
    while (::connect(socket.file(), resolved.first->ai_addr, resolved.first->ai_addrlen) != 0) {
      if (errno != EINTR && (errno != ECONNREFUSED || Clock::now() > deadline))
        network_error("rank " + std::to_string(rank_) + " cannot reach rank " + std::to_string(peer) + " at " +
                          address.substr(0, last),
                      errno);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    Hello hello{tcp_magic, rank_, {}};
    std::memcpy(hello.token, address.data() + last + 1, sizeof hello.token);
    if (::send(socket.file(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
      network_error("send", errno);
    return socket;
  }

  // The rank at the other end, or -1 if it is not a rank of the group.
  int read_hello(const Socket& socket, Clock::time_point deadline) const {
    Hello hello{};
    std::size_t got = 0;
    deadline = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    while (got < sizeof hello) {
      if (!wait_for(socket, POLLIN, deadline)) return -1;
      const ssize_t size = recv(socket.file(), reinterpret_cast<char*>(&hello) + got, sizeof hello - got, 0);
      if (size <= 0) return -1;
      got += size;
    }
    const bool member = hello.magic == tcp_magic && std::memcmp(hello.token, token_.data(), sizeof hello.token) == 0;
    return member ? hello.rank : -1;
  }

  int rank_;
  std::string token_, address_;
  Socket listener_;
  Sockets sockets_;
};

}  // namespace

std::unique_ptr<Wire> tcp_wire(int rank, const std::string& bind_to) {
  return std::make_unique<TcpWire>(rank, bind_to);
}

}  // namespace freescale::transport
