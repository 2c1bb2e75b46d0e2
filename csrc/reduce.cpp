#include "reduce.hpp"

#include <cstring>

#include "kernels.hpp"

namespace multiring {
namespace {

struct Choice {
    const Kernels* kernels;
    std::string_view name;
};

Choice choose() {
#ifdef __x86_64__
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return {&kernels_avx512, "avx512"};
    if (avx2) return {&kernels_avx2, "avx2"};
#endif
    return {&kernels_portable, "portable"};
}

const Choice choice = choose();

}  // namespace

Reduction find_reduction(Dtype dtype, Op op) {
    return choice.kernels->reductions[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

void copy(void* destination, const void* source, std::size_t bytes) {
    std::memcpy(destination, source, bytes);
}

void copy_streaming(void* destination, const void* source, std::size_t bytes) {
    choice.kernels->copy_streaming(destination, source, bytes);
}

std::string_view instruction_set() {
    return choice.name;
}

}  // namespace multiring
