// Table of the engine's functions that libmultiring.so calls. Any program can link that library, but the engine lives
// in a Python module: Python fills the table when it has joined the job.
#pragma once

#include <multiring.h>

#include <cstddef>
#include <string>

namespace multiring {

struct CFunctions {
    static constexpr std::size_t error_bytes = 4096;

    int rank = -1, world_size = -1;
    // Returns the code and, if it is not 0, writes the text.
    int (*collective)(int collective, void* data, std::size_t count, int dtype, int op, int root,
                      multiring_callback done, void* context, char* error) = nullptr;
    int code = MULTIRING_FAILED;  // result of joining or leaving
    char error[error_bytes] = "";
};

void fill_c_functions(CFunctions& functions, int rank, int world_size);  // the world has been published
void clear_c_functions(CFunctions& functions);                           // it was shut down
void tell_c_error(CFunctions& functions, const std::string& class_name, const std::string& message);

}  // namespace multiring
