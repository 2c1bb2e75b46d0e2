#include "operations.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "system_files.hpp"

namespace multiring {
namespace {

constexpr auto signal_interval = std::chrono::milliseconds(100);
constexpr auto longest_drive = std::chrono::seconds(1);         // time that a caller drives the engine without a pause
constexpr auto telling_delay = std::chrono::milliseconds(100);  // after this a wait is long enough to ask why

}  // namespace

Operations::Operations(const EngineOptions& options, EngineState& state, std::shared_ptr<Arena> arena,
                       Executor& executor, Cores& cores, Doorbell& doorbell, Peers& peers,
                       const FailureDetector& detector)
    : options_(options),
      state_(state),
      arena_(std::move(arena)),
      executor_(executor),
      cores_(cores),
      doorbell_(doorbell),
      peers_(peers),
      detector_(detector) {}

// ---- callers ------------------------------------------------------------------------------------------------------

namespace {

constexpr auto between_looks = std::chrono::microseconds(250);  // at the clock of a caller's processor time
constexpr auto long_gap = std::chrono::milliseconds(1);
constexpr auto longest_between_polls = std::chrono::milliseconds(100);  // a loop with a sleep of 10 ms, few cores
constexpr auto longest_idle = std::chrono::milliseconds(20);  // between two polls: in a longer time it may compute

std::int64_t nanoseconds(Clock::duration time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

std::int64_t processor_time() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return 1'000'000'000 * static_cast<std::int64_t>(time.tv_sec) + time.tv_nsec;
}

// Time at which this thread left the engine, and its processor time at a look shortly before.
struct CallerActivity {
    const void* of = nullptr;
    Clock::time_point left{}, looked{};
    std::int64_t ran = 0;
    bool was_overtaken = false;  // another caller came in while it waited there last
};
thread_local CallerActivity last_call;
thread_local const bool is_main_thread = gettid() == getpid();

// Looks of this thread, one soon after the other, at works of which some are not done.
struct Polls {
    const void* of = nullptr;
    Clock::time_point latest{};
    bool was_done = false;    // the one that was looked at last
    std::int64_t waited = 0;  // what has not been counted as held up
    std::uint64_t entry = 0;  // as of a caller that waits; 0 before it is known that this one does
};
thread_local Polls polls;

}  // namespace

// A caller inside the engine, and what its thread did since its call before. `waits`: its time inside counts, too.
// Where another one comes in meanwhile the program goes on, as beside a thread that listens or saves: nobody is held up
// then.
class Operations::Caller {
  public:
    Caller(Operations& operations, bool waits)
        : inside_(operations),
          operations_(begun(operations)),
          waits_(waits),
          entry_(waits ? operations.entries_.fetch_add(1, std::memory_order_relaxed) + 1 : 0),
          start_(Clock::now()) {
        if (is_main_thread) operations.pass_main_thread(1);
        if (last_call.of == &operations && start_ - last_call.left >= long_gap)
            operations.ran_.fetch_add(operations.ran_since(last_call.ran), std::memory_order_relaxed);
    }
    ~Caller() {
        const auto end = Clock::now();
        if (waits_) {
            operations_.in_calls_.fetch_add(nanoseconds(end - start_), std::memory_order_relaxed);
            last_call.was_overtaken = operations_.entries_.load(std::memory_order_relaxed) != entry_;
            if (!last_call.was_overtaken)
                operations_.held_up_.fetch_add(nanoseconds(end - start_), std::memory_order_relaxed);
        }
        operations_.leave(end);
        if (is_main_thread) operations_.pass_main_thread(1);
    }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;
    Clock::time_point start() const { return start_; }

  private:
    static Operations& begun(Operations& operations) {
        operations.end_polls();
        return operations;
    }

    const CallGuard inside_;
    Operations& operations_;
    const bool waits_;
    const std::uint64_t entry_;
    const Clock::time_point start_;
};

// A caller that waits for a call: recorded where calls are traced.
class Operations::TimedCall {
  public:
    TimedCall(Operations& operations, const Call* call) : operations_(operations), caller_(operations, true) {
        if (!operations_.executor_.trace || call == nullptr) return;
        event_.kind = TraceEventKind::caller;
        event_.begin = nanoseconds_of(start());
        event_.communicator = call->installed->communicator->id;
        event_.collective = call->collective;
        event_.dtype = call->dtype;
        event_.number = call->number;
        event_.peer = -1;
    }
    ~TimedCall() {
        if (!operations_.executor_.trace || event_.begin == 0) return;
        event_.end = nanoseconds_of(Clock::now());
        event_.finished = std::uncaught_exceptions() == 0;
        operations_.executor_.trace->record(event_);
    }
    Clock::time_point start() const { return caller_.start(); }
    void has_number(std::uint64_t number) { event_.number = number; }
    void waited(Clock::duration time) { operations_.waiting_.fetch_add(nanoseconds(time), std::memory_order_relaxed); }
    void waited_since(Clock::time_point start) { waited(Clock::now() - start); }

  private:
    Operations& operations_;
    const Caller caller_;
    TraceEvent event_{};
};

// From here on the thread's time is its program's.
void Operations::leave(Clock::time_point end) {
    if (last_call.of != this || end - last_call.looked >= between_looks) {
        last_call = {this, end, end, processor_time(), last_call.was_overtaken};
        remember_caller(gettid());
    }
    last_call.left = end;
}

// Processor time of this thread that is not counted yet.
std::int64_t Operations::ran_since(std::int64_t before) {
    const std::int64_t ran = processor_time() - before;
    return is_main_thread ? std::max<std::int64_t>(ran - main_ran_.exchange(0, std::memory_order_relaxed), 0) : ran;
}

void Operations::pass_main_thread(std::uint64_t passages) {
    main_passages_.store(main_passages_.load(std::memory_order_relaxed) + passages, std::memory_order_relaxed);
    if (last_call.of != this) main_ran_.store(0, std::memory_order_relaxed);
}

// Count what the main thread ran since the last look, if it made no call while others did: XLA calls in threads of its
// own, and the main thread computes what these calls wait for. `ran`: nanoseconds so far, by the system.
void Operations::count_main_thread(std::int64_t ran) {
    const MainThread now{ran, main_passages_.load(std::memory_order_relaxed),
                         executor_.calls.load(std::memory_order_relaxed)};
    const bool has_passed = now.passages != main_before_.passages || now.passages % 2 == 1;
    if (!has_passed && now.calls == main_before_.calls) return;  // the next call tells whether it makes them
    const MainThread before = std::exchange(main_before_, now);
    if (has_passed || before.ran < 0) return;
    main_ran_.fetch_add(now.ran - before.ran, std::memory_order_relaxed);
    ran_.fetch_add(now.ran - before.ran, std::memory_order_relaxed);
}

// A thread that asks again and again waits, if it does so at short intervals and is in no call between: its rank has
// begun the call, and holds nobody up in it. Where another caller comes in meanwhile, that is as with a Caller.
bool Operations::poll(const Work& work) {
    const bool is_done = work.done.is_set();
    if (work.call.transfer) return is_done;  // waits for a device count as none
    const auto now = Clock::now();
    if (is_main_thread) pass_main_thread(2);
    if (polls.of == this && now - polls.latest <= longest_between_polls && !(is_done && polls.was_done)) {
        const std::int64_t waited = nanoseconds(now - polls.latest);
        in_calls_.fetch_add(waited, std::memory_order_relaxed);
        if (now - polls.latest <= longest_idle) waiting_.fetch_add(waited, std::memory_order_relaxed);
        polls.waited += waited;
        if (polls.entry == 0) polls.entry = entries_.fetch_add(1, std::memory_order_relaxed) + 1;
        leave(now);
        if (is_done) end_polls();
    } else {
        end_polls();
        if (is_done) return true;
        if (last_call.of == this && now - last_call.left >= long_gap)
            ran_.fetch_add(ran_since(last_call.ran), std::memory_order_relaxed);
        leave(now);
    }
    polls.of = this;
    polls.latest = now;
    polls.was_done = is_done;
    return is_done;
}

void Operations::end_polls() {
    if (polls.of == this && polls.entry != 0) {
        last_call.was_overtaken = entries_.load(std::memory_order_relaxed) != polls.entry;
        if (!last_call.was_overtaken) held_up_.fetch_add(polls.waited, std::memory_order_relaxed);
    }
    polls = {};
}

// A thread that was overtaken in its last wait listens, or waits for what has nothing to do with the program's steps.
void Operations::remember_beginning() {
    if (last_call.of == this && last_call.was_overtaken) return;
    const std::size_t next = next_beginning_.load(std::memory_order_relaxed);  // threads that meet here may lose one
    beginnings_[next % most_beginnings].store(&last_call, std::memory_order_relaxed);
    next_beginning_.store(next + 1, std::memory_order_relaxed);
}

// Messages are also how a thread listens: they tell only where no other thread calls.
bool Operations::makes_most_calls(bool is_message) const {
    const pid_t own = gettid();
    if (std::all_of(caller_threads_.begin(), caller_threads_.end(), [own](const std::atomic<pid_t>& each) {
            const pid_t thread = each.load(std::memory_order_relaxed);
            return thread == 0 || thread == own;
        }))
        return true;
    if (is_message || (last_call.of == this && last_call.was_overtaken)) return false;
    std::size_t known = 0, own_count = 0;
    for (const std::atomic<const void*>& each : beginnings_) {
        const void* thread = each.load(std::memory_order_relaxed);
        known += thread != nullptr;
        own_count += thread == &last_call;
    }
    return 2 * own_count > known;
}

Counts Operations::counts() {
    Counts counts;
    counts.calls = executor_.calls.load(std::memory_order_relaxed);
    counts.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    counts.in_calls = 1e-9 * static_cast<double>(held_up_.load(std::memory_order_relaxed));
    // The main thread, whoever calls: it computes for the calls that compiled code makes in threads of its own.
    std::array<pid_t, most_callers + 1> threads{getpid()};
    for (std::size_t i = 0; i < most_callers; ++i)
        if (const pid_t thread = caller_threads_[i].load(std::memory_order_relaxed); thread != threads[0])
            threads[i + 1] = thread;
    bool is_known = false;
    for (std::size_t i = 0; i < threads.size(); ++i) {
        if (threads[i] == 0) continue;
        Queued& before = queued_before_[i];
        long long ran = 0, queued = 0;
        const std::string schedstat = read_system_file("/proc/self/task/" + std::to_string(threads[i]) + "/schedstat");
        if (std::sscanf(schedstat.c_str(), "%lld %lld", &ran, &queued) != 2) {  // it has ended, or nobody tells
            if (i == 0) continue;
            pid_t ended = threads[i];
            caller_threads_[i - 1].compare_exchange_strong(ended, 0, std::memory_order_relaxed);
            continue;
        }
        is_known = true;
        if (i == 0) count_main_thread(ran);
        if (before.thread == threads[i]) queued_ += 1e-9 * static_cast<double>(queued - before.so_far);
        before = {threads[i], queued};
    }
    counts.ran = 1e-9 * static_cast<double>(ran_.load(std::memory_order_relaxed));
    counts.queued = is_known ? queued_ : -1;
    return counts;
}

// Under torch one thread computes and starts calls, and another waits for them: a lack of cores shows in the first.
void Operations::remember_caller(pid_t thread) {
    for (std::atomic<pid_t>& known : caller_threads_)
        if (known.load(std::memory_order_relaxed) == thread) return;
    for (std::atomic<pid_t>& known : caller_threads_) {
        pid_t none = 0;
        if (known.compare_exchange_strong(none, thread, std::memory_order_relaxed)) return;
    }
    caller_threads_[static_cast<std::size_t>(thread) % most_callers].store(thread, std::memory_order_relaxed);
}

// A thread had nothing to do until `holder` did its part.
void Operations::count_wait(Transport* holder, Clock::time_point begin, Clock::time_point end) {
    if (holder != nullptr) holder->count_waited(end - begin);
    if (!executor_.trace) return;
    TraceEvent event{};
    event.kind = TraceEventKind::idle;
    event.begin = nanoseconds_of(begin);
    event.end = nanoseconds_of(end);
    event.peer = holder != nullptr ? holder->peer : -1;
    event.finished = true;
    executor_.trace->record(event);
}

// A call that comes too late to begin is known all the same, if another rank is to blame.
void Operations::check_can_start(const Call& call) {
    if (state_.has_failed() && !state_.is_closed() && !state_.is_disowned()) {
        const std::optional<Failure> failure = state_.failure();
        if (failure && (failure->kind == ErrorKind::mismatch || failure->rank != options_.rank)) executor_.refuse(call);
    }
    state_.check_can_start(call);
}

void Operations::run(Call call, const CheckSignals& check_signals) {
    remember_beginning();
    TimedCall timed(*this, &call);
    check_can_start(call);
    executor_.enter(call, timed.start());
    timed.has_number(call.number);
    Lane* lane = executor_.try_begin(call);
    Spinner spinner(cores_.patience());
    const DriveEnd outcome = lane != nullptr ? drive(*lane, spinner) : DriveEnd::out_of_patience;
    timed.waited(spinner.waited());
    if (outcome == DriveEnd::finished) return;
    if (outcome == DriveEnd::failed) {
        executor_.abandon();
        executor_.end(*lane, false);
        state_.raise(state_.failure_of(call));
    }
    auto work = std::make_shared<Work>();
    work->call = call;
    work->lane = lane;
    work->waiters = 1;
    work->waited_since = Clock::now().time_since_epoch().count();
    if (lane != nullptr) lane->driven_by_progress.store(true, std::memory_order_release);
    hand_over(work);
    const auto start = Clock::now();
    wait_until_done(*work, check_signals);
    timed.waited_since(start);
    if (work->failure) state_.raise(*work->failure);
}

// Drive an operation in the calling thread for as long as its patience lasts.
Operations::DriveEnd Operations::drive(Lane& lane, Spinner& spinner) try {
    Transport* holder = nullptr;
    const auto go_on = [&] {
        if (!spinner.is_waiting()) return;
        const auto begin = spinner.start();
        count_wait(holder, begin, spinner.restart());
    };
    constexpr int advances_between_looks = 16;  // advances between two looks at the clock
    std::optional<Clock::time_point> until;
    for (int advances = 1;; ++advances) {
        bool active = lane.advance();
        if (lane.finished()) {
            go_on();
            const bool clear = lane.flush();
            executor_.end(lane, true);
            if (!clear) doorbell_.ring();  // a peer does not read: the progress thread sends the rest
            return DriveEnd::finished;
        }
        for (Transport* transport : lane.installed().shared_transports) active |= transport->drain();
        if (lane.installed().any_direct) active |= peers_.drain_sockets();
        if (state_.has_failed()) {
            go_on();
            return DriveEnd::failed;
        }
        if (active) {
            go_on();
            if (advances % advances_between_looks != 0) continue;
            const auto now = Clock::now();
            if (!until) until = std::min(now + longest_drive, lane.call().deadline);
            if (now >= *until) return DriveEnd::out_of_patience;  // who waits sees signals, and the time limit
        } else {
            lane.flush();
            if (!spinner.is_waiting()) holder = lane.held_up_by();
            if (spinner.wait()) continue;
            go_on();
            return DriveEnd::out_of_patience;
        }
    }
} catch (const EngineError& error) {
    peers_.fail(error.failure);
    return DriveEnd::failed;
}

std::shared_ptr<Work> Operations::start(Call call, void* owner, OnDone on_done) {
    remember_beginning();
    const Caller caller(*this, false);
    check_can_start(call);
    executor_.enter(call, caller.start());
    auto work = std::make_shared<Work>();
    work->call = call;
    work->owner = owner;
    work->on_done = std::move(on_done);
    hand_over(work);
    return work;
}

std::shared_ptr<Work> Operations::start_point(std::uint32_t communicator, int other, Call call, void* owner) {
    const Caller caller(*this, false);
    state_.check_can_start(call);
    Lane* lane = executor_.begin_point(communicator, other, call);
    auto work = std::make_shared<Work>();
    work->call = lane != nullptr ? lane->call() : call;
    work->lane = lane;
    work->owner = owner;
    if (lane != nullptr) lane->driven_by_progress.store(true, std::memory_order_release);
    hand_over(work);
    return work;
}

void Operations::hand_over(std::shared_ptr<Work> work) {
    {
        const std::lock_guard lock(mutex_);
        if (!closed_) {
            new_works_.push_back(std::exchange(work, nullptr));
            doorbell_.announce();
        }
    }
    if (work != nullptr) {
        if (work->lane != nullptr) executor_.abandon();  // the caller gets its buffer back: nobody may go on reading it
        throw_shut_down();
    }
    doorbell_.ring();
}

void Operations::wait_until_done(Work& work, const CheckSignals& check_signals) {
    while (!work.done.wait_for(signal_interval)) {
        try {
            check_signals();
        } catch (...) {
            peers_.fail({ErrorKind::peer_lost, options_.rank, options_.host(options_.rank), "", -1,
                         options_.rank_name(options_.rank) + " was interrupted by a signal in a collective"});
            while (!work.done.wait_for(signal_interval)) {
            }
            throw;
        }
    }
}

namespace {

class Waiter {  // a caller, for a work
  public:
    explicit Waiter(Work& work) : work_(work) {
        if (work_.waiters.load(std::memory_order_relaxed) == 0)
            work_.waited_since.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
        work_.waiters.fetch_add(1, std::memory_order_release);
    }
    ~Waiter() { work_.waiters.fetch_sub(1, std::memory_order_relaxed); }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

  private:
    Work& work_;
};

}  // namespace

void Operations::wait(const std::shared_ptr<Work>& work, std::optional<double> timeout,
                      const CheckSignals& check_signals) {
    state_.check_owned();
    TimedCall timed(*this, work->done.is_set() ? nullptr : &work->call);
    const auto start = Clock::now();
    const auto deadline = Clock::now() + seconds(timeout.value_or(forever));
    const Waiter waits(*work);
    while (!work->done.wait_for(std::min<Clock::duration>(signal_interval, deadline - Clock::now()))) {
        check_signals();
        if (Clock::now() < deadline) continue;
        std::optional<Failure> late = ask(work);
        if (work->done.is_set()) break;
        if (!late)
            late = {ErrorKind::timeout,
                    -1,
                    "",
                    std::string(work->call.called()),
                    static_cast<std::int64_t>(work->call.number),
                    multiring::describe(work->call),
                    std::chrono::duration<double>(Clock::now() - start).count()};
        late->kind = ErrorKind::timeout;
        late->message += ", after " + readable(*timeout) + " s of wait(); the work goes on";
        throw EngineError(std::move(*late));
    }
    timed.waited_since(start);
    if (work->failure) state_.raise(*work->failure);
}

// Return what a work waits for now, or nothing if the progress thread does not answer.
std::optional<Failure> Operations::ask(const std::shared_ptr<Work>& work) {
    const auto question = std::make_shared<WaitQuery>();
    question->work = work;
    {
        const std::lock_guard lock(mutex_);
        questions_.push_back(question);
        doorbell_.announce();
    }
    doorbell_.ring();
    if (!question->answered.wait_for(signal_interval)) return {};
    return question->answer;
}

std::vector<void*> Operations::take_owners() {
    const std::lock_guard lock(mutex_);
    has_owners_.store(false, std::memory_order_relaxed);
    return std::exchange(owners_, {});
}

// ---- the progress thread ------------------------------------------------------------------------------------------

void Operations::take_new() {
    std::vector<std::shared_ptr<WaitQuery>> questions;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& work : new_works_) forgive_stopped_time(*work);
        works_.insert(works_.end(), new_works_.begin(), new_works_.end());
        new_works_.clear();
        questions.swap(questions_);
    }
    for (const auto& question : questions) {
        if (!question->work->done.is_set()) question->answer = detector_.timeout_of(*question->work, "");
        question->answered.set();
    }
}

bool Operations::advance() {
    bool active = false;
    for (std::size_t i = 0; i < works_.size();) {
        Work& work = *works_[i];
        try {
            if (work.lane == nullptr) {
                work.lane = executor_.try_begin(work.call);
                if (work.lane != nullptr) {
                    work.lane->postpone(work.call.deadline);  // a receive that waited for its turn
                    work.lane->driven_by_progress.store(true, std::memory_order_release);
                }
            }
            if (work.lane != nullptr) active |= work.lane->advance();
        } catch (const EngineError& error) {
            peers_.fail(error.failure);
        }
        if (work.lane == nullptr || !work.lane->finished() || state_.has_failed()) {
            ++i;
            continue;
        }
        work.lane->flush();
        finish(work, {});
        works_.erase(works_.begin() + static_cast<std::ptrdiff_t>(i));
        active = true;
    }
    return active;
}

// Names the transport for which callers wait now that nothing comes: that of the rank that holds up a work for which
// one waits, or else the oldest work.
void Operations::begin_idling() {
    if (idle_since_ || works_.empty()) return;
    idle_since_ = Clock::now();
    held_up_by_ = nullptr;
    for (const auto& work : works_) {
        if (work->lane == nullptr) continue;
        const bool is_waited_for = work->waiters.load(std::memory_order_acquire) > 0;
        if (held_up_by_ == nullptr || is_waited_for) held_up_by_ = work->lane->held_up_by();
        if (is_waited_for) return;
    }
}

void Operations::end_idling() {
    if (!idle_since_) return;
    const auto end = Clock::now();
    auto begin = end;
    for (const auto& work : works_)
        if (work->waiters.load(std::memory_order_acquire) > 0)
            begin =
                std::min(begin, Clock::time_point(Clock::duration(work->waited_since.load(std::memory_order_relaxed))));
    begin = std::max(begin, *idle_since_);
    idle_since_.reset();
    if (begin < end) count_wait(held_up_by_, begin, end);
}

void Operations::finish(Work& work, std::optional<Failure> failure) {
    end_idling();
    if (work.lane != nullptr) {
        const Call& call = work.lane->call();
        if (call.is_point()) work.other = call.installed->communicator->members[call.other];
        executor_.end(*work.lane, !failure);
    }
    work.failure = std::move(failure);
    if (work.failure && work.call.transfer)
        leaving_.emplace_back(work.call.transfer, std::exchange(work.owner, nullptr));
    {
        const std::lock_guard lock(mutex_);
        if (work.owner != nullptr) {
            owners_.push_back(std::exchange(work.owner, nullptr));
            has_owners_.store(true, std::memory_order_relaxed);
        }
    }
    work.ended = Clock::now();
    work.done.set();
    if (work.on_done) work.on_done(work.failure);
}

void Operations::fail_all() {
    peers_.tell_waiters();
    if (!works_.empty()) executor_.abandon();
    for (const auto& work : works_) finish(*work, state_.failure_of(work->call));
    works_.clear();
}

// The time that this process has missed, stopped or starved, is held against nobody.
void Operations::forgive_stopped_time(Work& work) {
    Call& call = work.call;
    const auto since = std::max(away_since_, call.deadline - seconds(call.timeout));
    if (since >= came_back_) return;
    call.deadline += came_back_ - since;
    if (work.lane != nullptr) work.lane->postpone(call.deadline);
}

// A rank that has left on purpose is lost for those that still need it; any of several senders is needed only when
// the others have left too.
void Operations::fail_if_departed(const Work& work) {
    if (!peers_.has_departures()) return;
    std::vector<int> departed;
    if (work.lane != nullptr) {
        departed = peers_.departed_of(work.lane->waited_for());
    } else if (work.call.is_point()) {
        const CommunicatorBase& of = *work.call.installed->communicator;
        departed = peers_.departed_of(of.members);
        if (departed.size() + 1 < of.members.size()) return;
    }
    if (departed.empty()) return;
    const int rank = departed.front();
    const Call& call = work.lane != nullptr ? work.lane->call() : work.call;
    peers_.fail({ErrorKind::peer_lost, rank, options_.host(rank), std::string(call.called()),
                 static_cast<std::int64_t>(call.number),
                 options_.rank_name(rank) + " has shut down, and " + multiring::describe(call) + " waits for it"});
}

void Operations::check_deadlines() {
    const auto now = Clock::now();
    const auto looked_last = std::exchange(looked_at_deadlines_, now);
    // It runs at every beat, and more often while calls wait: after a longer gap this process was stopped.
    if (now - looked_last >= 2 * detector_.interval()) {
        away_since_ = looked_last;
        came_back_ = now;
        for (const auto& work : works_) forgive_stopped_time(*work);
    }
    for (const auto& work : works_) {
        if (now >= work->call.deadline) {
            peers_.fail(
                detector_.timeout_of(*work, ", and its timeout of " + readable(work->call.timeout) + " s is up"));
        } else {
            fail_if_departed(*work);
            if (work->lane != nullptr && !work->told &&
                now >= work->call.deadline - seconds(work->call.timeout) + telling_delay) {
                work->told = true;
                work->lane->tell_waiting();
            }
        }
    }
    if (state_.has_failed()) fail_all();
}

// ---- the shutdown -------------------------------------------------------------------------------------------------

void Operations::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
}

void Operations::release() {
    while (callers_.load() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    close_devices();
    executor_.team.store(nullptr, std::memory_order_relaxed);
    team_.reset();
}

}  // namespace multiring
