#include "gcm.hpp"

namespace multiring {

using libcrypto::check;
using libcrypto::Library;
using libcrypto::raw;

Gcm::Gcm(bool encrypts)
    : library_(Library::get()),
      encrypts_(encrypts),
      context_(library_.EVP_CIPHER_CTX_new(), library_.EVP_CIPHER_CTX_free) {
    check("for a cipher", context_ != nullptr);
}

void Gcm::take_key(std::span<const std::byte, gcm_key_bytes> key) {
    check("to take a key", library_.EVP_CipherInit_ex(context_.get(), library_.EVP_aes_128_gcm(), nullptr,
                                                      raw(key.data()), nullptr, encrypts_) == 1);
}

void Gcm::begin(const GcmNonce& nonce, ByteSpan additional) {
    int written = 0;
    check("to take a nonce",
          library_.EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, raw(nonce.data()), encrypts_) == 1);
    check("to authenticate",
          additional.empty() || library_.EVP_CipherUpdate(context_.get(), nullptr, &written, raw(additional.data()),
                                                          static_cast<int>(additional.size())) == 1);
}

void Gcm::pass(ByteSpan from, std::byte* to) {
    int written = 0;
    if (from.empty()) return;
    check("to pass on text", library_.EVP_CipherUpdate(context_.get(), raw(to), &written, raw(from.data()),
                                                       static_cast<int>(from.size())) == 1);
}

void Gcm::end(std::byte* tag) {
    int written = 0;
    unsigned char nothing[1];
    check("for a tag", library_.EVP_CipherFinal_ex(context_.get(), nothing, &written) == 1 &&
                           library_.EVP_CIPHER_CTX_ctrl(context_.get(), libcrypto::get_tag, gcm_tag_bytes, tag) == 1);
}

bool Gcm::has_tag(const std::byte* tag) {
    int written = 0;
    unsigned char nothing[1];
    check("to take a tag", library_.EVP_CIPHER_CTX_ctrl(context_.get(), libcrypto::set_tag, gcm_tag_bytes,
                                                        const_cast<std::byte*>(tag)) == 1);
    return library_.EVP_CipherFinal_ex(context_.get(), nothing, &written) == 1;
}

}  // namespace multiring
