// Files in which the kernel reports its state. Streams of the C++ library would do, but not where a compiler links that
// library into the module: its locales then mix with those of the process's own, and the first number that is read
// crashes.
#pragma once

#include <optional>
#include <string>

namespace multiring {

std::string read_system_file(const std::string& path);  // empty if it cannot be read

// Cores that the cgroup's quota allows, if it sets one.
std::optional<double> cpu_quota();

}  // namespace multiring
