#include "gcm.hpp"

#include "libcrypto.hpp"

namespace multiring {
namespace {

using libcrypto::check;
using libcrypto::Library;

const unsigned char* raw(const std::byte* bytes) {
    return reinterpret_cast<const unsigned char*>(bytes);
}
unsigned char* raw(std::byte* bytes) {
    return reinterpret_cast<unsigned char*>(bytes);
}

}  // namespace

Gcm::Gcm(bool encrypts)
    : encrypts_(encrypts), context_(Library::get().EVP_CIPHER_CTX_new(), Library::get().EVP_CIPHER_CTX_free) {
    check("for a cipher", context_ != nullptr);
}

void Gcm::take_key(std::span<const std::byte, gcm_key_bytes> key) {
    const Library& library = Library::get();
    check("to take a key", library.EVP_CipherInit_ex(context_.get(), library.EVP_aes_128_gcm(), nullptr,
                                                     raw(key.data()), nullptr, encrypts_) == 1);
}

void Gcm::begin(const GcmNonce& nonce, ByteSpan additional) {
    const Library& library = Library::get();
    int written = 0;
    check("to take a nonce",
          library.EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, raw(nonce.data()), encrypts_) == 1);
    check("to authenticate",
          additional.empty() || library.EVP_CipherUpdate(context_.get(), nullptr, &written, raw(additional.data()),
                                                         static_cast<int>(additional.size())) == 1);
}

void Gcm::pass(ByteSpan from, std::byte* to) {
    int written = 0;
    if (from.empty()) return;
    check("to pass on text", Library::get().EVP_CipherUpdate(context_.get(), raw(to), &written, raw(from.data()),
                                                             static_cast<int>(from.size())) == 1);
}

void Gcm::end(std::byte* tag) {
    const Library& library = Library::get();
    int written = 0;
    unsigned char nothing[1];
    check("for a tag", library.EVP_CipherFinal_ex(context_.get(), nothing, &written) == 1 &&
                           library.EVP_CIPHER_CTX_ctrl(context_.get(), libcrypto::get_tag, gcm_tag_bytes, tag) == 1);
}

bool Gcm::has_tag(const std::byte* tag) {
    const Library& library = Library::get();
    int written = 0;
    unsigned char nothing[1];
    check("to take a tag", library.EVP_CIPHER_CTX_ctrl(context_.get(), libcrypto::set_tag, gcm_tag_bytes,
                                                       const_cast<std::byte*>(tag)) == 1);
    return library.EVP_CipherFinal_ex(context_.get(), nothing, &written) == 1;
}

}  // namespace multiring
