// Endpoint: what all lanes of one rank share: the transports to other ranks, the arena, counters, and the way to the
// engine around it. Communicators and schedules come on top of it (executor.hpp).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "call.hpp"
#include "call_recorder.hpp"
#include "errors.hpp"
#include "memory.hpp"
#include "rhythm.hpp"
#include "team.hpp"
#include "trace.hpp"
#include "transport.hpp"

namespace multiring {

class Lane;

inline constexpr std::uint64_t lanes_of_communicator = 8;  // those that run collectives

// Services that an endpoint needs of the engine around it.
class Surroundings {
  public:
    virtual void fail(Failure failure) = 0;
    // The same, of the rank's loss, unless a better reason comes within a moment.
    virtual void suspect(int rank, const std::string& reason) = 0;
    virtual void wake_progress() = 0;
    virtual std::string rank_name(int rank) const = 0;  // "rank 3 (host b)"
    virtual const std::string& host(int rank) const = 0;

  protected:
    ~Surroundings() = default;
};

// Bytes of staging that all lanes together may have beyond what their calls need.
class SpareStaging {
  public:
    void set_most(std::size_t bytes) { most_.store(bytes, std::memory_order_relaxed); }
    std::size_t of_a_lane() const { return most_.load(std::memory_order_relaxed) / lanes_of_communicator; }
    bool take(std::size_t bytes) {
        if (taken_.fetch_add(bytes) + bytes <= most_.load(std::memory_order_relaxed)) return true;
        give_back(bytes);
        return false;
    }
    void give_back(std::size_t bytes) { taken_.fetch_sub(bytes); }

  private:
    std::atomic<std::size_t> most_{0}, taken_{0};
};

class Endpoint : public Receiver {
  public:
    Endpoint(int rank, int world_size, std::uint16_t generation, std::shared_ptr<Arena> arena,
             Surroundings& surroundings, std::unique_ptr<Trace> trace, std::unique_ptr<CallRecorder> recorder);

    void attach(std::unique_ptr<Transport> transport);
    Transport* transport(int peer) const {
        return transports_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire);
    }
    std::span<const std::unique_ptr<Transport>> attached() const {
        return {attached_.get(), attached_count_.load(std::memory_order_acquire)};
    }
    // Find the transports that a schedule uses; throws if one of them is not attached.
    void resolve(Installed& installed) const;
    std::unique_ptr<Installed> make_point_schedule(CommunicatorBase& communicator, Collective collective,
                                                   std::uint32_t other) const;

    std::uint32_t register_lane(Lane& lane);
    void unregister_lane(std::uint32_t id);

    // The frame is of another call than ours of that number (nullptr: not known any more), which is in flight for so
    // many seconds (0: it has completed).
    void mismatch(const Delivery& delivery, const Signature* ours, double waited);
    void garbage(int peer, const std::string& what) final;
    // After this returns no caller's memory is read any more.
    void abandon();
    void disown() noexcept;  // in a forked child

    const int rank;
    const std::uint16_t generation;
    const std::shared_ptr<Arena> arena;
    Surroundings& surroundings;
    const std::unique_ptr<Trace> trace;            // nullptr: nobody asked for it
    const std::unique_ptr<CallRecorder> recorder;  // the same
    SpareStaging spare_staging;
    std::atomic<Team*> team{nullptr};                       // helps calls whose buffers lie on devices
    std::atomic<std::uint64_t> calls{0};                    // calls of any communicator
    Rhythm rhythm;                                          // gaps between them
    std::atomic<std::uint64_t> operations{0}, segments{0};  // the user's only
    std::array<Record, collective_names.size()> done;       // those completed, indexed by collective

  protected:
    ~Endpoint() = default;

    Lane* lane(std::uint32_t id) const { return lanes_[id].load(std::memory_order_acquire); }  // nullptr: there is none
    void lock_transports_for_fork() { transports_mutex_.lock(); }
    void unlock_transports_after_fork() { transports_mutex_.unlock(); }

  private:
    std::mutex lanes_mutex_;
    std::unique_ptr<std::atomic<Lane*>[]> lanes_;  // indexed by id
    std::vector<std::uint32_t> free_lane_ids_;
    std::mutex transports_mutex_;                             // taken to change the tables below
    std::unique_ptr<std::atomic<Transport*>[]> transports_;   // indexed by world rank
    std::unique_ptr<std::unique_ptr<Transport>[]> attached_;  // in the order of attaching
    std::atomic<std::size_t> attached_count_{0};
};

}  // namespace multiring
