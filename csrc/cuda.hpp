// The CUDA driver, found when the first tensor on a CUDA device comes. Nothing of CUDA is needed to build or to import
// this library: what is used of the driver's interface is declared here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace multiring::cuda {

using Address = std::uint64_t;  // in a device's memory
using Context = void*;
using Stream = void*;
using Event = void*;
using Result = int;

// Layouts and numbers are the driver's (cuda.h, CUDA 11.7 and newer).
struct Copy2D {
    std::size_t source_x, source_y;
    unsigned source_type;
    const void* source_host;
    Address source_device;
    void* source_array;
    std::size_t source_pitch;
    std::size_t target_x, target_y;
    unsigned target_type;
    void* target_host;
    Address target_device;
    void* target_array;
    std::size_t target_pitch;
    std::size_t width, height;
};
inline constexpr unsigned host_memory = 1, device_memory = 2;

struct MemoryOperation {
    unsigned operation;
    Address address;
    std::uint64_t value;  // the lower half of it
    unsigned flags;
    Address alias;
    std::uint64_t padding;
};
static_assert(sizeof(MemoryOperation) == 48);
inline constexpr unsigned wait_value_32 = 1, write_value_32 = 2;

// The functions of libcuda.so.1 that are used, by their names without the prefix "cu".
struct Driver {
    Result (*Init)(unsigned flags);
    Result (*DriverGetVersion)(int* version);
    Result (*GetErrorString)(Result result, const char** text);
    Result (*DeviceGet)(int* device, int ordinal);
    Result (*DevicePrimaryCtxRetain)(Context* context, int device);
    Result (*DevicePrimaryCtxRelease)(int device);
    Result (*CtxPushCurrent)(Context context);
    Result (*CtxPopCurrent)(Context* context);
    Result (*CtxGetStreamPriorityRange)(int* least, int* greatest);
    Result (*MemHostRegister)(void* memory, std::size_t bytes, unsigned flags);
    Result (*MemHostUnregister)(void* memory);
    Result (*MemHostGetDevicePointer)(Address* address, void* memory, unsigned flags);
    Result (*StreamCreateWithPriority)(Stream* stream, unsigned flags, int priority);
    Result (*StreamWaitEvent)(Stream stream, Event event, unsigned flags);
    Result (*StreamBatchMemOp)(Stream stream, unsigned count, MemoryOperation* operations, unsigned flags);
    Result (*EventCreate)(Event* event, unsigned flags);
    Result (*EventRecord)(Event event, Stream stream);
    Result (*EventDestroy)(Event event);
    Result (*MemcpyDtoHAsync)(void* target, Address source, std::size_t bytes, Stream stream);
    Result (*MemcpyHtoDAsync)(Address target, const void* source, std::size_t bytes, Stream stream);
    Result (*Memcpy2DAsync)(const Copy2D* copy, Stream stream);

    // Throws a resource error that says what is missing, each time that it is asked for.
    static const Driver& get();
    // The driver's words for a result, with what was asked of it.
    std::string describe(const char* what, Result result) const;
    // Throws them as a resource error unless the result is a success.
    void check(const char* what, Result result) const;
};

// Makes a context current for the thread, as long as this lives.
class Current {
  public:
    Current(const Driver& driver, Context context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

  private:
    const Driver& driver_;
};

}  // namespace multiring::cuda
