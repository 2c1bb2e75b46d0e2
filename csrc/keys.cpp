#include "keys.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "libcrypto.hpp"

namespace multiring {
namespace {

using libcrypto::check;
using libcrypto::Library;
using libcrypto::raw;

using Owned = std::unique_ptr<void, void (*)(void*)>;

Owned private_half(const Library& library, const Key256& key) {
    Owned half(library.EVP_PKEY_new_raw_private_key(libcrypto::x25519, nullptr, raw(key.data()), key.size()),
               library.EVP_PKEY_free);
    check("for a private key", half != nullptr);
    return half;
}

Key256 hmac(ByteSpan key, ByteSpan data) {
    const Library& library = Library::get();
    Key256 result;
    unsigned written = 0;
    const unsigned char* made = library.HMAC(library.EVP_sha256(), key.data(), static_cast<int>(key.size()),
                                             raw(data.data()), data.size(), raw(result.data()), &written);
    check("for an HMAC", made != nullptr && written == result.size());
    return result;
}

}  // namespace

Key256 public_key(const Key256& private_key) {
    const Library& library = Library::get();
    const Owned own = private_half(library, private_key);
    Key256 result;
    std::size_t size = result.size();
    check("for a public key", library.EVP_PKEY_get_raw_public_key(own.get(), raw(result.data()), &size) == 1);
    return result;
}

Key256 shared_key(const Key256& private_key, const Key256& public_key_of_other) {
    const Library& library = Library::get();
    const Owned own = private_half(library, private_key);
    const Owned other(library.EVP_PKEY_new_raw_public_key(libcrypto::x25519, nullptr, raw(public_key_of_other.data()),
                                                          public_key_of_other.size()),
                      library.EVP_PKEY_free);
    check("to read a public key", other != nullptr);
    const Owned context(library.EVP_PKEY_CTX_new(own.get(), nullptr), library.EVP_PKEY_CTX_free);
    check("for a shared key", context != nullptr && library.EVP_PKEY_derive_init(context.get()) == 1 &&
                                  library.EVP_PKEY_derive_set_peer(context.get(), other.get()) == 1);
    Key256 result;
    std::size_t size = result.size();
    if (library.EVP_PKEY_derive(context.get(), raw(result.data()), &size) != 1 || size != result.size())
        throw std::invalid_argument("the other end's public key is invalid");  // a point of small order
    return result;
}

Key256 hkdf_extract(ByteSpan salt, ByteSpan material) {
    return hmac(salt, material);
}

std::vector<std::byte> hkdf_expand(const Key256& key, ByteSpan info, std::size_t size) {
    if (size > 255 * key.size())
        throw std::invalid_argument("HKDF yields at most 8160 bytes, and " + std::to_string(size) + " were asked for");
    std::vector<std::byte> result, block;
    for (std::uint8_t counter = 1; result.size() < size; ++counter) {
        block.insert(block.end(), info.begin(), info.end());
        block.push_back(std::byte{counter});
        const Key256 made = hmac(key, block);
        const std::size_t rest = std::min(size - result.size(), made.size());
        result.insert(result.end(), made.begin(), made.begin() + static_cast<std::ptrdiff_t>(rest));
        block.assign(made.begin(), made.end());
    }
    return result;
}

}  // namespace multiring
