// What those who ask for arithmetic on spans and the kernels that do it have in common: reductions, and the formats in
// which float32 travels.
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

// Formats in which float32 may travel. int8 is blocks of elements, each a float32, its scale, and then its elements'
// codes of -127 to 127; the last block of a message may be shorter. A block that holds infinity or NaN is NaN as a
// whole.
enum class Wire : std::uint8_t { same, bfloat16, float16, int8 };
inline constexpr std::array<std::string_view, 4> wire_names{"same", "bfloat16", "float16", "int8"};
// planning/plan.py has the same number. Blocks of 64 to 512 elements are narrowed at 13 to 20 GB/s of float32 by a core
// of an AMD EPYC with AVX2, and at 6 to 9 without; of 256, scales are 1.5 % of what travels.
inline constexpr std::size_t scaled_elements = 256;
// What `count` elements take in a narrow format.
constexpr std::size_t narrow_bytes(Wire wire, std::size_t count) {
    return wire == Wire::int8 ? count + (count + scaled_elements - 1) / scaled_elements * sizeof(float) : 2 * count;
}

}  // namespace multiring
