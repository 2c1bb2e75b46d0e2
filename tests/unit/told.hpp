// Lines of standard input that several programs of these tests take.
#pragma once

#include <sstream>
#include <string>

#include "engine_options.hpp"

namespace multiring {

// "NAME RANKS": the next so many ranks are on this host.
inline void add_host(EngineOptions& options, std::istringstream& words) {
    std::string name;
    int ranks = 0;
    words >> name >> ranks;
    options.hosts.insert(options.hosts.end(), static_cast<std::size_t>(ranks), name);
    options.world_size += ranks;
}

}  // namespace multiring
