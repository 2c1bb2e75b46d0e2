// Layout of the structures of XLA's foreign function interface, as of its version 0.1, the lowest, so that one binary
// serves every jaxlib from 0.6 on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring::xla {

struct Error;

struct Extension {
    std::size_t struct_size;
    int type;  // 1: asks for Metadata
    Extension* next;
};

struct Version {
    std::size_t struct_size;
    Extension* extensions;
    int major, minor;
};

struct Metadata {
    std::size_t struct_size;
    Version version;
    std::uint32_t traits;
};

struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

struct ErrorArguments {
    std::size_t struct_size;
    Extension* extensions;
    const char* message;
    int code;
};

struct FfiApi {
    std::size_t struct_size;
    Extension* extensions;
    Version version;
    const void* internal;
    Error* (*create_error)(ErrorArguments*);  // more follow, of which nothing is needed
};

struct Buffer {
    std::size_t struct_size;
    Extension* extensions;
    int dtype;
    void* data;
    std::int64_t rank;
    const std::int64_t* extents;
};

struct Buffers {
    std::size_t struct_size;
    Extension* extensions;
    std::int64_t size;
    int* types;
    Buffer** buffers;
};

struct Text {
    const char* data;
    std::size_t size;
};

struct Scalar {
    int dtype;
    const void* value;
};

struct Attributes {
    std::size_t struct_size;
    Extension* extensions;
    std::int64_t size;
    int* types;
    Text** names;
    void** values;
};

struct CallFrame {
    std::size_t struct_size;
    Extension* extensions;
    const FfiApi* api;
    void* context;
    int stage;
    Buffers arguments, results;
    Attributes attributes;
};

inline constexpr int metadata_extension = 1, scalar_attribute = 3;
inline constexpr int invalid_argument = 3, aborted = 10;
inline constexpr int type_int64 = 5, type_token = 17;

// Runs one collective of one buffer, in place where XLA allows it. Operands and results are a token and an array;
// attributes, all int64: communicator, collective, op, root.
Error* run_collective(CallFrame* frame) noexcept;

}  // namespace multiring::xla
