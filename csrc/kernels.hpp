// The kernels of one instruction set, as a table. kernels.cpp is compiled once for each set; reduce.cpp picks one.
#pragma once

#include <cstddef>

#include "reduce.hpp"

namespace multiring {

struct Kernels {
    Reduction reductions[12][8];  // [Dtype][Op]
    void (*copy_streaming)(void* destination, const void* source, std::size_t bytes);
};

extern const Kernels kernels_portable;
#ifdef __x86_64__
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace multiring
