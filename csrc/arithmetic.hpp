// Reductions and narrow formats, shared by the kernels and their callers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace multiring {

// destination[i] = finish(sources[0][i] op sources[1][i] op ...), summed from left to right. The destination may be one
// of the sources, whichever its place. float16, bfloat16 and float8 accumulate in float32 and are rounded once;
// integers wrap; NaN propagates through min and max; bool is logical. `divisor` > 1 divides the result (avg).
using Reduction = void (*)(void* destination, const void* const* sources, int source_count, std::size_t count,
                           double divisor);

// Formats in which float32 may travel. Those of blocks send for each block a float32, its scale, and then its elements'
// codes; the last block of a message may be shorter. A block that holds infinity or NaN is NaN as a whole.
enum class Wire : std::uint8_t { same, bfloat16, float16, int8, int4, int2, float8 };
inline constexpr std::array<std::string_view, 7> wire_names{"same", "bfloat16", "float16", "int8",
                                                            "int4", "int2",     "float8"};
struct WireFormat {
    std::size_t bits;   // an element's
    std::size_t block;  // elements that share a scale; 1: there is none
};
// Indexed by Wire. planning/plan.py has the same numbers (tests/unit/test_wire.py compares them), and
// docs/algorithms.md the measurements behind the blocks.
inline constexpr std::array<WireFormat, wire_names.size()> wire_formats{
    {{32, 1}, {16, 1}, {16, 1}, {8, 256}, {4, 64}, {2, 64}, {8, 256}}};
inline constexpr std::size_t longest_block = 256;

constexpr const WireFormat& format_of(Wire wire) {
    return wire_formats[static_cast<std::size_t>(wire)];
}
// Bytes of `count` elements in a narrow format.
constexpr std::size_t narrow_bytes(Wire wire, std::size_t count) {
    const WireFormat& format = format_of(wire);
    const std::size_t scales = format.block == 1 ? 0 : (count + format.block - 1) / format.block;
    return (count * format.bits + 7) / 8 + scales * sizeof(float);
}

}  // namespace multiring
