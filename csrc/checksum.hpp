// Checksums of what one end copies and the other copies again: CRC-32C (RFC 3720, B.4), four side by side, as one of
// them keeps a processor waiting for its own last step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace multiring {

inline constexpr std::size_t checksum_bytes = 16, checksum_block = 32;

// The bytes are taken in blocks of four words of 8, the last one filled up with zeros; lane i sums word i of each
// block.
class Checksum {
  public:
    Checksum();                   // uses the processor's instruction if there is one
    static Checksum by_tables();  // as where there is none
    void begin();
    // The next bytes, which are copied as well.
    void pass(std::span<const std::byte> from, std::byte* to);
    // The four sums, least significant byte first.
    std::array<std::byte, checksum_bytes> end();

  private:
    using Lanes = std::array<std::uint32_t, 4>;
    using Add = void (*)(Lanes& lanes, const std::byte* from, std::byte* to, std::size_t blocks);

    Add add_;
    Lanes lanes_{};
    std::array<std::byte, checksum_block> held_{};  // the first bytes of a block
    std::size_t held_bytes_ = 0;
};

}  // namespace multiring
