// Arena: the memory of one rank that its host's other ranks may read.
//
// It is a sealed memfd (in-process engines: anonymous memory), reserved large and given real pages range by range as
// they are allocated, so that a full memory is an error at that moment and never a SIGBUS later. Peers map it
// read-only. It starts with a Header that says who it is and where its mailboxes are.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "status.hpp"

namespace multiring {

inline constexpr std::size_t cache_line = 64;
inline constexpr std::size_t page = 4096;

inline std::size_t round_up(std::size_t n, std::size_t unit) {
    return (n + unit - 1) / unit * unit;
}

struct Header {
    std::uint64_t magic;
    std::uint32_t layout;  // version of everything below
    std::uint32_t generation;
    std::uint32_t rank;
    std::uint32_t world_size;
    std::uint64_t arena_bytes;
    std::uint64_t mailboxes;  // offset of the directory: per world rank, the offset of its mailbox / 64, 0 if none
    // 1: a call has failed here, and what peers read may be overwritten. On the line that nobody writes while all is
    // well, so that looking costs a reader nothing.
    std::uint32_t given_up;
    alignas(cache_line) std::uint32_t sleeping;  // 1: write my doorbell when you post
    alignas(cache_line) cpu_set_t cores;         // that this rank may run on
    alignas(cache_line) StatusSlot status;       // that it lives, and what it waits for
    std::uint64_t heard;  // offset of a status for each world rank, told by other hosts; 0 if this rank hears none
    std::uint64_t mapped_from;  // offset of pages that are there before any call, up to the end; 0 if there are none
};

class Arena {
  public:
    // `bytes` is an upper bound of what can be allocated, 0 for the machine's memory; less where limits forbid it.
    Arena(std::size_t bytes, bool in_process, int rank, int world_size, std::uint32_t generation);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    int fd() const { return fd_; }  // -1 in process
    std::byte* base() const { return base_; }
    std::size_t size() const { return size_; }
    Header& header() const { return *reinterpret_cast<Header*>(base_); }
    std::uint32_t* mailbox_directory() const { return reinterpret_cast<std::uint32_t*>(base_ + header().mailboxes); }

    // Callers have their buffers back before peers have read them. Who read them finds that out afterwards.
    void give_up() noexcept;
    // Slots in which to publish what other hosts tell of their ranks; made when first needed.
    std::span<StatusSlot> heard() { return heard_; }
    void make_heard();

    // True if [pointer, pointer + bytes) lies in the arena: then peers can read it where it is.
    bool contains(const void* pointer, std::size_t bytes) const {
        const auto* p = static_cast<const std::byte*>(pointer);
        return p >= base_ && p < base_ + size_ && bytes <= static_cast<std::size_t>(base_ + size_ - p);
    }
    std::uint64_t offset(const void* pointer) const {
        return static_cast<std::uint64_t>(static_cast<const std::byte*>(pointer) - base_);
    }

    // A zeroed or used range, aligned to a cache line; small ones share pages. Throws a resource error. The user's
    // arrays may not have the arena's end, which is kept for staging, and what front ends copy there for a call not its
    // second half. What is mapped is the engine's, and all its pages are: its first writer takes no fault.
    enum class Purpose { engine, array, copy, mapped };
    void* allocate(std::size_t bytes, Purpose purpose = Purpose::engine);
    void release(void* pointer);
    // Commit and map bytes at the arena's end that nobody has: whoever asks first gets them. Nothing is done where
    // there is no memory for them.
    void map_ahead(std::size_t bytes);
    std::size_t allocated_bytes() const;
    std::size_t committed_bytes() const;

    // Keep the contents, share nothing: at shutdown, and in a forked child.
    void retire() noexcept;
    void make_private_after_fork() noexcept;

  private:
    struct Free {
        std::size_t bytes;
        bool committed;
    };
    using FreeList = std::map<std::size_t, Free>;

    bool make_private() noexcept;
    void commit(std::size_t offset, std::size_t bytes);
    bool decommit(FreeList::iterator range);
    void decommit_all();
    FreeList::iterator insert_free(std::size_t offset, Free range);
    void populate(std::size_t offset, std::size_t bytes) noexcept;

    int fd_ = -1;
    bool retired_ = false;  // nothing is given back any more; a forked child's locks may be held by nobody
    std::byte* base_ = nullptr;
    std::size_t size_ = 0, size_for_arrays_ = 0;
    mutable std::mutex mutex_;
    FreeList free_;                             // indexed by offset; neighbours of the same state are merged
    std::map<std::size_t, std::size_t> taken_;  // offset -> bytes
    std::size_t committed_ = 0;
    std::string remedy_ = "raise MULTIRING_ARENA_BYTES";  // where it is too small
    std::size_t idle_ = 0;                                // bytes of free_ that are committed
    std::span<StatusSlot> heard_;
    std::size_t mapped_from_ = 0;  // what is committed behind this offset is mapped
};

// A peer's arena, mapped read-only; in process simply the other arena.
class PeerArena {
  public:
    PeerArena(int fd, int peer, int world_size, std::uint32_t generation);
    explicit PeerArena(std::shared_ptr<Arena> arena);
    ~PeerArena();
    PeerArena(const PeerArena&) = delete;
    PeerArena& operator=(const PeerArena&) = delete;

    const Header& header() const { return *reinterpret_cast<const Header*>(base_); }
    // The peer's news of each rank, by world rank; nullptr if it publishes nothing.
    const StatusSlot* heard() const {
        const std::uint64_t offset = __atomic_load_n(&header().heard, __ATOMIC_ACQUIRE);
        return offset == 0 ? nullptr
                           : reinterpret_cast<const StatusSlot*>(at(offset, header().world_size * sizeof(StatusSlot)));
    }
    // Memory that the peer announced; nullptr if it lies outside the arena.
    const std::byte* at(std::uint64_t offset, std::size_t bytes) const {
        return offset <= size_ && bytes <= size_ - offset ? base_ + offset : nullptr;
    }
    // True if data read earlier may be invalid.
    bool is_given_up() const noexcept {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(&header().given_up, __ATOMIC_RELAXED) != 0;
    }
    // Map what the peer has mapped ahead of calls, `most` bytes of it: reading takes no fault then.
    void map_ahead(std::size_t most) const noexcept;
    void unmap() noexcept;

  private:
    std::shared_ptr<Arena> in_process_;
    const std::byte* base_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace multiring
