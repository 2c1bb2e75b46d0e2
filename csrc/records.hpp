// Records: pieces of the bytes of a connection, which are encrypted, or summed. A record holds up to 32 KB of the
// connection's bytes, wherever frames begin and end:
//
//   size of the text (4 bytes, little-endian) | text | tag (16 bytes)
//
// Each direction counts its records. Where they are encrypted it has keys of its own: the number is part of the nonce,
// and the size is authenticated with the text, so a record that is altered, dropped, repeated or moved fails its tag.
// After every 65,536 records (2 GB at most) both ends go on to the next key, which follows from the one before and does
// not lead back to it. Where they are summed, the tag is the checksum of number, size and text, which detects the
// same faults, but no deliberate change.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "keys.hpp"

namespace multiring {

inline constexpr std::size_t record_size_bytes = 4, record_tag_bytes = 16;
inline constexpr std::size_t largest_text = std::size_t{32} << 10;
inline constexpr std::size_t record_overhead = record_size_bytes + record_tag_bytes;
inline constexpr std::size_t largest_record = largest_text + record_overhead;
inline constexpr std::uint64_t records_of_a_key = std::uint64_t{1} << 16;

// Makes or opens the records of one direction, at one of its ends.
class Seal {
  public:
    virtual ~Seal() = default;
    // Begins the next record; numbers count from 0, `size` is encoded as above.
    virtual void begin(std::uint64_t number, const std::byte* size) = 0;
    // A piece of its text.
    virtual void pass(ByteSpan from, std::byte* to) = 0;
    virtual void end(std::byte* tag) = 0;            // where records are written
    virtual bool has_tag(const std::byte* tag) = 0;  // where they are read: whether the tag fits
};

std::unique_ptr<Seal> encrypting_seal(const Key256& secret);
std::unique_ptr<Seal> decrypting_seal(const Key256& secret);
std::unique_ptr<Seal> summing_seal();  // at both ends

class RecordWriter {
  public:
    explicit RecordWriter(std::unique_ptr<Seal> seal) : seal_(std::move(seal)) {}
    struct Sealed {
        std::size_t text, record;  // bytes taken of the parts, and written
    };
    // A record of as much of the parts as it holds; `to` has room for the largest.
    Sealed seal(std::span<const iovec> parts, std::byte* to);

  private:
    std::unique_ptr<Seal> seal_;
    std::uint64_t number_ = 0;
};

class RecordReader {
  public:
    explicit RecordReader(std::unique_ptr<Seal> seal) : seal_(std::move(seal)) {}
    // Number of the record that comes next.
    std::uint64_t number() const { return number_; }
    // The bytes of text of a record that begins with these; 0 if there is no such record.
    static std::size_t text_size(const std::byte* record);
    // The text of a whole record: as much as `first` holds goes there, the rest to `rest`. False if the record is not
    // what was sent: then nothing of the text is to be used.
    bool open(const std::byte* record, std::span<std::byte> first, std::byte* rest);

  private:
    std::unique_ptr<Seal> seal_;
    std::uint64_t number_ = 0;
};

// Both directions, as one end has them.
struct Records {
    RecordWriter writer;
    RecordReader reader;
};

}  // namespace multiring
