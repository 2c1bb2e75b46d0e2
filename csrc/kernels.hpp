// The kernels of one instruction set, as a table. kernels.cpp is compiled once for each set; reduce.cpp picks one.
#pragma once

#include <cstddef>

#include "arithmetic.hpp"
#include "types.hpp"

namespace multiring {

struct Kernels {
    Reduction reductions[dtype_names.size()][op_names.size()];                                         // [Dtype][Op]
    void (*narrow[wire_names.size() - 1])(void* destination, const float* source, std::size_t count);  // [Wire - 1]
    void (*widen[wire_names.size() - 1])(float* destination, const void* source, std::size_t count);
    void (*round[wire_names.size() - 1])(float* values, float* residual, std::size_t count, float weight);
    void (*repay)(float* values, float* residual, std::size_t count);
    void (*copy)(void* destination, const void* source, std::size_t bytes);
    void (*copy_streaming)(void* destination, const void* source, std::size_t bytes);
    void (*transpose[5])(void* to, std::ptrdiff_t to_stride, const void* from, std::ptrdiff_t from_stride,
                         std::size_t rows, std::size_t columns);  // indexed by log2 of an element's bytes
};

extern const Kernels kernels_portable;
#ifdef __x86_64__
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace multiring
