// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), so that the extension needs no cryptographic library.
#pragma once

#include <array>
#include <string>

namespace freescale::transport {

using Digest = std::array<unsigned char, 32>;

Digest sha256(const std::string& message);
Digest hmac_sha256(const std::string& key, const std::string& message);
// Compares in a time that does not depend on the bytes.
bool equal(const Digest& a, const Digest& b);
std::string as_text(const Digest& digest);  // its bytes
// Bytes from the kernel's random generator, and 32 random letters.
Digest random_bytes();
std::string random_text();

}  // namespace freescale::transport
