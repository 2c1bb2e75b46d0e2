// Keys on which two ends of a connection agree before they encrypt it (RFC 7748 and RFC 5869).
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace multiring {

using Key256 = std::array<std::byte, 32>;
using ByteSpan = std::span<const std::byte>;

// X25519: the public key of a private one, which is 32 random bytes.
Key256 public_key(const Key256& private_key);
// The secret that both ends get, each from its own private key and the other's public one; throws where that is none.
Key256 shared_key(const Key256& private_key, const Key256& public_key_of_other);

// HKDF with SHA-256.
Key256 hkdf_extract(ByteSpan salt, ByteSpan material);
std::vector<std::byte> hkdf_expand(const Key256& key, ByteSpan info, std::size_t size);  // at most 8160 bytes

inline ByteSpan text_bytes(std::string_view text) {
    return std::as_bytes(std::span(text));
}

}  // namespace multiring
