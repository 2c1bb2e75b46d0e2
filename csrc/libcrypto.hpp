// OpenSSL's libcrypto, found when the first connection is to be encrypted. Nothing of it is needed to build or to
// import this library: what is used of its interface is declared here.
#pragma once

#include <cstddef>

namespace multiring::libcrypto {

// Numbers are the library's (openssl/evp.h, obj_mac.h; 1.1.1 and 3 agree).
inline constexpr int get_tag = 0x10, set_tag = 0x11;  // what EVP_CIPHER_CTX_ctrl is asked
inline constexpr int x25519 = 1034;

// The functions of libcrypto that are used, by their names there.
struct Library {
    void* (*EVP_CIPHER_CTX_new)();
    void (*EVP_CIPHER_CTX_free)(void* context);
    int (*EVP_CIPHER_CTX_ctrl)(void* context, int type, int size, void* at);
    const void* (*EVP_aes_128_gcm)();
    int (*EVP_CipherInit_ex)(void* context, const void* cipher, void* engine, const unsigned char* key,
                             const unsigned char* nonce, int encrypts);
    int (*EVP_CipherUpdate)(void* context, unsigned char* to, int* written, const unsigned char* from, int size);
    int (*EVP_CipherFinal_ex)(void* context, unsigned char* to, int* written);
    const void* (*EVP_sha256)();
    unsigned char* (*HMAC)(const void* digest, const void* key, int key_size, const unsigned char* data,
                           std::size_t size, unsigned char* to, unsigned* written);
    void* (*EVP_PKEY_new_raw_private_key)(int type, void* engine, const unsigned char* key, std::size_t size);
    void* (*EVP_PKEY_new_raw_public_key)(int type, void* engine, const unsigned char* key, std::size_t size);
    int (*EVP_PKEY_get_raw_public_key)(const void* key, unsigned char* to, std::size_t* size);
    void (*EVP_PKEY_free)(void* key);
    void* (*EVP_PKEY_CTX_new)(void* key, void* engine);
    void (*EVP_PKEY_CTX_free)(void* context);
    int (*EVP_PKEY_derive_init)(void* context);
    int (*EVP_PKEY_derive_set_peer)(void* context, void* peer);
    int (*EVP_PKEY_derive)(void* context, unsigned char* to, std::size_t* size);

    // Throws a resource error that says what is missing, each time that it is asked for.
    static const Library& get();
};

// Throws a resource error unless the library did what it was asked.
void check(const char* what, bool is_done);

// Bytes as the library takes them.
inline const unsigned char* raw(const std::byte* bytes) {
    return reinterpret_cast<const unsigned char*>(bytes);
}
inline unsigned char* raw(std::byte* bytes) {
    return reinterpret_cast<unsigned char*>(bytes);
}

}  // namespace multiring::libcrypto
