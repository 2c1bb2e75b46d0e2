#include "system_files.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "descriptor.hpp"

namespace multiring {

std::string read_system_file(const std::string& path) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::string text;
    char buffer[4096];
    while (file.is_open()) {
        const ssize_t n = read(file.get(), buffer, sizeof buffer);
        if (n <= 0) break;
        text.append(buffer, static_cast<std::size_t>(n));
    }
    return text;
}

namespace {

// The tightest limit from this process's group up to the root of a hierarchy.
template <class Read>
std::optional<double> tightest(const std::string& mount, std::string group, Read read) {
    std::optional<double> tightest;
    for (;;) {
        const std::optional<double> limit = read(mount + group);
        if (limit && (!tightest || *limit < *tightest)) tightest = limit;
        const auto slash = group.rfind('/');
        if (slash == std::string::npos || group.empty()) return tightest;
        group.resize(slash);
    }
}

std::optional<double> read_v2(const std::string& directory) {
    const std::string text = read_system_file(directory + "/cpu.max");  // "quota period" or "max period"
    char* rest = nullptr;
    const double quota = std::strtod(text.c_str(), &rest), period = std::strtod(rest, nullptr);
    if (rest == text.c_str() || period <= 0) return {};
    return quota / period;
}

std::optional<double> read_v1(const std::string& directory) {
    const double quota = std::strtod(read_system_file(directory + "/cpu.cfs_quota_us").c_str(), nullptr);
    const double period = std::strtod(read_system_file(directory + "/cpu.cfs_period_us").c_str(), nullptr);
    if (quota <= 0 || period <= 0) return {};
    return quota / period;
}

// Call `visit` with each part of a text between separators.
template <class Visit>
void split(std::string_view text, char separator, Visit visit) {
    while (!text.empty()) {
        const auto end = std::min(text.find(separator), text.size());
        visit(text.substr(0, end));
        text.remove_prefix(std::min(end + 1, text.size()));
    }
}

}  // namespace

std::optional<double> cpu_quota() {
    std::optional<double> found;
    split(read_system_file("/proc/self/cgroup"), '\n', [&](std::string_view line) {  // "hierarchy:controllers:/group"
        const auto first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string_view::npos || second == std::string_view::npos) return;
        const std::string_view controllers = line.substr(first + 1, second - first - 1);
        const std::string group(line.substr(second + 1));
        std::optional<double> limit;
        if (controllers.empty()) limit = tightest("/sys/fs/cgroup", group, read_v2);
        split(controllers, ',', [&](std::string_view name) {
            if (name == "cpu") limit = tightest("/sys/fs/cgroup/cpu", group, read_v1);
        });
        if (limit && (!found || *limit < *found)) found = limit;
    });
    return found;
}

}  // namespace multiring
