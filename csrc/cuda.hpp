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
using ResultCode = int;

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
    ResultCode (*Init)(unsigned flags);
    ResultCode (*DriverGetVersion)(int* version);
    ResultCode (*GetErrorString)(ResultCode result, const char** text);
    ResultCode (*DeviceGet)(int* device, int ordinal);
    ResultCode (*DevicePrimaryCtxRetain)(Context* context, int device);
    ResultCode (*DevicePrimaryCtxRelease)(int device);
    ResultCode (*CtxPushCurrent)(Context context);
    ResultCode (*CtxPopCurrent)(Context* context);
    ResultCode (*CtxGetStreamPriorityRange)(int* least, int* greatest);
    ResultCode (*MemHostRegister)(void* memory, std::size_t bytes, unsigned flags);
    ResultCode (*MemHostUnregister)(void* memory);
    ResultCode (*MemHostGetDevicePointer)(Address* address, void* memory, unsigned flags);
    ResultCode (*StreamCreateWithPriority)(Stream* stream, unsigned flags, int priority);
    ResultCode (*StreamWaitEvent)(Stream stream, Event event, unsigned flags);
    ResultCode (*StreamBatchMemOp)(Stream stream, unsigned count, MemoryOperation* operations, unsigned flags);
    ResultCode (*EventCreate)(Event* event, unsigned flags);
    ResultCode (*EventRecord)(Event event, Stream stream);
    ResultCode (*EventDestroy)(Event event);
    ResultCode (*MemcpyDtoHAsync)(void* target, Address source, std::size_t bytes, Stream stream);
    ResultCode (*MemcpyHtoDAsync)(Address target, const void* source, std::size_t bytes, Stream stream);
    ResultCode (*Memcpy2DAsync)(const Copy2D* copy, Stream stream);

    // Throws a resource error that says what is missing, each time that it is asked for.
    static const Driver& get();
    // The driver's words for a result, with what was asked of it.
    std::string describe(const char* what, ResultCode result) const;
    // Throws them as a resource error unless the result is a success.
    void check(const char* what, ResultCode result) const;
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
