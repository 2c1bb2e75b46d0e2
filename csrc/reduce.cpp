#include "reduce.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "kernels.hpp"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace multiring {
namespace {

struct ChosenKernels {
    const Kernels* kernels;
    std::string_view name;
};

#ifdef __x86_64__

constexpr std::uint32_t bit(int number) {
    return std::uint32_t{1} << number;
}

bool has_all(std::uint32_t found, std::uint32_t wanted) {
    return (found & wanted) == wanted;
}

// The registers that the operating system saves when it switches threads.
std::uint32_t saved_registers() {
    std::uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Asked of the processor itself: __builtin_cpu_supports needs a runtime library that not every compiler brings.
ChosenKernels choose() {
    constexpr std::uint32_t xsave = bit(27), f16c = bit(29), avx2 = bit(5);
    constexpr std::uint32_t avx512 = bit(16) | bit(17) | bit(30) | bit(31);  // F, DQ, BW, VL
    constexpr std::uint32_t ymm = 0x6, zmm = 0xe6;
    std::uint32_t eax, ebx, ecx, edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || !has_all(ecx, xsave | f16c))
        return {&kernels_portable, "portable"};
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return {&kernels_portable, "portable"};
    const std::uint32_t saved = saved_registers();
    if (has_all(ebx, avx2 | avx512) && has_all(saved, zmm)) return {&kernels_avx512, "avx512"};
    if (has_all(ebx, avx2) && has_all(saved, ymm)) return {&kernels_avx2, "avx2"};
    return {&kernels_portable, "portable"};
}

#else

ChosenKernels choose() {
    return {&kernels_portable, "portable"};
}

#endif

const ChosenKernels chosen = choose();

}  // namespace

Reduction find_reduction(Dtype dtype, Op op) {
    return chosen.kernels->reductions[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

void narrow(Wire wire, void* destination, const float* source, std::size_t count) {
    chosen.kernels->narrow[static_cast<std::size_t>(wire) - 1](destination, source, count);
}

void widen(Wire wire, float* destination, const void* source, std::size_t count) {
    chosen.kernels->widen[static_cast<std::size_t>(wire) - 1](destination, source, count);
}

void reduce_narrow(Reduction reduction, float* destination, std::span<const void* const> sources, std::size_t count,
                   double divisor, Wire arriving, Wire rounded, float* residual) {
    constexpr std::size_t piece = 1024;
    static_assert(piece % longest_block == 0);
    std::vector<float> widened(sources.size() * piece);
    std::vector<const void*> pieces(sources.size());
    std::byte narrowed[2 * piece];  // in any format
    for (std::size_t first = 0; first < count; first += piece) {
        const std::size_t n = std::min(piece, count - first);
        float* here = destination + first;
        for (std::size_t i = 0; i < sources.size(); ++i) {
            float* wide = widened.data() + i * piece;
            if (arriving == Wire::same) {
                pieces[i] = static_cast<const float*>(sources[i]) + first;
                continue;
            }
            pieces[i] = wide;
            if (sources[i] == destination) {
                narrow(arriving, narrowed, here, n);
                widen(arriving, wide, narrowed, n);
            } else {
                widen(arriving, wide, static_cast<const std::byte*>(sources[i]) + narrow_bytes(arriving, first), n);
            }
        }
        reduction(here, pieces.data(), static_cast<int>(pieces.size()), n, divisor);
        if (rounded == Wire::same) continue;
        if (residual != nullptr) {
            round(rounded, here, residual + first, n, static_cast<float>(divisor));
        } else {
            narrow(rounded, narrowed, here, n);
            widen(rounded, here, narrowed, n);
        }
    }
}

void repay(float* values, float* residual, std::size_t count) {
    chosen.kernels->repay(values, residual, count);
}

void round(Wire wire, float* values, float* residual, std::size_t count, float weight) {
    chosen.kernels->round[static_cast<std::size_t>(wire) - 1](values, residual, count, weight);
}

void copy(void* destination, const void* source, std::size_t bytes) {
    chosen.kernels->copy(destination, source, bytes);
}

void copy_streaming(void* destination, const void* source, std::size_t bytes) {
    chosen.kernels->copy_streaming(destination, source, bytes);
}

void transpose(void* to, std::ptrdiff_t to_stride, const void* from, std::ptrdiff_t from_stride, std::size_t rows,
               std::size_t columns, std::size_t itemsize) {
    chosen.kernels->transpose[std::countr_zero(itemsize)](to, to_stride, from, from_stride, rows, columns);
}

std::string_view instruction_set() {
    return chosen.name;
}

}  // namespace multiring
