// Arithmetic on spans: n-way reductions in one pass over the destination, and copies. The instruction set is chosen
// once, at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "types.hpp"

namespace multiring {

// destination[i] = finish(sources[0][i] op sources[1][i] op ...), summed from left to right. The destination may be one
// of the sources, whichever its place. float16, bfloat16 and float8 accumulate in float32 and are rounded once;
// integers wrap; NaN propagates through min and max; bool is logical. `divisor` > 1 divides the result (avg).
using Reduction = void (*)(void* destination, const void* const* sources, int source_count, std::size_t count,
                           double divisor);

// The reduction for a type and operation, nullptr where it has no meaning (avg or prod of ..., bits of floats).
Reduction find_reduction(Dtype dtype, Op op);

// Formats in which float32 may travel. Narrowing rounds to nearest, ties to even; what float16 cannot hold becomes
// infinity. int8 is blocks of elements, each a float32, its scale, and then its elements' codes of -127 to 127; the
// last block of a message may be shorter. A block that holds infinity or NaN is NaN as a whole.
enum class Wire : std::uint8_t { same, bfloat16, float16, int8 };
inline constexpr std::array<std::string_view, 4> wire_names{"same", "bfloat16", "float16", "int8"};
// planning/plan.py has the same number. Blocks of 64 to 512 elements are narrowed at 13 to 20 GB/s of float32 by a core
// of an AMD EPYC with AVX2, and at 6 to 9 without; of 256, scales are 1.5 % of what travels.
inline constexpr std::size_t scaled_elements = 256;
// What `count` elements take in a narrow format.
constexpr std::size_t narrow_bytes(Wire wire, std::size_t count) {
    return wire == Wire::int8 ? count + (count + scaled_elements - 1) / scaled_elements * sizeof(float) : 2 * count;
}
void narrow(Wire wire, void* destination, const float* source, std::size_t count);
void widen(Wire wire, float* destination, const void* source, std::size_t count);

// The reduction of float32 whose sources, but for the destination, are in the format `arriving`. Every contribution is
// rounded once, this rank's too, so that whoever sums them gets the same; the sum is float32, and is `rounded` where
// later messages that carry it are narrow. Rounding what is rounded changes nothing: in int8, of the same blocks. What
// rounding the sum loses is added to `residual`, if that is given, as this rank's contribution lacks it: times divisor.
void reduce_narrow(Reduction reduction, float* destination, std::span<const void* const> sources, std::size_t count,
                   double divisor, Wire arriving, Wire rounded, float* residual = nullptr);

// Memory of what rounding loses: `repay` adds the residual to the values, and nothing is left of it; `round` rounds the
// values in place and adds to the residual what they lose, times `weight`. Where that is no finite number, as where a
// value or another of its block is none, the residual becomes 0.
void repay(float* values, float* residual, std::size_t count);
void round(Wire wire, float* values, float* residual, std::size_t count, float weight = 1);

void copy(void* destination, const void* source, std::size_t bytes);
// Copy past the caches: for destinations that nobody reads soon.
void copy_streaming(void* destination, const void* source, std::size_t bytes);
// to[i * to_stride + j] = from[i + j * from_stride] for i < rows, j < columns; elements of 1, 2, 4, 8 or 16 bytes.
void transpose(void* to, std::ptrdiff_t to_stride, const void* from, std::ptrdiff_t from_stride, std::size_t rows,
               std::size_t columns, std::size_t itemsize);

std::string_view instruction_set();

}  // namespace multiring
