// Arithmetic on spans: n-way reductions in one pass over the destination, and copies. The instruction set is chosen
// once, at run time.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "arithmetic.hpp"
#include "types.hpp"

namespace multiring {

// The reduction for a type and operation, nullptr where it has no meaning (avg or prod of ..., bits of floats).
Reduction find_reduction(Dtype dtype, Op op);

// Narrowing rounds to nearest, ties to even; what float16 cannot hold becomes infinity.
void narrow(Wire wire, void* destination, const float* source, std::size_t count);
void widen(Wire wire, float* destination, const void* source, std::size_t count);

// The reduction of float32 whose sources, but for the destination, are in the format `arriving`. Every contribution is
// rounded once, this rank's too, so that whoever sums them gets the same; the sum is float32, and is `rounded` where
// later messages that carry it are narrow. Rounding what is rounded changes nothing, of the same blocks where there are
// some. What rounding the sum loses is added to `residual`, if that is given, as this rank's contribution lacks it:
// times divisor.
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
