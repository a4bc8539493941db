// SHA-256 and HMAC.
#include "sha256.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace freescale::transport {
namespace {

constexpr std::size_t block_bytes = 64;

constexpr std::uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t rotate(std::uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

void compress(std::uint32_t (&state)[8], const unsigned char* block) {
  std::uint32_t w[64];
  for (int i = 0; i < 16; ++i)
    w[i] = std::uint32_t{block[4 * i]} << 24 | block[4 * i + 1] << 16 | block[4 * i + 2] << 8 | block[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t a = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
    const std::uint32_t b = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  std::uint32_t s[8];
  std::memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t sum1 = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
    const std::uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
    const std::uint32_t first = s[7] + sum1 + choice + constants[i] + w[i];
    const std::uint32_t sum0 = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
    const std::uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    std::memmove(s + 1, s, 7 * sizeof *s);
    s[4] += first;
    s[0] = first + sum0 + majority;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

}  // namespace

std::string as_text(const Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

Digest sha256(const std::string& message) {
  std::uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string padded = message + '\x80';
  padded.resize((padded.size() + 8 + block_bytes - 1) / block_bytes * block_bytes, '\0');
  const std::uint64_t bits = std::uint64_t{message.size()} * 8;
  for (int i = 0; i < 8; ++i) padded[padded.size() - 1 - i] = static_cast<char>(bits >> 8 * i);
  for (std::size_t start = 0; start < padded.size(); start += block_bytes)
    compress(state, reinterpret_cast<const unsigned char*>(padded.data()) + start);
  Digest digest;
  for (int i = 0; i < 32; ++i) digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - i % 4 * 8));
  return digest;
}

Digest hmac_sha256(const std::string& key, const std::string& message) {
  std::string inner = key.size() > block_bytes ? as_text(sha256(key)) : key;
  inner.resize(block_bytes, '\0');
  std::string outer = inner;
  for (std::size_t i = 0; i < block_bytes; ++i) {
    inner[i] ^= 0x36;
    outer[i] ^= 0x5c;
  }
  return sha256(outer + as_text(sha256(inner + message)));
}

bool equal(const Digest& a, const Digest& b) {
  unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

Digest random_bytes() {
  Digest bytes;
  for (std::size_t got = 0; got < bytes.size();) {
    const ssize_t size = getrandom(bytes.data() + got, bytes.size() - got, 0);
    if (size < 0 && errno != EINTR) throw std::runtime_error("the kernel gives no random bytes");
    if (size > 0) got += size;
  }
  return bytes;
}

std::string random_text() {
  static constexpr char letters[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : random_bytes()) text += letters[byte % 16];
  return text;
}

}  // namespace freescale::transport
