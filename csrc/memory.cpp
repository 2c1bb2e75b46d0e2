#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "errors.hpp"

namespace multiring {
namespace {

constexpr std::uint64_t magic = 0x676e697269746c75;  // "ultiring"
constexpr std::uint32_t layout = 4;
constexpr std::size_t smallest_arena = std::size_t{16} << 20;
// Most bytes at the arena's end that arrays may not have: the lanes of two communicators stage with a megabyte each. A
// failure of `empty` can be borne, a call that cannot stage fails the job.
constexpr std::size_t most_for_staging = std::size_t{16} << 20;
constexpr std::size_t arena_per_staging = 8;
// Staging lies at multiples of its size up to this, that of a lane whose calls are large: then lanes that grow one
// after another leave no holes between them that are too small for it.
constexpr std::size_t largest_alignment = std::size_t{1} << 20;
constexpr std::size_t kept_idle = std::size_t{64} << 20;  // freed memory that stays ours for the next allocation
// MADV_POPULATE_READ and _WRITE, which older headers lack. A kernel before 5.14 knows no such advice: then faults come.
constexpr int populate_read = 22, populate_write = 23;
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::size_t physical_memory() {
    return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// Exceeding the file size limit would be a signal and not an error.
std::size_t within_file_size_limit(std::size_t bytes) {
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        return std::min<std::size_t>(bytes, limit.rlim_cur / page * page);
    return bytes;
}

}  // namespace

Arena::Arena(std::size_t bytes, bool in_process, int rank, int world_size, std::uint32_t generation) {
    const std::size_t directory_bytes = sizeof(std::uint32_t) * static_cast<std::size_t>(world_size);
    const std::size_t fixed = round_up(sizeof(Header), cache_line) + round_up(directory_bytes, cache_line);
    const std::size_t memory = physical_memory();
    std::size_t wanted = round_up(std::max(std::min(bytes == 0 ? memory : bytes, memory), fixed + page), page);
    if (wanted < bytes) remedy_ = "the machine has no more";
    if (!in_process && within_file_size_limit(wanted) < wanted) {
        wanted = std::max(within_file_size_limit(wanted), page);
        remedy_ = "a limit of file sizes (ulimit -f) cuts it: raise that";
    }
    const std::size_t asked = wanted;
    // Address space may be limited (ulimit -v): take what there is.
    const int flags = in_process ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED | MAP_NORESERVE;
    if (!in_process) {
        fd_ = memfd_create("multiring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd_ < 0) throw_resource_error(system_message("cannot create shared memory (memfd_create)", errno));
    }
    for (;; wanted = round_up(wanted / 2, page)) {
        const bool sized = in_process || ftruncate(fd_, static_cast<off_t>(wanted)) == 0;
        void* mapped = sized ? mmap(nullptr, wanted, PROT_READ | PROT_WRITE, flags, fd_, 0) : MAP_FAILED;
        if (mapped != MAP_FAILED) {
            base_ = static_cast<std::byte*>(mapped);
            if (wanted < asked) remedy_ = "a limit of the address space (ulimit -v) cuts it: raise that";
            break;
        }
        if (wanted <= smallest_arena) {
            const int error = errno;
            if (fd_ >= 0) close(fd_);
            throw_resource_error(
                system_message("cannot reserve " + std::to_string(wanted) + " bytes of shared memory", error) +
                (remedy_.empty() ? "" : ": " + remedy_));
        }
    }
    size_ = wanted;
    mapped_from_ = size_;
    size_for_arrays_ = size_ - std::min(most_for_staging, size_ / arena_per_staging);
    madvise(base_, size_, MADV_DONTDUMP);
    try {
        if (fd_ >= 0 && fcntl(fd_, F_ADD_SEALS, seals) != 0)
            throw_resource_error(system_message("cannot seal the shared memory", errno));
        commit(0, round_up(fixed, page));
    } catch (...) {
        munmap(base_, size_);
        if (fd_ >= 0) close(fd_);
        throw;
    }
    const std::size_t used = round_up(fixed, page);
    free_[used] = {size_ - used, false};

    Header& mine = header();
    mine.layout = layout;
    mine.generation = generation;
    mine.rank = static_cast<std::uint32_t>(rank);
    mine.world_size = static_cast<std::uint32_t>(world_size);
    mine.arena_bytes = size_;
    mine.mailboxes = round_up(sizeof(Header), cache_line);
    CPU_ZERO(&mine.cores);
    sched_getaffinity(0, sizeof mine.cores, &mine.cores);
    __atomic_store_n(&mine.magic, magic, __ATOMIC_RELEASE);
}

Arena::~Arena() {
    munmap(base_, size_);
    if (fd_ >= 0) close(fd_);
}

void Arena::make_heard() {
    if (!heard_.empty()) return;
    const std::size_t count = header().world_size;
    auto* slots = static_cast<StatusSlot*>(allocate(count * sizeof(StatusSlot)));
    std::uninitialized_value_construct_n(slots, count);
    heard_ = {slots, count};
    __atomic_store_n(&header().heard, offset(slots), __ATOMIC_RELEASE);
}

// Whoever reads a byte that is written after this, and then looks, sees it.
void Arena::give_up() noexcept {
    __atomic_store_n(&header().given_up, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void Arena::commit(std::size_t offset, std::size_t bytes) {
    if (fd_ >= 0) {
        int result;
        do result = fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
        while (result != 0 && errno == EINTR);
        if (result != 0)
            throw_resource_error(system_message("out of shared memory: " + std::to_string(bytes) + " bytes wanted, " +
                                                    std::to_string(committed_) + " in use",
                                                errno));
    }
    committed_ += bytes;
}

bool Arena::decommit(FreeList::iterator range) {
    const auto [offset, bytes] = std::pair(range->first, range->second.bytes);
    if (fd_ >= 0) {
        if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                      static_cast<off_t>(bytes)) != 0)
            return false;  // stays committed, to be used again
    } else {
        madvise(base_ + offset, bytes, MADV_DONTNEED);
    }
    committed_ -= bytes;
    idle_ -= bytes;
    if (offset + bytes > mapped_from_) {
        mapped_from_ = offset + bytes;
        __atomic_store_n(&header().mapped_from, 0, __ATOMIC_RELEASE);
    }
    free_.erase(range);
    insert_free(offset, {bytes, false});
    return true;
}

void Arena::decommit_all() {
    for (;;) {
        const auto found = std::find_if(free_.begin(), free_.end(), [](const auto& e) { return e.second.committed; });
        if (found == free_.end() || !decommit(found)) return;
    }
}

Arena::FreeList::iterator Arena::insert_free(std::size_t offset, Free range) {
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->second.committed == range.committed && offset + range.bytes == next->first) {
        range.bytes += next->second.bytes;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        auto previous = std::prev(next);
        if (previous->second.committed == range.committed && previous->first + previous->second.bytes == offset) {
            previous->second.bytes += range.bytes;
            return previous;
        }
    }
    return free_.emplace_hint(next, offset, range);
}

void* Arena::allocate(std::size_t bytes, Purpose purpose) {
    // Page-sized grains keep what is committed countable; a small allocation wastes less than a page.
    const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1), page);
    std::unique_lock lock(mutex_);
    const std::size_t end = purpose == Purpose::array ? size_for_arrays_ : purpose == Purpose::copy ? size_ / 2 : size_;
    const auto room = [&](const auto& entry) {
        return entry.first < end ? std::min(entry.second.bytes, end - entry.first) : 0;
    };
    const auto fits = [&](bool committed) {
        return std::find_if(free_.begin(), free_.end(), [&](const auto& entry) {
            return entry.second.committed == committed && room(entry) >= wanted;
        });
    };
    const std::size_t alignment = std::min(std::bit_ceil(wanted), largest_alignment);
    auto range =
        purpose != Purpose::mapped ? free_.end() : std::find_if(free_.begin(), free_.end(), [&](const auto& e) {
            const std::size_t skipped = round_up(e.first, alignment) - e.first;
            return e.second.committed && e.first >= mapped_from_ && e.second.bytes >= skipped + wanted;
        });
    const bool is_mapped = range != free_.end();
    if (range == free_.end()) range = fits(true);
    if (range == free_.end()) range = fits(false);
    if (range == free_.end()) {  // perhaps across committed and other free memory
        decommit_all();
        range = fits(false);
    }
    if (range == free_.end()) {
        std::size_t left = 0, largest = 0;
        for (const auto& hole : free_) {
            left += room(hole);
            largest = std::max(largest, room(hole));
        }
        throw_resource_error(
            "out of shared memory: " + std::to_string(bytes) + " bytes wanted, the arena has " + std::to_string(size_) +
            " bytes of which " + std::to_string(committed_ - idle_) + " are in use" +
            (end == size_ ? "" : " and " + std::to_string(size_ - end) + " kept for staging") +
            (left < wanted ? "" : ", and no hole larger than " + std::to_string(largest)) + ": " + remedy_);
    }
    const auto [first, found] = *range;
    const std::size_t offset = is_mapped ? round_up(first, alignment) : first, skipped = offset - first;
    if (found.committed) {
        idle_ -= wanted;
    } else {
        try {
            commit(offset, wanted);
        } catch (const EngineError&) {  // perhaps with the memory of what nobody has
            const std::size_t idle = idle_;
            decommit_all();
            if (idle_ == idle) throw;
            lock.unlock();
            return allocate(bytes, purpose);
        }
    }
    free_.erase(range);
    if (skipped > 0) insert_free(first, {skipped, found.committed});
    if (found.bytes > skipped + wanted) insert_free(offset + wanted, {found.bytes - skipped - wanted, found.committed});
    taken_[offset] = wanted;
    lock.unlock();
    if (purpose == Purpose::mapped && !is_mapped) populate(offset, wanted);
    return base_ + offset;
}

void Arena::map_ahead(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    bytes = std::min(round_up(bytes, page), size_ - size_for_arrays_) / page * page;
    if (bytes == 0 || free_.empty()) return;
    const auto last = std::prev(free_.end());
    const auto [first, found] = *last;
    if (found.committed || found.bytes < bytes || first + found.bytes != size_) return;
    const std::size_t offset = size_ - bytes;
    try {
        commit(offset, bytes);
    } catch (const EngineError&) {  // the call that needs memory says so
        return;
    }
    populate(offset, bytes);
    free_.erase(last);
    if (found.bytes > bytes) insert_free(first, {found.bytes - bytes, false});
    insert_free(offset, {bytes, true});
    idle_ += bytes;
    mapped_from_ = offset;
    __atomic_store_n(&header().mapped_from, offset, __ATOMIC_RELEASE);
}

void Arena::release(void* pointer) {
    if (retired_) return;
    const std::lock_guard lock(mutex_);
    const auto taken = taken_.find(offset(pointer));
    const std::size_t bytes = taken->second;
    idle_ += bytes;
    auto range = insert_free(taken->first, {bytes, true});
    taken_.erase(taken);
    if (idle_ > kept_idle) decommit(range);
}

void Arena::populate(std::size_t offset, std::size_t bytes) noexcept {
    madvise(base_ + offset, bytes, populate_write);
}

std::size_t Arena::allocated_bytes() const {
    const std::lock_guard lock(mutex_);
    return committed_ - idle_;
}

std::size_t Arena::committed_bytes() const {
    const std::lock_guard lock(mutex_);
    return committed_;
}

bool Arena::make_private() noexcept {
    if (fd_ < 0) return true;  // anonymous memory is private already
    void* copy = mmap(base_, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd_, 0);
    if (copy == MAP_FAILED) return false;
    close(std::exchange(fd_, -1));
    return true;
}

void Arena::retire() noexcept {
    const std::lock_guard lock(mutex_);
    retired_ = fd_ >= 0 && make_private();
}

void Arena::make_private_after_fork() noexcept {
    retired_ = true;
    if (!make_private()) munmap(base_, size_);  // rather a fault in the child than a write into the rank's memory
}

PeerArena::PeerArena(int fd, int peer, int world_size, std::uint32_t generation) {
    struct stat status{};
    const int sealed = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &status) != 0 || sealed < 0 || (sealed & seals) != seals ||
        status.st_size < static_cast<off_t>(sizeof(Header)))
        throw std::invalid_argument("the descriptor given for rank " + std::to_string(peer) +
                                    " is not a sealed arena of multiring");
    size_ = static_cast<std::size_t>(status.st_size);
    void* mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapped == MAP_FAILED)
        throw_resource_error(system_message("cannot map the " + std::to_string(size_) +
                                                " bytes of shared memory of rank " + std::to_string(peer) +
                                                " (lower MULTIRING_ARENA_BYTES, or raise ulimit -v)",
                                            errno));
    madvise(mapped, size_, MADV_DONTDUMP);
    base_ = static_cast<const std::byte*>(mapped);
    const Header& theirs = header();
    if (__atomic_load_n(&theirs.magic, __ATOMIC_ACQUIRE) != magic || theirs.layout != layout ||
        theirs.rank != static_cast<std::uint32_t>(peer) ||
        theirs.world_size != static_cast<std::uint32_t>(world_size) || theirs.generation != generation ||
        at(theirs.mailboxes, sizeof(std::uint32_t) * static_cast<std::size_t>(world_size)) == nullptr) {
        const std::string found = "rank " + std::to_string(theirs.rank) + " of " + std::to_string(theirs.world_size) +
                                  ", generation " + std::to_string(theirs.generation) + ", layout " +
                                  std::to_string(theirs.layout);
        munmap(mapped, size_);
        throw std::invalid_argument("the arena given for rank " + std::to_string(peer) + " of " +
                                    std::to_string(world_size) + ", generation " + std::to_string(generation) +
                                    ", layout " + std::to_string(layout) + " says that it is " + found);
    }
}

PeerArena::PeerArena(std::shared_ptr<Arena> arena)
    : in_process_(std::move(arena)), base_(in_process_->base()), size_(in_process_->size()) {}

PeerArena::~PeerArena() {
    if (!in_process_ && base_ != nullptr) munmap(const_cast<std::byte*>(base_), size_);
}

void PeerArena::map_ahead(std::size_t most) const noexcept {
    const std::uint64_t from = __atomic_load_n(&header().mapped_from, __ATOMIC_ACQUIRE);
    if (in_process_ || from == 0 || from >= size_) return;
    madvise(const_cast<std::byte*>(base_) + from, std::min<std::size_t>(most, size_ - from), populate_read);
}

void PeerArena::unmap() noexcept {
    if (in_process_ || base_ == nullptr) return;
    munmap(const_cast<std::byte*>(base_), size_);
    base_ = nullptr;
    size_ = 0;
}

}  // namespace multiring
