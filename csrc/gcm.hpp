// AES-128-GCM by libcrypto: text that is encrypted and authenticated in one go (NIST SP 800-38D).
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "keys.hpp"
#include "libcrypto.hpp"

namespace multiring {

inline constexpr std::size_t gcm_key_bytes = 16, gcm_nonce_bytes = 12, gcm_tag_bytes = 16;
using GcmNonce = std::array<std::byte, gcm_nonce_bytes>;

// One direction. A failure of libcrypto itself throws a resource error.
class Gcm {
  public:
    explicit Gcm(bool encrypts);

    void take_key(std::span<const std::byte, gcm_key_bytes> key);
    // A nonce is used once with a key. The `additional` bytes are authenticated, and not encrypted.
    void begin(const GcmNonce& nonce, ByteSpan additional);
    // A piece of the text, which may stay where it is.
    void pass(ByteSpan from, std::byte* to);
    void end(std::byte* tag);            // when it encrypts
    bool has_tag(const std::byte* tag);  // when it decrypts: true if all of it was encrypted so

  private:
    const libcrypto::Library& library_;
    bool encrypts_;
    std::unique_ptr<void, void (*)(void*)> context_;
};

}  // namespace multiring
