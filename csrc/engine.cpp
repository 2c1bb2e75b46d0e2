#include "engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace multiring {
namespace {

constexpr auto unread_grace = std::chrono::milliseconds(500);  // at shutdown, for peers that have not read all yet
constexpr int looks_at_status = 3;                             // which the progress thread may be writing

EngineOptions checked(EngineOptions o) {
    if (o.world_size < 1 || o.rank < 0 || o.rank >= o.world_size)
        throw std::invalid_argument("rank " + std::to_string(o.rank) + " of a world of " +
                                    std::to_string(o.world_size));
    if (!o.hosts.empty() && o.hosts.size() != static_cast<std::size_t>(o.world_size))
        throw std::invalid_argument("hosts has " + std::to_string(o.hosts.size()) + " names for a world of " +
                                    std::to_string(o.world_size));
    return o;
}

}  // namespace

Engine::Engine(EngineOptions options)
    : options_(checked(std::move(options))),
      state_(options_),
      arena_(std::make_shared<Arena>(options_.arena_bytes, options_.in_process, options_.rank, options_.world_size,
                                     options_.generation)),
      executor_(options_.rank, options_.world_size, options_.generation, arena_, *this,
                options_.trace ? std::make_unique<Trace>() : nullptr,
                options_.record ? std::make_unique<CallRecorder>() : nullptr),
      cores_(options_, *arena_, executor_.spare_staging),
      peers_(options_, state_, arena_, executor_, cores_, doorbell_, pool_,
             [this](int edge, std::span<const std::byte> statuses) { detector_.hear_beat(edge, statuses); }),
      detector_(options_, state_, arena_, executor_, peers_),
      slow_ranks_(options_),
      slow_links_(options_),
      operations_(options_, state_, arena_, executor_, cores_, doorbell_, peers_, detector_) {
    thread_ = std::thread([this] { progress(); });
    register_for_fork(*this);
}

Engine::~Engine() {
    shutdown(0);
}

// ---- communicators and schedules ----------------------------------------------------------------------------------

void Engine::add_communicator(std::uint32_t id, std::vector<int> members, std::uint16_t incarnation) {
    state_.check_open();  // an engine that has failed already says so in the calls, as on communicators that it had
    executor_.add_communicator(id, std::move(members), incarnation);
    if (id == 0) peers_.map_staging();  // all have made theirs
}

void Engine::forget(std::uint32_t id) {
    check_owned();
    executor_.forget(id);
    operations_.close_devices_of(id);
}

std::uint32_t Engine::install(std::uint32_t communicator, std::span<const std::int64_t> table,
                              std::span<const std::int32_t> peers, const PlanFacts& facts) {
    state_.check_open();  // a failed engine refuses the call that this schedule is for, and says which
    return executor_.install(communicator, table, peers, facts);
}

std::uint64_t Engine::completed(std::uint32_t communicator) const {
    check_owned();
    return executor_.completed(communicator);
}

// ---- its end ------------------------------------------------------------------------------------------------------

void Engine::fail_from_python(Failure failure) {
    check_owned();
    failure.host = host(failure.rank);
    if (failure.kind == ErrorKind::mismatch) failure.witness = options_.rank;
    state_.count_as_raised();  // the caller raises it itself
    fail(std::move(failure));
}

std::optional<Engine::Disputed> Engine::disputed() const {
    const std::optional<Failure> failure = state_.failure();
    if (is_disowned() || !failure || failure->kind != ErrorKind::mismatch) return {};
    const Disagreement& on = failure->disagreement;
    const std::optional<Signature> own = executor_.signature(on.communicator, on.number);
    if (!own) return {};
    return Disputed{on.communicator, on.number, own->describe(false, nullptr), plan_id(own->plan)};
}

std::optional<Failure> Engine::shutdown(double timeout) {
    if (is_disowned() || !state_.close()) return {};
    operations_.close();
    peers_.say_farewell(Clock::now() + seconds(timeout));
    peers_.linger(Clock::now() + std::min<Clock::duration>(unread_grace, seconds(timeout)));
    const std::optional<Failure> unheard = state_.unheard();
    peers_.close_mailbox();
    state_.end();
    stopping_.store(true, std::memory_order_release);
    doorbell_.ring();
    thread_.join();
    operations_.release();
    // Resources shared with others go now, though somebody may keep the engine.
    unregister_for_fork(*this);
    peers_.release();
    doorbell_.close();
    arena_->retire();
    return unheard;
}

void Engine::lock_for_fork() {
    executor_.lock_for_fork();
    operations_.lock_for_fork();
    peers_.lock_for_fork();
    state_.lock_for_fork();
    detector_.lock_for_fork();
    slow_ranks_.lock_for_fork();
    slow_links_.lock_for_fork();
}

void Engine::unlock_after_fork() {
    slow_links_.unlock_after_fork();
    slow_ranks_.unlock_after_fork();
    detector_.unlock_after_fork();
    state_.unlock_after_fork();
    peers_.unlock_after_fork();
    operations_.unlock_after_fork();
    executor_.unlock_after_fork();
}

void Engine::disown() noexcept {
    state_.disown();
    operations_.disown();
    peers_.disown();
    doorbell_.close();
    arena_->make_private_after_fork();
}

// ---- what it did --------------------------------------------------------------------------------------------------

std::vector<Trace::Thread> Engine::traced() const {
    check_owned();
    if (!stopping_.load(std::memory_order_acquire)) throw std::logic_error("the engine still records");
    return executor_.trace ? executor_.trace->threads() : std::vector<Trace::Thread>();
}

std::vector<RecordedCall> Engine::recorded() const {
    check_owned();
    return executor_.recorder ? executor_.recorder->calls() : std::vector<RecordedCall>();
}

Engine::Statistics Engine::statistics() const {
    check_owned();
    Statistics result{};
    result.operations = executor_.operations.load();
    result.segments = executor_.segments.load();
    result.arena_allocated = arena_->allocated_bytes();
    result.arena_committed = arena_->committed_bytes();
    result.seconds_in_calls = operations_.seconds_in_calls();
    result.seconds_waiting = operations_.seconds_waiting();
    result.peers = peers_.traffic();
    for (std::size_t code = 0; code < executor_.done.size(); ++code) {
        const Record& done = executor_.done[code];
        if (done.operations.load() == 0) continue;
        result.collectives.push_back({static_cast<Collective>(code), done.operations.load(), done.bytes.load(),
                                      1e-9 * static_cast<double>(done.nanoseconds.load())});
    }
    Status own;
    for (int look = 0; look < looks_at_status; ++look) {
        if (!arena_->header().status.read(own)) continue;
        result.in_flight.assign(own.waiting, own.waiting + own.waiting_count);
        break;
    }
    return result;
}

std::optional<SlowRank> Engine::slowest() const {
    check_owned();
    return slow_ranks_.slowest();
}

void Engine::tell_if_slow(bool is_message) {
    program_calls_.store(program_calls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (slow_ranks_.is_named_here() && operations_.makes_most_calls(is_message)) tell_that_slow(true);
}

void Engine::tell_if_slow_in_compiled_code() {
    const std::uint64_t of_program = program_calls_.load(std::memory_order_relaxed);
    const std::uint64_t calls = executor_.calls.load(std::memory_order_relaxed);
    const bool program_calls = program_calls_seen_.exchange(of_program, std::memory_order_relaxed) != of_program;
    const bool others_call = calls_seen_.exchange(calls, std::memory_order_relaxed) != calls;
    if (!program_calls && others_call && slow_ranks_.is_named_here()) tell_that_slow(false);
}

void Engine::tell_that_slow(bool is_caller) {
    if (!when_slow_ || !slow_ranks_.take_named_here()) return;
    const std::optional<SlowRank> slow = slow_ranks_.slowest();
    if (slow && std::find(slow->ranks.begin(), slow->ranks.end(), options_.rank) != slow->ranks.end())
        when_slow_(slow->reason, is_caller);
}

std::vector<SlowRank> Engine::slow_so_far() const {
    check_owned();
    return slow_ranks_.so_far();
}

std::optional<SlowLink> Engine::slow_link() const {
    check_owned();
    return slow_links_.slowest();
}

std::vector<SlowLink> Engine::slow_links_so_far() const {
    check_owned();
    return slow_links_.so_far();
}

}  // namespace multiring
