#include "records.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checksum.hpp"
#include "gcm.hpp"

namespace multiring {
namespace {

static_assert(gcm_tag_bytes == record_tag_bytes && checksum_bytes == record_tag_bytes);

// Least significant byte first.
void add_bits(std::byte* to, std::uint64_t number, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) to[i] ^= static_cast<std::byte>(number >> (8 * i));
}

class GcmSeal final : public Seal {
  public:
    GcmSeal(const Key256& secret, bool encrypts) : secret_(secret), cipher_(encrypts) { take_keys(); }

    void begin(std::uint64_t number, const std::byte* size) override {
        if (number != 0 && number % records_of_a_key == 0) {
            const auto next = hkdf_expand(secret_, text_bytes("multiring next"), secret_.size());
            std::copy(next.begin(), next.end(), secret_.begin());
            take_keys();
        }
        GcmNonce nonce = mask_;
        add_bits(nonce.data(), number, sizeof number);
        cipher_.begin(nonce, {size, record_size_bytes});
    }
    void pass(ByteSpan from, std::byte* to) override { cipher_.pass(from, to); }
    void end(std::byte* tag) override { cipher_.end(tag); }
    bool has_tag(const std::byte* tag) override { return cipher_.has_tag(tag); }

  private:
    void take_keys() {
        const auto key = hkdf_expand(secret_, text_bytes("multiring key"), gcm_key_bytes);
        cipher_.take_key(std::span<const std::byte, gcm_key_bytes>(key));
        const auto mask = hkdf_expand(secret_, text_bytes("multiring nonce"), mask_.size());
        std::copy(mask.begin(), mask.end(), mask_.begin());
    }

    Key256 secret_;
    Gcm cipher_;
    GcmNonce mask_{};  // the number is added to it, bit by bit
};

class SumSeal final : public Seal {
  public:
    void begin(std::uint64_t number, const std::byte* size) override {
        std::byte head[checksum_block]{};  // a whole block, so that those of the text begin with it
        add_bits(head, number, sizeof number);
        std::copy_n(size, record_size_bytes, head + sizeof number);
        checksum_.begin();
        checksum_.pass(head, head);
    }
    void pass(ByteSpan from, std::byte* to) override { checksum_.pass(from, to); }
    void end(std::byte* tag) override {
        const auto sums = checksum_.end();
        std::copy(sums.begin(), sums.end(), tag);
    }
    bool has_tag(const std::byte* tag) override {
        const auto sums = checksum_.end();
        return std::equal(sums.begin(), sums.end(), tag);
    }

  private:
    Checksum checksum_;
};

}  // namespace

std::unique_ptr<Seal> encrypting_seal(const Key256& secret) {
    return std::make_unique<GcmSeal>(secret, true);
}

std::unique_ptr<Seal> decrypting_seal(const Key256& secret) {
    return std::make_unique<GcmSeal>(secret, false);
}

std::unique_ptr<Seal> summing_seal() {
    return std::make_unique<SumSeal>();
}

RecordWriter::Sealed RecordWriter::seal(std::span<const iovec> parts, std::byte* to) {
    std::size_t text = 0;
    for (const iovec& part : parts) text = std::min(text + part.iov_len, largest_text);
    std::memset(to, 0, record_size_bytes);
    add_bits(to, text, record_size_bytes);
    seal_->begin(number_++, to);
    std::byte* at = to + record_size_bytes;
    std::size_t left = text;
    for (const iovec& part : parts) {
        const std::size_t here = std::min(part.iov_len, left);
        seal_->pass({static_cast<const std::byte*>(part.iov_base), here}, at);
        at += here;
        left -= here;
    }
    seal_->end(at);
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
    seal_->begin(number_++, record);
    seal_->pass(text.first(in_first), first.data());
    seal_->pass(text.subspan(in_first), rest);
    return seal_->has_tag(text.data() + text.size());
}

}  // namespace multiring
