#include "checksum.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace multiring {
namespace {

using Lanes = std::array<std::uint32_t, 4>;

constexpr std::uint32_t polynomial = 0x82f63b78;  // bits reversed

constexpr auto tables = [] {
    std::array<std::array<std::uint32_t, 256>, 8> made{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t rest = byte;
        for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? polynomial : 0);
        made[0][byte] = rest;
    }
    for (std::uint32_t byte = 0; byte < 256; ++byte)
        for (std::size_t i = 1; i < made.size(); ++i)
            made[i][byte] = made[i - 1][byte] >> 8 ^ made[0][made[i - 1][byte] & 0xff];
    return made;
}();

std::uint32_t next_by_tables(std::uint32_t sum, std::uint64_t word) {
    word ^= sum;
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < tables.size(); ++i) next ^= tables[tables.size() - 1 - i][word >> 8 * i & 0xff];
    return next;
}

using Add = void (*)(Lanes&, const std::byte*, std::byte*, std::size_t);

// Sums and copies blocks with `next`, one word's step of a sum.
template <std::uint32_t (*next)(std::uint32_t sum, std::uint64_t word)>
void add_blocks(Lanes& lanes, const std::byte* from, std::byte* to, std::size_t blocks) {
    Lanes sums = lanes;
    for (; blocks != 0; --blocks, from += checksum_block, to += checksum_block) {
        std::array<std::uint64_t, 4> words;
        std::memcpy(words.data(), from, sizeof words);
        std::memcpy(to, words.data(), sizeof words);
        for (std::size_t lane = 0; lane < sums.size(); ++lane) sums[lane] = next(sums[lane], words[lane]);
    }
    lanes = sums;
}

constexpr Add add_by_tables = add_blocks<next_by_tables>;

#if defined(__x86_64__)

// Spelt out: compilers disagree on what allows their intrinsic in a function that not every processor runs.
inline std::uint32_t next_by_instruction(std::uint32_t sum, std::uint64_t word) {
    std::uint64_t wide = sum;
    asm("crc32q %1, %0" : "+r"(wide) : "rm"(word));
    return static_cast<std::uint32_t>(wide);
}

Add choose() {
    std::uint32_t eax, ebx, ecx, edx;
    const bool has_instruction = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_SSE4_2) != 0;
    return has_instruction ? add_blocks<next_by_instruction> : add_by_tables;
}

#elif defined(__ARM_FEATURE_CRC32)

inline std::uint32_t next_by_instruction(std::uint32_t sum, std::uint64_t word) {
    return __crc32cd(sum, word);
}

Add choose() {
    return add_blocks<next_by_instruction>;
}

#else

Add choose() {
    return add_by_tables;
}

#endif

const Add chosen = choose();

}  // namespace

Checksum::Checksum() : add_(chosen) {}

Checksum Checksum::by_tables() {
    Checksum made;
    made.add_ = add_by_tables;
    return made;
}

void Checksum::begin() {
    lanes_.fill(~std::uint32_t{0});
    held_bytes_ = 0;
}

void Checksum::pass(std::span<const std::byte> from, std::byte* to) {
    if (held_bytes_ != 0) {
        const auto first = from.first(std::min(from.size(), checksum_block - held_bytes_));
        std::copy(first.begin(), first.end(), held_.begin() + static_cast<std::ptrdiff_t>(held_bytes_));
        std::copy(first.begin(), first.end(), to);
        held_bytes_ += first.size();
        if (held_bytes_ < checksum_block) return;
        add_(lanes_, held_.data(), held_.data(), 1);
        held_bytes_ = 0;
        from = from.subspan(first.size());
        to += first.size();
    }
    const std::size_t blocks = from.size() / checksum_block;
    add_(lanes_, from.data(), to, blocks);
    const auto rest = from.subspan(blocks * checksum_block);
    std::copy(rest.begin(), rest.end(), held_.begin());
    std::copy(rest.begin(), rest.end(), to + blocks * checksum_block);
    held_bytes_ = rest.size();
}

std::array<std::byte, checksum_bytes> Checksum::end() {
    if (held_bytes_ != 0) {
        std::fill(held_.begin() + static_cast<std::ptrdiff_t>(held_bytes_), held_.end(), std::byte{0});
        add_(lanes_, held_.data(), held_.data(), 1);
        held_bytes_ = 0;
    }
    std::array<std::byte, checksum_bytes> sums;
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<std::byte>(~lanes_[i / 4] >> 8 * (i % 4));
    return sums;
}

}  // namespace multiring
