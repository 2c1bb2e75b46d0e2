// Records: what an encrypted connection carries. A record holds up to 32 KB of the connection's bytes, wherever frames
// begin and end:
//
//   size of the text (4 bytes, little-endian) | text, encrypted | tag (16 bytes)
//
// The size is authenticated with the text. Each direction has keys of its own and counts its records; the number is
// part of the nonce, so one that is altered, dropped, repeated or moved fails its tag. After every 65,536 records (2 GB
// at most) both ends go on to the next key, which follows from the one before and does not lead back to it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "gcm.hpp"
#include "keys.hpp"

namespace multiring {

inline constexpr std::size_t record_size_bytes = 4;
inline constexpr std::size_t largest_text = std::size_t{32} << 10;
inline constexpr std::size_t record_overhead = record_size_bytes + gcm_tag_bytes;
inline constexpr std::size_t largest_record = largest_text + record_overhead;
inline constexpr std::uint64_t records_of_a_key = std::uint64_t{1} << 16;

// One direction of a connection: its keys, and the number of the record that comes next.
class RecordKeys {
  public:
    std::uint64_t number() const { return number_; }

  protected:
    RecordKeys(const Key256& secret, bool encrypts);
    // The cipher, ready for the next record, whose size is written so.
    Gcm& begin(const std::byte* size);

  private:
    void take_keys();

    Key256 secret_;
    Gcm cipher_;
    GcmNonce mask_{};  // the number is added to it, bit by bit
    std::uint64_t number_ = 0;
};

class RecordWriter : public RecordKeys {
  public:
    explicit RecordWriter(const Key256& secret) : RecordKeys(secret, true) {}
    struct Sealed {
        std::size_t text, record;  // bytes taken of the parts, and written
    };
    // A record of as much of the parts as it holds; `to` has room for the largest.
    Sealed seal(std::span<const iovec> parts, std::byte* to);
};

class RecordReader : public RecordKeys {
  public:
    explicit RecordReader(const Key256& secret) : RecordKeys(secret, false) {}
    // The bytes of text of a record that begins with these; 0 if there is no such record.
    static std::size_t text_size(const std::byte* record);
    // The text of a whole record: as much as `first` holds goes there, the rest to `rest`. False if the record is not
    // what was sent: then nothing of the text is to be used.
    bool open(const std::byte* record, std::span<std::byte> first, std::byte* rest);
};

// Both directions, as one end has them.
struct RecordCipher {
    RecordWriter writer;
    RecordReader reader;
};

}  // namespace multiring
