#include "records.hpp"

#include <algorithm>
#include <cstring>

namespace multiring {
namespace {

// Least significant byte first.
void add_bits(std::byte* to, std::uint64_t number, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) to[i] ^= static_cast<std::byte>(number >> (8 * i));
}

}  // namespace

RecordKeys::RecordKeys(const Key256& secret, bool encrypts) : secret_(secret), cipher_(encrypts) {
    take_keys();
}

void RecordKeys::take_keys() {
    const auto key = hkdf_expand(secret_, text_bytes("multiring key"), gcm_key_bytes);
    cipher_.take_key(std::span<const std::byte, gcm_key_bytes>(key));
    const auto mask = hkdf_expand(secret_, text_bytes("multiring nonce"), mask_.size());
    std::copy(mask.begin(), mask.end(), mask_.begin());
}

Gcm& RecordKeys::begin(const std::byte* size) {
    if (number_ != 0 && number_ % records_of_a_key == 0) {
        const auto next = hkdf_expand(secret_, text_bytes("multiring next"), secret_.size());
        std::copy(next.begin(), next.end(), secret_.begin());
        take_keys();
    }
    GcmNonce nonce = mask_;
    add_bits(nonce.data(), number_++, sizeof number_);
    cipher_.begin(nonce, {size, record_size_bytes});
    return cipher_;
}

RecordWriter::Sealed RecordWriter::seal(std::span<const iovec> parts, std::byte* to) {
    std::size_t text = 0;
    for (const iovec& part : parts) text = std::min(text + part.iov_len, largest_text);
    std::memset(to, 0, record_size_bytes);
    add_bits(to, text, record_size_bytes);
    Gcm& cipher = begin(to);
    std::byte* at = to + record_size_bytes;
    std::size_t left = text;
    for (const iovec& part : parts) {
        const std::size_t here = std::min(part.iov_len, left);
        cipher.pass({static_cast<const std::byte*>(part.iov_base), here}, at);
        at += here;
        left -= here;
    }
    cipher.end(at);
    return {text, text + record_overhead};
}

std::size_t RecordReader::text_size(const std::byte* record) {
    std::size_t size = 0;
    for (std::size_t i = record_size_bytes; i-- > 0;) size = size << 8 | std::to_integer<std::size_t>(record[i]);
    return size <= largest_text ? size : 0;
}

bool RecordReader::open(const std::byte* record, std::span<std::byte> first, std::byte* rest) {
    const ByteSpan text(record + record_size_bytes, text_size(record));
    const std::size_t in_first = std::min(first.size(), text.size());
    Gcm& cipher = begin(record);
    cipher.pass(text.first(in_first), first.data());
    cipher.pass(text.subspan(in_first), rest);
    return cipher.has_tag(text.data() + text.size());
}

}  // namespace multiring
