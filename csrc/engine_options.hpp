// Options that an engine is made with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace multiring {

struct EngineOptions {
    int rank = 0;
    int world_size = 1;
    std::uint16_t generation = 0;
    std::vector<std::string> hosts;  // indexed by rank; empty if unknown
    std::size_t arena_bytes = 0;
    std::optional<double> spin_seconds;
    bool in_process = false;
    double heartbeat_timeout = 30;                // seconds of silence after which a rank is lost
    double late_seconds = 30;                     // seconds that a call waits before a line says for whom
    bool trace = false;                           // keep what happened when
    bool record = false;                          // keep the last calls
    std::optional<std::size_t> helpers{};         // threads that sum for calls on devices
    std::optional<std::size_t> socket_threads{};  // threads that read and write connections

    const std::string& host(int of) const {  // empty if unknown
        static const std::string no_host;
        return hosts.empty() || of < 0 || of >= world_size ? no_host : hosts[static_cast<std::size_t>(of)];
    }
    std::string rank_name(int of) const {  // "rank 3 (host b)"
        const std::string& name = host(of);
        return "rank " + std::to_string(of) + (name.empty() ? "" : " (host " + name + ")");
    }
};

}  // namespace multiring
