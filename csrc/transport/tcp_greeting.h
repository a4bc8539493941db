// How two ranks prove to each other, over a new TCP connection, that they know the same secret. The secret does not
// travel. The rank that connects sends a random number (a nonce). The rank that listens answers with a nonce of its own
// and a proof: an HMAC of both nonces, both ranks and its address under the secret. The first rank checks it and sends a
// proof of its own. The address is part of the proof, so that a process which publishes another address cannot pass the
// proofs of two ranks on. What follows on the connection is neither encrypted nor authenticated.
#pragma once

#include <optional>
#include <string>

#include "sha256.h"
#include "tcp.h"

namespace freescale::transport {

struct Hello {
  Word magic;
  std::int32_t rank;
  Digest nonce;
};

struct Challenge {
  Word magic;
  std::int32_t rank;
  Digest nonce, proof;
};

enum class Role : char { listens = 'L', connects = 'C' };

// What both ends of a connection know before they prove that they know the secret, too.
struct Introduction {
  std::string address;  // of the rank that listens, as published
  std::int32_t listening = -1, connecting = -1;
  Digest listening_nonce{}, connecting_nonce{};
  Digest proof(Role role, const std::string& secret) const;
};

// Reads messages of fixed size from a socket that does not block.
class MessageReader {
 public:
  // Whether `bytes` bytes are complete. `closed` is set if no more will come.
  bool read(const Socket& socket, std::size_t bytes, bool& closed);
  template <typename Message>
  Message take() {
    Message message;
    std::memcpy(&message, buffer_, sizeof message);
    got_ = 0;
    return message;
  }

 private:
  char buffer_[sizeof(Challenge)];
  std::size_t got_ = 0;
};

// The end that connects. It tries again until it is connected or the caller gives up.
class ConnectingGreeting {
 public:
  ConnectingGreeting(int rank, int peer, const WirePeer& to);
  // Goes on. Returns whether the peer has proved that it knows the secret. Throws if the peer knows another secret.
  bool step(Clock::time_point now);
  int file() const { return socket_.file(); }  // -1 until the next attempt
  short events() const;
  Socket take() { return std::move(socket_); }
  int peer() const { return introduction_.listening; }
  std::string problem() const;  // why there is no connection so far

 private:
  void open(Clock::time_point now);
  void retry(const std::string& why, Clock::time_point now);

  const WirePeer to_;
  Introduction introduction_;
  Socket socket_;
  bool connected_ = false;
  MessageReader reader_;
  Clock::time_point next_attempt_{};
  std::string last_problem_ = "it does not answer";
};

// The end that listens, for one connection that was accepted.
class ListeningGreeting {
 public:
  ListeningGreeting(Socket socket, int rank, std::string address, std::string secret, Clock::time_point now);
  enum class State { waiting, accepted, refused };
  State step(Clock::time_point now);
  int file() const { return socket_.file(); }
  Socket take() { return std::move(socket_); }
  int peer() const { return introduction_.connecting; }

 private:
  Socket socket_;
  const std::string secret_;
  Introduction introduction_;
  bool challenged_ = false;
  MessageReader reader_;
  const Clock::time_point deadline_;
};

}  // namespace freescale::transport
