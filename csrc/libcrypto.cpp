#include "libcrypto.hpp"

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "errors.hpp"

namespace multiring::libcrypto {
namespace {

constexpr const char* names[] = {"libcrypto.so.3", "libcrypto.so.1.1"};

template <class Function>
void find(void* library, const std::string& from, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr)
        throw_resource_error("MULTIRING_ENCRYPT needs OpenSSL 1.1.1 or newer, and " + from + " of this host has no " +
                             name + ": update it");
}

Library load() {
    void* library = nullptr;
    std::string found, reasons;
    for (const char* name : names) {
        if ((library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) != nullptr) {
            found = name;
            break;
        }
        const char* reason = dlerror();
        reasons += (reasons.empty() ? "" : "; ") + std::string(reason != nullptr ? reason : name);
    }
    if (library == nullptr)
        throw_resource_error("MULTIRING_ENCRYPT needs OpenSSL's libcrypto, and it cannot be loaded (" + reasons +
                             "): install OpenSSL 1.1.1 or newer where this process finds " + names[0]);
    Library functions{};
    const auto take = [&](const char* name, auto& function) { find(library, found, name, function); };
    take("EVP_CIPHER_CTX_new", functions.EVP_CIPHER_CTX_new);
    take("EVP_CIPHER_CTX_free", functions.EVP_CIPHER_CTX_free);
    take("EVP_CIPHER_CTX_ctrl", functions.EVP_CIPHER_CTX_ctrl);
    take("EVP_aes_128_gcm", functions.EVP_aes_128_gcm);
    take("EVP_CipherInit_ex", functions.EVP_CipherInit_ex);
    take("EVP_CipherUpdate", functions.EVP_CipherUpdate);
    take("EVP_CipherFinal_ex", functions.EVP_CipherFinal_ex);
    take("EVP_sha256", functions.EVP_sha256);
    take("HMAC", functions.HMAC);
    take("EVP_PKEY_new_raw_private_key", functions.EVP_PKEY_new_raw_private_key);
    take("EVP_PKEY_new_raw_public_key", functions.EVP_PKEY_new_raw_public_key);
    take("EVP_PKEY_get_raw_public_key", functions.EVP_PKEY_get_raw_public_key);
    take("EVP_PKEY_free", functions.EVP_PKEY_free);
    take("EVP_PKEY_CTX_new", functions.EVP_PKEY_CTX_new);
    take("EVP_PKEY_CTX_free", functions.EVP_PKEY_CTX_free);
    take("EVP_PKEY_derive_init", functions.EVP_PKEY_derive_init);
    take("EVP_PKEY_derive_set_peer", functions.EVP_PKEY_derive_set_peer);
    take("EVP_PKEY_derive", functions.EVP_PKEY_derive);
    return functions;
}

}  // namespace

const Library& Library::get() {
    static std::mutex mutex;
    static const Library* loaded = nullptr;  // never unloaded: other parts of the process use the library too
    const std::lock_guard lock(mutex);
    if (loaded == nullptr) loaded = new Library(load());
    return *loaded;
}

void check(const char* what, bool is_done) {
    if (!is_done) throw_resource_error(std::string("libcrypto was asked ") + what + ", and failed");
}

}  // namespace multiring::libcrypto
