// Rhythm: the number of steps that a program takes, told by the gaps between its calls.
//
// The calls of a step follow each other closely; before its first call a program computes. Each gap that is at least
// half as long as the longest one of the same seconds therefore counts as the beginning of a step. Two bits after the
// leading one of a gap are kept: one that is shorter by up to a fifth may count too.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "wait.hpp"

namespace multiring {

class Rhythm {
  public:
    static constexpr std::size_t per_octave = 4, gap_count = 64 * per_octave;
    using Gaps = std::array<std::uint32_t, gap_count>;  // their number, by length

    // Any caller's, at a call. Callers that meet here may lose a gap.
    void call(Clock::time_point now) {
        const auto time = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
        const std::int64_t before = last_.load(std::memory_order_relaxed);
        last_.store(time, std::memory_order_relaxed);
        if (before == 0) return;
        std::atomic<std::uint32_t>& gaps = gaps_[index(time > before ? static_cast<std::uint64_t>(time - before) : 0)];
        gaps.store(gaps.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
    Gaps gaps() const {
        Gaps gaps;
        for (std::size_t i = 0; i < gap_count; ++i) gaps[i] = gaps_[i].load(std::memory_order_relaxed);
        return gaps;
    }
    // Steps that began between two looks.
    static int steps(const Gaps& from, const Gaps& to) {
        std::size_t longest = gap_count;
        while (longest > 0 && from[longest - 1] == to[longest - 1]) --longest;
        std::uint32_t steps = 0;
        for (std::size_t i = longest > per_octave ? longest - 1 - per_octave : 0; i < longest; ++i)
            steps += to[i] - from[i];
        return static_cast<int>(steps);
    }

  private:
    static std::size_t index(std::uint64_t nanoseconds) {
        if (nanoseconds < per_octave) return nanoseconds;
        const int width = std::bit_width(nanoseconds);
        return static_cast<std::size_t>(width - 2) * per_octave + (nanoseconds >> (width - 3)) % per_octave;
    }

    std::atomic<std::int64_t> last_{0};
    std::array<std::atomic<std::uint32_t>, gap_count> gaps_{};
};

}  // namespace multiring
