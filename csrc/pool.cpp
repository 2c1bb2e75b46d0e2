#include "pool.hpp"

#include <bit>
#include <new>

namespace multiring {
namespace {

constexpr std::align_val_t alignment{64};

}  // namespace

std::size_t Pool::class_of(std::size_t bytes) {
    return bytes <= smallest ? 0 : static_cast<std::size_t>(std::bit_width((bytes - 1) / smallest));
}

Pool::~Pool() {
    for (std::byte* buffer : all_) ::operator delete(buffer, alignment);
}

std::byte* Pool::take(std::size_t bytes) {
    const std::size_t size_class = class_of(bytes);
    const std::lock_guard lock(mutex_);
    auto& free = free_[size_class];
    if (!free.empty()) {
        std::byte* buffer = free.back();
        free.pop_back();
        kept_ -= smallest << size_class;
        return buffer;
    }
    auto* buffer = static_cast<std::byte*>(::operator new(smallest << size_class, alignment));
    all_.insert(buffer);
    return buffer;
}

void Pool::give_back(const std::byte* buffer, std::size_t bytes) {
    const std::size_t size_class = class_of(bytes), size = smallest << size_class;
    auto* owned = const_cast<std::byte*>(buffer);
    const std::lock_guard lock(mutex_);
    if (kept_ + size <= kept_bytes) {
        free_[size_class].push_back(owned);
        kept_ += size;
        return;
    }
    all_.erase(owned);
    ::operator delete(owned, alignment);
}

}  // namespace multiring
