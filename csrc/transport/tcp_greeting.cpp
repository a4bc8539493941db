// The mutual proof of the secret over a new TCP connection.
#include "tcp_greeting.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace freescale::transport {
namespace {

constexpr auto retry_interval = std::chrono::milliseconds(50);
constexpr auto stranger_limit = std::chrono::seconds(20);  // for a connection that proves nothing; others go on meanwhile

// A greeting is shorter than the buffer of a new socket, so it is sent in one piece.
template <typename Message>
bool send_message(const Socket& socket, const Message& message) {
  return ::send(socket.file(), &message, sizeof message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof message);
}

}  // namespace

Digest Introduction::proof(Role role, const std::string& secret) const {
  std::string text = "freescale transport 2";
  text += static_cast<char>(role);
  text += std::to_string(listening) + " " + std::to_string(connecting) + " ";
  return hmac_sha256(secret, text + as_text(listening_nonce) + as_text(connecting_nonce) + address);
}

bool MessageReader::read(const Socket& socket, std::size_t bytes, bool& closed) {
  while (got_ < bytes) {
    const ssize_t size = recv(socket.file(), buffer_ + got_, bytes - got_, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (size <= 0) {
      closed = true;
      return false;
    }
    got_ += size;
  }
  return true;
}

ConnectingGreeting::ConnectingGreeting(int rank, int peer, const WirePeer& to) : to_(to) {
  introduction_.address = to.address;
  introduction_.listening = peer;
  introduction_.connecting = rank;
}

short ConnectingGreeting::events() const { return connected_ ? POLLIN : POLLOUT; }

std::string ConnectingGreeting::problem() const {
  return "rank " + std::to_string(introduction_.connecting) + " cannot reach rank " + std::to_string(peer()) + " at " +
         to_.address.substr(0, to_.address.rfind(' ')) + ": " + last_problem_;
}

void ConnectingGreeting::retry(const std::string& why, Clock::time_point now) {
  socket_ = Socket();
  connected_ = false;
  reader_ = MessageReader();
  last_problem_ = why;
  next_attempt_ = now + retry_interval;
}

void ConnectingGreeting::open(Clock::time_point now) {
  const std::size_t first = to_.address.find(' '), last = to_.address.rfind(' ');
  if (first == std::string::npos || last <= first)
    throw std::runtime_error("network: rank " + std::to_string(peer()) + " published no valid address");
  ResolvedAddress resolved(to_.address.substr(0, first), to_.address.substr(first + 1, last - first - 1), 0);
  socket_ = Socket(::socket(resolved.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) network_error("socket", errno);
  if (::connect(socket_.file(), resolved.first->ai_addr, resolved.first->ai_addrlen) != 0 && errno != EINPROGRESS)
    retry(std::strerror(errno), now);
}

bool ConnectingGreeting::step(Clock::time_point now) {
  if (!socket_) {
    if (now < next_attempt_) return false;
    open(now);
    return false;
  }
  if (!connected_) {
    pollfd one{socket_.file(), POLLOUT, 0};
    if (::poll(&one, 1, 0) <= 0) return false;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket_.file(), SOL_SOCKET, SO_ERROR, &error, &size);
    introduction_.connecting_nonce = random_bytes();
    const Hello hello{tcp_magic, introduction_.connecting, introduction_.connecting_nonce};
    if (error != 0 || !send_message(socket_, hello)) {
      retry(std::strerror(error ? error : errno), now);
      return false;
    }
    connected_ = true;
  }
  bool closed = false;
  if (!reader_.read(socket_, sizeof(Challenge), closed)) {
    if (closed) retry("it closes the connection", now);
    return false;
  }
  const auto challenge = reader_.take<Challenge>();
  introduction_.listening_nonce = challenge.nonce;
  if (challenge.magic != tcp_magic || challenge.rank != peer() ||
      !equal(challenge.proof, introduction_.proof(Role::listens, to_.secret)))
    throw std::runtime_error("network: the process at " + to_.address.substr(0, to_.address.rfind(' ')) +
                             " does not prove that it is rank " + std::to_string(peer()) +
                             " of this group; FREESCALE_SECRET must be the same on every host");
  if (send_message(socket_, introduction_.proof(Role::connects, to_.secret))) return true;
  retry(std::strerror(errno), now);
  return false;
}

ListeningGreeting::ListeningGreeting(Socket socket, int rank, std::string address, std::string secret,
                                     Clock::time_point now)
    : socket_(std::move(socket)), secret_(std::move(secret)), deadline_(now + stranger_limit) {
  introduction_.address = std::move(address);
  introduction_.listening = rank;
}

ListeningGreeting::State ListeningGreeting::step(Clock::time_point now) {
  bool closed = false;
  if (!challenged_ && reader_.read(socket_, sizeof(Hello), closed)) {
    const auto hello = reader_.take<Hello>();
    if (hello.magic != tcp_magic) return State::refused;
    introduction_.connecting = hello.rank;
    introduction_.connecting_nonce = hello.nonce;
    introduction_.listening_nonce = random_bytes();
    const Challenge challenge{tcp_magic, introduction_.listening, introduction_.listening_nonce,
                              introduction_.proof(Role::listens, secret_)};
    if (!send_message(socket_, challenge)) return State::refused;
    challenged_ = true;
  }
  if (challenged_ && reader_.read(socket_, sizeof(Digest), closed))
    return equal(reader_.take<Digest>(), introduction_.proof(Role::connects, secret_)) ? State::accepted
                                                                                        : State::refused;
  return closed || now > deadline_ ? State::refused : State::waiting;
}

}  // namespace freescale::transport
