// Machine: runs schedules as data arrive, many segments in flight.
//
//   communicator   members, and the collectives that they have called so far, numbered
//   lane           collective number q of a communicator runs in lane q mod K, when number q - K has completed here
//   row            a segment in flight; a lane has W rows, segment s uses row s mod W
//   staging        a row's outgoing spans, copied where peers can read them (not needed for arena buffers and TCP)
//
// A lane is driven by one thread at a time (`advance`); what arrives is delivered to it by whichever thread drains the
// link. A message may come before its collective was called here: it is parked with the communicator.
//
// All ranks derive the same W from the signature, so a peer is never more than 2 W segments ahead of the row that waits
// for it (it starts segment s when its messages of segment s - W have been read), except for messages that only some
// segments have; these few are kept as `early`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "errors.hpp"
#include "link.hpp"
#include "memory.hpp"
#include "reduce.hpp"
#include "schedule.hpp"
#include "wait.hpp"

namespace multiring {

class Lane;
class Machine;

// What the machine needs of the engine around it.
class Surroundings {
  public:
    virtual void fail(Failure failure) = 0;
    virtual void wake_progress() = 0;
    virtual std::string rank_name(int rank) const = 0;  // "rank 3 (host b)"
    virtual const std::string& host(int rank) const = 0;

  protected:
    ~Surroundings() = default;
};

struct Delivery {
    Link* from;
    Frame frame;
    Payload payload;
};

class Communicator {
  public:
    static constexpr std::uint64_t lane_count = 8;

    Communicator(std::uint32_t id, std::vector<int> members, int self, Machine& machine);

    int member_of(int world_rank) const;  // -1 if it is none
    Lane& lane(std::uint64_t number) { return *lanes_[number % lane_count]; }
    const std::vector<std::unique_ptr<Lane>>& lanes() const { return lanes_; }

    const std::uint32_t id;
    const std::vector<int> members;  // world ranks
    const int self;                  // our index among them

    std::mutex mutex;
    std::uint64_t next_number = 0;  // of the next collective called here
    std::uint64_t completed = 0;    // collectives
    std::vector<Delivery> parked;   // came before their collective was called

  private:
    std::unordered_map<int, int> member_of_;
    std::vector<std::unique_ptr<Lane>> lanes_;
};

// A schedule with the links that it uses.
struct Installed {
    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<const Schedule> schedule;
    std::vector<Link*> links;                  // by Schedule::peers; empty until all are attached
    std::vector<Link*> message_links;          // by Schedule::messages
    std::vector<bool> send_is_shared;          // by send: some peer reads it from the arena
    std::vector<bool> send_is_direct;          // by send: some peer is sent it from where it lies
    std::vector<Link*> shared_links;           // those that share memory
    std::vector<Link*> direct_sources;         // those that do not, and that we receive from
    std::vector<std::uint32_t> message_peers;  // by Schedule::messages: index into `links`
    bool any_shared = false, any_direct = false;
};

struct Call {
    Installed* installed;
    Collective collective;
    std::byte* pointer;
    std::size_t count;
    Dtype dtype;
    Op op;
    std::uint32_t root;
    double timeout;
    std::uint64_t number = 0;
    Clock::time_point deadline{};
};
std::string describe(const Call& call);  // "all_reduce number 7 of communicator 0"

class Lane {
  public:
    Lane(Machine& machine, std::uint64_t first_number);
    ~Lane();

    // Whether the collective of this number can start here now (communicator's mutex held).
    bool is_free_for(std::uint64_t number) const { return !active_ && next_number_ == number; }
    void begin(const Call& call);  // communicator's mutex held
    void end();
    Event& ended() { return ended_; }

    // Run what can be run; true if anything was.
    bool advance();
    bool finished() const { return base_ == segment_count_; }
    const Call& call() const { return call_; }  // the current or last one
    const Installed& installed() const { return *call_.installed; }
    bool flush();

    // The ranks that hold it up, ascending.
    std::vector<int> waited_for() const;

    bool expects(std::uint64_t number) const { return active_ && call_.number == number; }
    bool is_past(std::uint64_t number) const { return number < next_number_ && !expects(number); }
    void accept(const Delivery& delivery);                     // communicator's mutex held
    const Signature& signature() const { return signature_; }  // of the current or last collective
    bool released(std::uint32_t index);                        // false if nothing of that index is outstanding
    bool outstanding() const { return outstanding_.load(std::memory_order_acquire) != 0; }
    std::atomic<bool> driven_by_progress{false};

  private:
    struct Row {
        std::uint32_t segment;
        std::uint32_t next;  // instruction
        bool done;
    };
    struct Arrival {
        std::atomic<const std::byte*> data{nullptr};
        Link* from = nullptr;
        std::uint32_t token = 0;
    };
    struct Held {  // a message that waits for a grant
        Frame frame;
        const std::byte* payload;
        Link* to;
        std::uint32_t peer;
    };
    using Extent = Layout::Extent;

    bool prepare();
    bool step(std::uint32_t segment);
    bool row_is_clear(std::uint32_t segment) const;
    void retire_rows();
    bool ready(const Row& row, const Instruction& in) const;
    bool has_left(const Row& row) const;
    const std::atomic<const std::byte*>& arrived(std::uint32_t segment, const Message& message) const {
        return arrival(segment, message.index).data;
    }
    std::span<const Message> messages(const Instruction& in) const {
        return {schedule_->messages.data() + in.first_message, in.message_count};
    }
    void send(const Row& row, const Instruction& in, const Extent& extent);
    void receive(const Row& row, const Instruction& in, const Extent& extent);
    void take_early();
    void accept_data(const Delivery& delivery);
    bool post(Held& message);  // false if it has to wait
    bool post_held();
    void announce_window();
    Frame frame_of(FrameType type) const;

    const Layout& layout(std::uint32_t segment) const {
        return segment + 1 == segment_count_ ? *last_layout_ : *full_layout_;
    }
    std::byte* address(const Row& row, const Instruction& in, const Extent& extent) const {
        return call_.pointer + (in.block * call_.count + row.segment * slice_ + extent.first) * itemsize_;
    }
    Arrival& arrival(std::uint32_t segment, std::uint32_t index) const {
        return arrivals_[(segment % (2 * rows_in_use_)) * schedule_->arrival_count + index];
    }
    std::atomic<bool>& unread(std::uint32_t segment, const Message& message) const {
        return unread_[(segment % rows_in_use_) * schedule_->departure_count + message.index];
    }
    // Whether the send's bytes are copied for its readers, so that the caller's are free at once. Two ranks that
    // exchange the same bytes would otherwise both wait for the other to have read before they overwrite. (What a later
    // phase overwrites has been read by then: the new bytes are made of the old ones.)
    bool is_staged(const Instruction& in) const {
        return call_.installed->send_is_shared[in.send_index] && (!in_arena_ || in.exchanged);
    }
    // Whether the send's bytes are read where the caller keeps them, and still are.
    bool is_leaving(const Row& row, const Instruction& in) const;

    Machine& machine_;
    std::uint32_t id_;  // in Machine's table, for tokens
    Event ended_;

    // the current collective
    bool active_ = false;
    std::uint64_t next_number_;
    Call call_{};
    Signature signature_{};
    std::shared_ptr<const Schedule> schedule_;
    std::shared_ptr<const Layout> full_layout_, last_layout_;
    Reduction reduction_ = nullptr;
    std::size_t itemsize_ = 1, slice_ = 0;
    std::uint32_t segment_count_ = 0, rows_in_use_ = 1;
    bool in_arena_ = false, streaming_ = false, prepared_ = false, gave_back_ = false;
    std::uint32_t base_ = 0, next_ = 0;  // segments in flight: [base_, next_)
    std::atomic<std::uint32_t> limit_{0};
    std::atomic<bool> has_early_{false};
    std::vector<Delivery> early_;
    std::vector<const void*> sources_;

    // flow control, where peers do not share memory
    bool bulk_ = false;            // segments wait for grants; otherwise messages use the eager credit
    std::uint32_t announced_ = 0;  // segments that we have granted to those that send to us
    std::unique_ptr<std::atomic<std::uint32_t>[]> granted_;  // by link: segments that it takes
    std::size_t granted_capacity_ = 0;
    std::vector<bool> asked_;  // by link
    std::vector<Held> held_;

    // kept from collective to collective
    std::vector<Row> rows_;
    std::unique_ptr<Arrival[]> arrivals_;
    std::size_t arrival_capacity_ = 0;
    std::unique_ptr<std::atomic<bool>[]> unread_;  // by (row, departure): the peer has not read it yet
    std::size_t unread_capacity_ = 0;
    std::atomic<std::uint32_t> outstanding_{0};  // how many are unread
    std::byte* staging_ = nullptr;
    std::size_t staging_bytes_ = 0;
};

class Machine final : public Receiver {
  public:
    Machine(int rank, int world_size, std::uint16_t generation, std::shared_ptr<Arena> arena,
            Surroundings& surroundings);
    ~Machine();

    void attach(std::unique_ptr<Link> link);
    Link* link(int peer) const { return links_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire); }
    std::span<const std::unique_ptr<Link>> attached() const {
        return {attached_.get(), attached_count_.load(std::memory_order_acquire)};
    }

    void add_communicator(std::uint32_t id, std::vector<int> members);
    void forget(std::uint32_t id);
    std::uint32_t install(std::uint32_t communicator, std::span<const std::int64_t> table,
                          std::span<const std::int32_t> peers, int blocks, std::size_t segment_bytes,
                          std::uint64_t plan);
    Installed& installed(std::uint32_t handle);

    // Number the call and check it; it starts with `try_begin`.
    void enter(Call& call);
    // The call's lane, once it is free for it.
    Lane* try_begin(const Call& call);
    Lane& lane_of(const Call& call) { return call.installed->communicator->lane(call.number); }
    void end(Lane& lane);

    void deliver(Link& from, const Frame& frame, Payload payload) override;
    void released(int peer, std::uint32_t token) override;
    void mismatch(const Delivery& delivery, const std::string& ours);
    void garbage(int peer, const std::string& what) override;
    // After this returns no caller's memory is read any more.
    void abandon();

    const int rank;
    const std::uint16_t generation;
    const std::shared_ptr<Arena> arena;
    Surroundings& surroundings;
    std::atomic<std::uint64_t> collectives{0}, segments{0};

  private:
    friend class Lane;
    void resolve(Installed& installed);
    void sweep_forgotten();
    std::uint32_t register_lane(Lane& lane);
    void unregister_lane(std::uint32_t id);

    const int world_size_;
    std::mutex lanes_mutex_;
    std::unique_ptr<std::atomic<Lane*>[]> lanes_;  // by id
    std::vector<std::uint32_t> free_lane_ids_;
    mutable std::mutex mutex_;                           // the tables below
    std::unique_ptr<std::atomic<Link*>[]> links_;        // by world rank
    std::unique_ptr<std::unique_ptr<Link>[]> attached_;  // in the order of attaching
    std::atomic<std::size_t> attached_count_{0};
    std::unordered_map<std::uint32_t, std::shared_ptr<Communicator>> communicators_;
    std::vector<Delivery> orphans_;                         // for communicators that are not made here yet
    std::vector<std::shared_ptr<Communicator>> forgotten_;  // peers still read their staging
    std::vector<std::unique_ptr<Installed>> installed_;
};

}  // namespace multiring
