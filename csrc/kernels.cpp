// The reduction loops, written so that compilers vectorise them. Compiled once for each instruction set, with
// MULTIRING_KERNELS naming the table; everything else here has internal linkage, so that no code of a newer instruction
// set can be picked by the linker for an older one.
//
// A destination is made piece by piece: the accumulators of a piece stay in the first-level cache while every source is
// added to them, so any number of sources costs one pass over memory.
#include "kernels.hpp"

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifdef __clang__
#define MULTIRING_VECTORISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define MULTIRING_VECTORISE _Pragma("GCC ivdep")
#endif

namespace multiring {
namespace {

constexpr std::size_t piece_elements = 1024;

// Arithmetic as a thread begins with it, for as long as this lives: rounding to nearest, and denormal numbers kept. A
// caller may have set otherwise (XLA and TensorFlow flush them in their threads), and a sum must not depend on whose
// thread makes it.
class DefaultArithmetic {
  public:
    DefaultArithmetic() : before_(control()) {
        if (before_ != standard) set(standard);
    }
    ~DefaultArithmetic() {
        if (before_ != standard) set(before_);
    }
    DefaultArithmetic(const DefaultArithmetic&) = delete;
    DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

  private:
#if defined(__x86_64__)
    using Control = std::uint32_t;
    static constexpr Control standard = 0x1f80, sticky = 0x3f;  // all exceptions masked; which have occurred
    static Control control() {
        Control now;
        asm volatile("stmxcsr %0" : "=m"(now) : : "memory");
        return now & ~sticky;
    }
    static void set(Control to) { asm volatile("ldmxcsr %0" : : "m"(to) : "memory"); }
#elif defined(__aarch64__)
    using Control = std::uint64_t;
    static constexpr Control standard = 0;
    static Control control() {
        Control now;
        asm volatile("mrs %0, fpcr" : "=r"(now) : : "memory");
        return now;
    }
    static void set(Control to) { asm volatile("msr fpcr, %0" : : "r"(to) : "memory"); }
#else
    using Control = int;
    static constexpr Control standard = 0;
    static Control control() { return standard; }
    static void set(Control) {}
#endif
    const Control before_;
};

// ---- copies -------------------------------------------------------------------------------------------------------

enum class Stores { kept, streaming };  // in the caches, or past them

#ifdef __x86_64__
// One cache line, to an aligned place.
template <Stores stores>
void copy_line(unsigned char* to, const unsigned char* from) {
#if defined(__AVX512F__)
    const __m512i line = _mm512_loadu_si512(from);
    if constexpr (stores == Stores::streaming)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
    else
        _mm512_store_si512(to, line);
#elif defined(__AVX2__)
    for (int i = 0; i < 64; i += 32) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        if constexpr (stores == Stores::streaming)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), half);
        else
            _mm256_store_si256(reinterpret_cast<__m256i*>(to + i), half);
    }
#else
    for (int i = 0; i < 64; i += 16) {
        const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        if constexpr (stores == Stores::streaming)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), quarter);
        else
            _mm_store_si128(reinterpret_cast<__m128i*>(to + i), quarter);
    }
#endif
}
#endif

template <Stores stores>
void copy_bytes(void* destination, const void* source, std::size_t bytes) {
    auto* to = static_cast<unsigned char*>(destination);
    auto* from = static_cast<const unsigned char*>(source);
#ifdef __x86_64__
    constexpr std::size_t few = 1024;  // that the C library copies in registers
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % 64;
    // The C library leaves a long copy to the processor's string instruction: quickest where both sides lie alike to
    // their lines, and slower than this where they do not, as in most arrays of NumPy. Measured:
    // benchmarks/results/2026-11-28-constants.md, Engine.
    const bool lie_alike = (reinterpret_cast<std::uintptr_t>(from) + head) % 64 == 0;
    if (bytes >= few && (stores == Stores::streaming || !lie_alike)) {
        std::memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= 64; to += 64, from += 64, bytes -= 64) copy_line<stores>(to, from);
        // Streaming stores are not ordered by the release store that announces the data.
        if constexpr (stores == Stores::streaming) _mm_sfence();
    }
#endif
    std::memcpy(to, from, bytes);
}

// ---- formats: how an element is kept, and what it is summed in ------------------------------------------------------

template <class T>
struct Plain {
    using Stored = T;
    using Accumulator = T;
    static constexpr bool is_plain = true;
};

struct Bfloat16 {
    using Stored = std::uint16_t;
    using Accumulator = float;
    static constexpr bool is_plain = false;

    static void load(float* __restrict out, const Stored* __restrict in, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint32_t bits = static_cast<std::uint32_t>(in[i]) << 16;
            std::memcpy(&out[i], &bits, 4);
        }
    }
    static void store(Stored* __restrict out, const float* __restrict in, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            std::uint32_t bits;
            std::memcpy(&bits, &in[i], 4);
            const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
            const std::uint32_t quiet_nan = (bits >> 16) | 0x40;
            out[i] = static_cast<Stored>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
        }
    }
};

struct Float16 {
    using Stored = std::uint16_t;
    using Accumulator = float;
    static constexpr bool is_plain = false;

    static void load(float* __restrict out, const Stored* __restrict in, std::size_t n) {
        std::size_t i = 0;
#ifdef __F16C__
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
        for (; i < n; ++i) out[i] = widen(in[i]);
    }
    static void store(Stored* __restrict out, const float* __restrict in, std::size_t n) {
        std::size_t i = 0;
#ifdef __F16C__
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
        for (; i < n; ++i) out[i] = narrow(in[i]);
    }

  private:
    // Exponents are moved by multiplying with a power of two, which also normalises subnormal numbers exactly.
    static float widen(Stored half) {
        const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fff) << 13;
        std::uint32_t bits = magnitude;
        float value;
        std::memcpy(&value, &bits, 4);
        value *= 0x1p112f;
        std::memcpy(&bits, &value, 4);
        if (magnitude >= 0x7c00u << 13) bits |= 0x7f800000;  // infinity and NaN
        if (magnitude > 0x7c00u << 13) bits |= 0x00400000;   // quiet
        bits |= static_cast<std::uint32_t>(half & 0x8000) << 16;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    static Stored narrow(float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const std::uint32_t sign = (bits >> 16) & 0x8000;
        bits &= 0x7fffffff;
        if (bits > 0x7f800000) return static_cast<Stored>(sign | 0x7e00 | ((bits >> 13) & 0x3ff));
        if (bits >= 0x47800000) return static_cast<Stored>(sign | 0x7c00);  // 65536 and above
        if (bits < 0x38800000) {                                            // subnormal: let the adder round
            float magnitude;
            std::memcpy(&magnitude, &bits, 4);
            magnitude += 0.5f;
            std::memcpy(&bits, &magnitude, 4);
            return static_cast<Stored>(sign | (bits - 0x3f000000));
        }
        bits += 0xfff + ((bits >> 13) & 1);
        return static_cast<Stored>(sign | ((bits - 0x38000000) >> 13));
    }
};

// The 8-bit formats: a sign, exponent bits, mantissa bits. `fn` has no infinities and one NaN, all bits set; `fnuz` has
// no negative zero either, whose bits are its NaN; e5m2 is like float16. Rounding is torch's: what is too large becomes
// infinity, the largest number (fn) or NaN (fnuz).
enum class Special { infinities, fn, fnuz };

template <int mantissa_bits, int bias, Special special>
struct Float8 {
    using Stored = std::uint8_t;
    using Accumulator = float;
    static constexpr bool is_plain = false;

    static void load(float* __restrict out, const Stored* __restrict in, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) std::memcpy(&out[i], &values.bits[in[i]], 4);
    }
    static void store(Stored* __restrict out, const float* __restrict in, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) out[i] = narrow(in[i]);
    }
    // Choices are masks, which every compiler vectorises.
    static Stored narrow(float value, bool has_negative_zero = special != Special::fnuz) {
        constexpr int dropped = 23 - mantissa_bits;
        constexpr std::int32_t smallest_normal = (128 - bias) << 23;
        // A float with this exponent has the smallest subnormal number as its last place: let the adder round.
        constexpr std::int32_t rounder = (127 + 24 - bias - mantissa_bits) << 23;
        constexpr std::int32_t largest = too_large, no_number = nan;
        std::int32_t bits;
        std::memcpy(&bits, &value, 4);
        const std::int32_t sign = (bits >> 24) & 0x80;
        bits &= 0x7fffffff;
        float magnitude, at;
        std::memcpy(&magnitude, &bits, 4);
        std::memcpy(&at, &rounder, 4);
        magnitude += at;
        std::int32_t subnormal;
        std::memcpy(&subnormal, &magnitude, 4);
        subnormal -= rounder;
        const std::int32_t odd = (bits >> dropped) & 1;
        const std::int32_t normal = (bits - ((127 - bias) << 23) + ((1 << (dropped - 1)) - 1) + odd) >> dropped;
        const std::int32_t is_subnormal = (bits - smallest_normal) >> 31, is_nan = (0x7f800000 - bits) >> 31;
        std::int32_t code = (subnormal & is_subnormal) | (normal & ~is_subnormal);
        const std::int32_t is_too_large = (largest - code) >> 31;
        code = (code & ~is_too_large) | (largest & is_too_large);
        code = (code & ~is_nan) | (no_number & is_nan);
        const std::int32_t has_sign = has_negative_zero ? -1 : -code >> 31;
        return static_cast<Stored>((sign & has_sign) | code);
    }

  private:
    static constexpr std::uint32_t hidden = 1u << mantissa_bits;
    static constexpr std::uint32_t nan = special == Special::fnuz ? 0x80 : 0x7f;
    static constexpr std::uint32_t infinity = 0x7c;  // e5m2
    static constexpr std::uint32_t too_large = special == Special::infinities ? infinity
                                               : special == Special::fn       ? 0x7e
                                                                              : nan;  // and all codes above

    // The float32 of every code, as bits.
    struct CodeValues {
        std::uint32_t bits[256];
        constexpr CodeValues() : bits{} {
            for (std::uint32_t code = 0; code < 256; ++code) bits[code] = widen(code);
        }
    };
    static constexpr std::uint32_t widen(std::uint32_t code) {
        const std::uint32_t sign = (code & 0x80) << 24, magnitude = code & 0x7f;
        constexpr std::uint32_t quiet_nan = 0x7fc00000, infinite = 0x7f800000;
        if (special == Special::fnuz && code == nan) return quiet_nan;
        if (special == Special::fn && magnitude == nan) return sign | quiet_nan;
        if (special == Special::infinities && magnitude > infinity) return sign | quiet_nan;
        if (special == Special::infinities && magnitude == infinity) return sign | infinite;
        if (magnitude == 0) return sign;
        std::uint32_t exponent = magnitude >> mantissa_bits, mantissa = magnitude & (hidden - 1);
        if (exponent == 0) {  // subnormal
            for (exponent = 1; mantissa < hidden; mantissa <<= 1) --exponent;
            mantissa -= hidden;
        }
        return sign | (exponent + 127 - bias) << 23 | mantissa << (23 - mantissa_bits);
    }
    static constexpr CodeValues values{};
};

using Float8E4m3fn = Float8<3, 7, Special::fn>;
using Float8E5m2 = Float8<2, 15, Special::infinities>;
using Float8E4m3fnuz = Float8<3, 8, Special::fnuz>;
using Float8E5m2fnuz = Float8<2, 16, Special::fnuz>;

// Codes of the largest element of a block as the integer `top`, packed: a block of n takes m = n * bits / 8 bytes,
// rounded up, and byte i holds the codes of elements i, i + m, i + 2m, ..., the first in its lowest bits.
template <int bits>
struct IntegerCodes {
    static constexpr std::uint32_t top = (1u << (bits - 1)) - 1;
    static constexpr int spare = top == 1 ? 0 : bits - 1;  // bits that a product with a code has more than the scale
    static constexpr float tiny = 0x1p-141f;               // scales up to this are powers of two
    static constexpr std::uint32_t least = 1;              // bits of the smallest scale
    static constexpr std::size_t per_byte = 8 / bits;

    static void load(float* __restrict out, const std::uint8_t* __restrict in, std::size_t n, float scale) {
        const std::size_t m = (n + per_byte - 1) / per_byte;
        for (std::size_t k = 0; k * m < n; ++k) {
            const std::size_t here = n - k * m < m ? n - k * m : m;
            const int above = static_cast<int>(32 - bits * (k + 1));
            for (std::size_t i = 0; i < here; ++i) {
                const std::int32_t code = static_cast<std::int32_t>(std::uint32_t{in[i]} << above) >> (32 - bits);
                out[k * m + i] = scale * static_cast<float>(code);
            }
        }
    }
    static void store(std::uint8_t* __restrict out, const float* __restrict in, std::size_t n, float lift,
                      float inverse) {
        const std::size_t m = (n + per_byte - 1) / per_byte;
        for (std::size_t k = 0; k * m < n; ++k) {
            const std::size_t here = n - k * m < m ? n - k * m : m;
            const int below = static_cast<int>(bits * k);
            for (std::size_t i = 0; i < here; ++i) {
                const float last_place_is_one = in[k * m + i] * lift * inverse + 0x1.8p23f;  // the adder rounds
                std::uint32_t code;
                std::memcpy(&code, &last_place_is_one, 4);
                code = (code & ((1u << bits) - 1)) << below;
                out[i] = static_cast<std::uint8_t>(k == 0 ? code : out[i] | code);
            }
        }
    }
};

// Codes of e4m3fn, whose largest number, 448, is that of a block. No zero has a sign.
struct Float8Codes {
    static constexpr std::uint32_t top = 448;
    static constexpr int spare = 4;
    static constexpr float tiny = 0x1p-121f;
    static constexpr std::uint32_t least = 1u << 9;  // times the smallest code, 2^-9, it is the smallest float32

    static void load(float* __restrict out, const std::uint8_t* __restrict in, std::size_t n, float scale) {
        for (std::size_t i = 0; i < n; ++i) {
            const std::int32_t magnitude = in[i] & 0x7f, is_subnormal = (magnitude - 8) >> 31;
            const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
            std::int32_t bits;
            std::memcpy(&bits, &subnormal, 4);
            bits = (bits & is_subnormal) | (((magnitude << 20) + (120 << 23)) & ~is_subnormal);
            const std::uint32_t with_sign = static_cast<std::uint32_t>(bits) | (in[i] & 0x80u) << 24;
            float value;
            std::memcpy(&value, &with_sign, 4);
            out[i] = scale * value;
        }
    }
    static void store(std::uint8_t* __restrict out, const float* __restrict in, std::size_t n, float lift,
                      float inverse) {
        for (std::size_t i = 0; i < n; ++i) out[i] = Float8E4m3fn::narrow(in[i] * lift * inverse, false);
    }
};

// Blocks of codes, each behind its scale: a wire, and no type of arrays. An element is its code times the scale,
// exactly: a scale has as few significant bits as that needs. The largest element of a block becomes the top code times
// the scale, of which the same scale follows again, so what has been rounded is rounded to itself.
template <Wire wire, class Codes>
struct Blocks {
    using Stored = std::uint8_t;

    static void load(float* __restrict out, const Stored* __restrict in, std::size_t n) {
        for (; n >= block; n -= block) {
            load_block(out, in, block);
            out += block, in += bytes;
        }
        if (n != 0) load_block(out, in, n);
    }
    static void store(Stored* __restrict out, const float* __restrict in, std::size_t n) {
        for (; n >= block; n -= block) {
            store_block(out, in, block);
            out += bytes, in += block;
        }
        if (n != 0) store_block(out, in, n);
    }

  private:
    static constexpr std::size_t block = format_of(wire).block, bytes = narrow_bytes(wire, block);
    static_assert(piece_elements % block == 0 && longest_block % block == 0);

    // The top code times it is finite, and times the next one is not.
    static constexpr float largest_scale() {
        const std::uint64_t mantissa = (0xffffffull << 16) / Codes::top;  // 0xffffff: that of the largest float32
        std::uint64_t unit = 1;
        while (mantissa / unit >> (24 - Codes::spare) != 0) unit *= 2;
        return static_cast<float>(mantissa / unit * unit) * 0x1p88f;
    }

    // Scale from the bits of the largest magnitude.
    static float scale_of(std::uint32_t largest) {
        constexpr float top = Codes::top;
        float magnitude, scale;
        std::uint32_t bits;
        std::memcpy(&magnitude, &largest, 4);
        if (largest == 0) return 0;
        if (largest >= 0x7f800000) {
            bits = 0x7fc00000;  // the same NaN, whichever it was
        } else if (magnitude <= top * Codes::tiny) {
            // Scales are so few here that the nearest may be far, or products would have too many places.
            std::memcpy(&scale, &Codes::least, 4);
            while (top * scale < magnitude) scale *= 2;
            std::memcpy(&bits, &scale, 4);
        } else {
            scale = magnitude / top;
            std::memcpy(&bits, &scale, 4);
            int dropped = Codes::spare;
            if (bits < 0x00800000)  // subnormal
                for (dropped = 0; bits >> dropped >= 1u << (24 - Codes::spare);) ++dropped;
            bits = (bits + ((1u << dropped) >> 1)) >> dropped << dropped;
        }
        std::memcpy(&scale, &bits, 4);
        return scale > largest_scale() ? largest_scale() : scale;
    }

    static void load_block(float* __restrict out, const Stored* __restrict in, std::size_t n) {
        float scale;
        std::memcpy(&scale, in, sizeof scale);
        Codes::load(out, in + sizeof scale, n, scale);
    }
    static void store_block(Stored* __restrict out, const float* __restrict in, std::size_t n) {
        std::int32_t largest = 0;
        for (std::size_t i = 0; i < n; ++i) {
            std::int32_t bits;
            std::memcpy(&bits, &in[i], 4);
            bits &= 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        const float scale = scale_of(static_cast<std::uint32_t>(largest));
        std::memcpy(out, &scale, sizeof scale);
        out += sizeof scale;
        if (!(scale > 0)) {  // zeros, or NaN
            std::memset(out, 0, narrow_bytes(wire, n) - sizeof scale);
            return;
        }
        const float lift = scale < 0x1p-100f ? 0x1p64f : 1.0f;  // the inverse of a subnormal scale is no float32
        Codes::store(out, in, n, lift, 1 / (scale * lift));
    }
};

using Int8Blocks = Blocks<Wire::int8, IntegerCodes<8>>;
using Int4Blocks = Blocks<Wire::int4, IntegerCodes<4>>;
using Int2Blocks = Blocks<Wire::int2, IntegerCodes<2>>;
using Float8Blocks = Blocks<Wire::float8, Float8Codes>;

// ---- operations ---------------------------------------------------------------------------------------------------

template <class T>
T wrapping_multiply(T a, T b) {
    using Unsigned = std::conditional_t<sizeof(T) <= 4, std::uint32_t, std::uint64_t>;
    if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
    else
        return a * b;
}
template <class T>
T wrapping_add(T a, T b) {
    if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
    else
        return a + b;
}

struct Sum {
    template <class T>
    static T apply(T a, T b) {
        return wrapping_add(a, b);
    }
};
struct Product {
    template <class T>
    static T apply(T a, T b) {
        return wrapping_multiply(a, b);
    }
};
// NaN wins from either side.
struct Minimum {
    template <class T>
    static T apply(T a, T b) {
        return ((a < b) | (a != a)) ? a : b;
    }
};
struct Maximum {
    template <class T>
    static T apply(T a, T b) {
        return ((a > b) | (a != a)) ? a : b;
    }
};
struct And {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a & b);
    }
};
struct Or {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a | b);
    }
};
struct Xor {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a ^ b);
    }
};

// out = a op b, out = a op b op c, ...: up to four operands in registers. `out` may be any of the operands.
template <class Operation, class T>
void combine(T* out, const T* a, const T* b, std::size_t n) {
    MULTIRING_VECTORISE
    for (std::size_t i = 0; i < n; ++i) out[i] = Operation::apply(a[i], b[i]);
}
template <class Operation, class T>
void combine(T* out, const T* a, const T* b, const T* c, std::size_t n) {
    MULTIRING_VECTORISE
    for (std::size_t i = 0; i < n; ++i) out[i] = Operation::apply(Operation::apply(a[i], b[i]), c[i]);
}
template <class Operation, class T>
void combine(T* out, const T* a, const T* b, const T* c, const T* d, std::size_t n) {
    MULTIRING_VECTORISE
    for (std::size_t i = 0; i < n; ++i)
        out[i] = Operation::apply(Operation::apply(Operation::apply(a[i], b[i]), c[i]), d[i]);
}

// All of `sources` into `out`: n elements, a piece at most unless there are no more than four sources.
template <class Operation, class T>
void combine_all(T* out, T* accumulated, const void* const* sources, int source_count, std::size_t at, std::size_t n) {
    const auto source = [&](int k) { return static_cast<const T*>(sources[k]) + at; };
    T* to = source_count <= 4 ? out : accumulated;
    int used = source_count < 4 ? source_count : 4;
    switch (used) {
        case 1:
            if (to != source(0)) std::memcpy(to, source(0), n * sizeof(T));
            break;
        case 2: combine<Operation>(to, source(0), source(1), n); break;
        case 3: combine<Operation>(to, source(0), source(1), source(2), n); break;
        default: combine<Operation>(to, source(0), source(1), source(2), source(3), n);
    }
    while (used < source_count) {
        const int left = source_count - used;
        to = left <= 3 ? out : accumulated;
        switch (left) {
            case 1: combine<Operation>(to, accumulated, source(used), n); break;
            case 2: combine<Operation>(to, accumulated, source(used), source(used + 1), n); break;
            default: combine<Operation>(to, accumulated, source(used), source(used + 1), source(used + 2), n);
        }
        used += left < 3 ? left : 3;
    }
}

template <class T>
void divide(T* values, std::size_t n, double divisor) {
    const T by = static_cast<T>(divisor);
    for (std::size_t i = 0; i < n; ++i) values[i] /= by;
}

template <class Format, class Operation>
void reduce(void* destination, const void* const* sources, int source_count, std::size_t count, double divisor) {
    using Stored = typename Format::Stored;
    using Accumulator = typename Format::Accumulator;
    const DefaultArithmetic arithmetic;
    alignas(64) Accumulator accumulated[piece_elements];
    alignas(64) Accumulator widened[Format::is_plain ? 1 : piece_elements];
    for (std::size_t at = 0; at < count; at += piece_elements) {
        const std::size_t n = count - at < piece_elements ? count - at : piece_elements;
        Stored* out = static_cast<Stored*>(destination) + at;
        if constexpr (Format::is_plain) {
            combine_all<Operation>(out, accumulated, sources, source_count, at, n);
            if constexpr (std::is_floating_point_v<Accumulator>)
                if (divisor > 1) divide(out, n, divisor);
        } else {
            Format::load(accumulated, static_cast<const Stored*>(sources[0]) + at, n);
            for (int k = 1; k < source_count; ++k) {
                Format::load(widened, static_cast<const Stored*>(sources[k]) + at, n);
                combine<Operation>(accumulated, accumulated, widened, n);
            }
            if (divisor > 1) divide(accumulated, n, divisor);
            Format::store(out, accumulated, n);
        }
    }
}

// A complex number is a pair: sums and averages treat its halves alike.
template <class T>
void reduce_complex(void* destination, const void* const* sources, int source_count, std::size_t count,
                    double divisor) {
    reduce<Plain<T>, Sum>(destination, sources, source_count, 2 * count, divisor);
}

template <class Format>
void narrow_all(void* destination, const float* source, std::size_t count) {
    const DefaultArithmetic arithmetic;
    Format::store(static_cast<typename Format::Stored*>(destination), source, count);
}

template <class Format>
void widen_all(float* destination, const void* source, std::size_t count) {
    const DefaultArithmetic arithmetic;
    Format::load(destination, static_cast<const typename Format::Stored*>(source), count);
}

template <class Format>
void round_all(float* __restrict values, float* __restrict residual, std::size_t count, float weight) {
    const DefaultArithmetic arithmetic;
    alignas(64) float rounded[piece_elements];
    alignas(64) std::uint16_t narrow[piece_elements];  // in any format
    for (std::size_t at = 0; at < count; at += piece_elements, values += piece_elements, residual += piece_elements) {
        const std::size_t n = count - at < piece_elements ? count - at : piece_elements;
        auto* stored = reinterpret_cast<typename Format::Stored*>(narrow);
        Format::store(stored, values, n);
        Format::load(rounded, stored, n);
        for (std::size_t i = 0; i < n; ++i) {
            const float owed = residual[i] + (values[i] - rounded[i]) * weight;
            residual[i] = owed - owed == 0 ? owed : 0;  // where it is finite
            values[i] = rounded[i];
        }
    }
}

void repay_all(float* __restrict values, float* __restrict residual, std::size_t count) {
    const DefaultArithmetic arithmetic;
    for (std::size_t i = 0; i < count; ++i) {
        values[i] += residual[i];
        residual[i] = 0;
    }
}

// Bytes other than 0 and 1 count as true and leave as 1.
template <class Operation>
void reduce_bool(void* destination, const void* const* sources, int source_count, std::size_t count, double) {
    alignas(64) std::uint8_t accumulated[piece_elements];
    alignas(64) std::uint8_t truth[piece_elements];
    const auto load = [&](std::uint8_t* out, const void* source, std::size_t at, std::size_t n) {
        const auto* in = static_cast<const std::uint8_t*>(source) + at;
        for (std::size_t i = 0; i < n; ++i) out[i] = in[i] != 0;
    };
    for (std::size_t at = 0; at < count; at += piece_elements) {
        const std::size_t n = count - at < piece_elements ? count - at : piece_elements;
        load(accumulated, sources[0], at, n);
        for (int k = 1; k < source_count; ++k) {
            load(truth, sources[k], at, n);
            combine<Operation>(accumulated, accumulated, truth, n);
        }
        std::memcpy(static_cast<std::uint8_t*>(destination) + at, accumulated, n);
    }
}

// ---- transposition ------------------------------------------------------------------------------------------------

// A square of elements whose rows fill 16 bytes: their interleaving is one instruction in every instruction set.
template <class T>
constexpr int side = 16 / sizeof(T);

// Rows i and i + side / 2, interleaved, become rows 2i and 2i + 1: log2(side) times.
template <class T, int... k>
void transpose_square(T* to, std::ptrdiff_t to_stride, const T* from, std::ptrdiff_t from_stride,
                      std::integer_sequence<int, k...>) {
    constexpr int half = side<T> / 2;
    using Row [[gnu::vector_size(16)]] = T;
    Row rows[side<T>], mixed[side<T>];
    for (int i = 0; i < side<T>; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(Row));
    for (int stride = 1; stride < side<T>; stride *= 2) {
        for (int i = 0; i < half; ++i) {
            const Row &one = rows[i], &other = rows[i + half];
#ifdef __clang__
            mixed[2 * i] = __builtin_shufflevector(one, other, (k / 2 + k % 2 * side<T>)...);
            mixed[2 * i + 1] = __builtin_shufflevector(one, other, (half + k / 2 + k % 2 * side<T>)...);
#else
            mixed[2 * i] = __builtin_shuffle(one, other, Row{static_cast<T>(k / 2 + k % 2 * side<T>)...});
            mixed[2 * i + 1] = __builtin_shuffle(one, other, Row{static_cast<T>(half + k / 2 + k % 2 * side<T>)...});
#endif
        }
        for (int i = 0; i < side<T>; ++i) rows[i] = mixed[i];
    }
    for (int i = 0; i < side<T>; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(Row));
}

struct Wide {
    std::uint64_t halves[2];
};

// Patch by patch, so that each line that is touched is in the caches until all of it has been read or written.
template <class T>
void transpose_all(void* destination, std::ptrdiff_t to_stride, const void* source, std::ptrdiff_t from_stride,
                   std::size_t rows, std::size_t columns) {
    constexpr std::size_t patch = 256 / sizeof(T);
    for (std::size_t first_row = 0; first_row < rows; first_row += patch) {
        const std::size_t last_row = rows - first_row < patch ? rows : first_row + patch;
        for (std::size_t first = 0; first < columns; first += patch) {
            const std::size_t last = columns - first < patch ? columns : first + patch;
            T* const to = static_cast<T*>(destination);
            const T* const from = static_cast<const T*>(source);
            const auto place = [](std::size_t i, std::ptrdiff_t stride) {
                return static_cast<std::ptrdiff_t>(i) * stride;
            };
            std::size_t done_rows = first_row, done = first;
            if constexpr (sizeof(T) <= 8) {
                done_rows += (last_row - first_row) / side<T> * side<T>;
                done += (last - first) / side<T> * side<T>;
                for (std::size_t j = first; j < done; j += side<T>)
                    for (std::size_t i = first_row; i < done_rows; i += side<T>)
                        transpose_square(to + place(i, to_stride) + j, to_stride, from + place(j, from_stride) + i,
                                         from_stride, std::make_integer_sequence<int, side<T>>());
            }
            for (std::size_t i = first_row; i < last_row; ++i)
                for (std::size_t j = i < done_rows ? done : first; j < last; ++j)
                    std::memcpy(to + place(i, to_stride) + static_cast<std::ptrdiff_t>(j),
                                from + static_cast<std::ptrdiff_t>(i) + place(j, from_stride), sizeof(T));
        }
    }
}

}  // namespace

#define MULTIRING_FLOATS(FORMAT) \
    {reduce<FORMAT, Sum>,        \
     reduce<FORMAT, Sum>,        \
     reduce<FORMAT, Minimum>,    \
     reduce<FORMAT, Maximum>,    \
     reduce<FORMAT, Product>,    \
     nullptr,                    \
     nullptr,                    \
     nullptr}
#define MULTIRING_INTEGERS(T)                              \
    {reduce<Plain<T>, Sum>,     nullptr,                   \
     reduce<Plain<T>, Minimum>, reduce<Plain<T>, Maximum>, \
     reduce<Plain<T>, Product>, reduce<Plain<T>, And>,     \
     reduce<Plain<T>, Or>,      reduce<Plain<T>, Xor>}

// Rows in the order of Dtype, columns in that of Op: sum avg min max prod band bor bxor.
extern const Kernels MULTIRING_KERNELS;
const Kernels MULTIRING_KERNELS{
    {
        MULTIRING_FLOATS(Plain<float>),
        MULTIRING_FLOATS(Plain<double>),
        MULTIRING_FLOATS(Float16),
        MULTIRING_FLOATS(Bfloat16),
        MULTIRING_INTEGERS(std::int8_t),
        MULTIRING_INTEGERS(std::uint8_t),
        MULTIRING_INTEGERS(std::int16_t),
        MULTIRING_INTEGERS(std::int32_t),
        MULTIRING_INTEGERS(std::int64_t),
        {reduce_bool<Or>, nullptr, reduce_bool<And>, reduce_bool<Or>, reduce_bool<And>, reduce_bool<And>,
         reduce_bool<Or>, reduce_bool<Xor>},
        {reduce_complex<float>, reduce_complex<float>, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr},
        {reduce_complex<double>, reduce_complex<double>, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr},
        MULTIRING_INTEGERS(std::uint16_t),
        MULTIRING_INTEGERS(std::uint32_t),
        MULTIRING_INTEGERS(std::uint64_t),
        MULTIRING_FLOATS(Float8E4m3fn),
        MULTIRING_FLOATS(Float8E5m2),
        MULTIRING_FLOATS(Float8E4m3fnuz),
        MULTIRING_FLOATS(Float8E5m2fnuz),
    },
    {narrow_all<Bfloat16>, narrow_all<Float16>, narrow_all<Int8Blocks>, narrow_all<Int4Blocks>, narrow_all<Int2Blocks>,
     narrow_all<Float8Blocks>},
    {widen_all<Bfloat16>, widen_all<Float16>, widen_all<Int8Blocks>, widen_all<Int4Blocks>, widen_all<Int2Blocks>,
     widen_all<Float8Blocks>},
    {round_all<Bfloat16>, round_all<Float16>, round_all<Int8Blocks>, round_all<Int4Blocks>, round_all<Int2Blocks>,
     round_all<Float8Blocks>},
    repay_all,
    copy_bytes<Stores::kept>,
    copy_bytes<Stores::streaming>,
    {transpose_all<std::uint8_t>, transpose_all<std::uint16_t>, transpose_all<std::uint32_t>,
     transpose_all<std::uint64_t>, transpose_all<Wide>},
};

}  // namespace multiring
