// Pool: private buffers for payloads that arrive before anybody can take them. A few of each size are kept for the
// next.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace multiring {

class Pool {
  public:
    Pool() = default;
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    std::byte* take(std::size_t bytes);
    void give_back(const std::byte* buffer, std::size_t bytes);

  private:
    static constexpr std::size_t smallest = 4096, classes = 20;  // up to 2 GB, each twice the one before
    static constexpr std::size_t kept_bytes = std::size_t{32} << 20;
    static std::size_t class_of(std::size_t bytes);

    std::mutex mutex_;
    std::unordered_set<std::byte*> all_;  // freed with the pool, whoever still has them
    std::array<std::vector<std::byte*>, classes> free_;
    std::size_t kept_ = 0;
};

}  // namespace multiring
