// The progress thread: drives the operations that no caller drives, watches the connections, and sleeps when there is
// nothing to do.
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>

#include "engine.hpp"

namespace multiring {
namespace {

constexpr auto connection_interval = std::chrono::milliseconds(1);  // between looks at the connections while busy
constexpr auto telling_delay = std::chrono::milliseconds(100);      // of a wait that is long enough to ask why
constexpr Clock::duration longest_sleep = std::chrono::milliseconds(100), longest_idle_sleep = std::chrono::seconds(1);
constexpr Clock::duration sleep_while_held_back = std::chrono::milliseconds(1);

// A card rings no bell. Who has waited long may wait a sixteenth longer, but not for more than this.
constexpr Clock::duration longest_sleep_for_card = std::chrono::microseconds(200);
constexpr int part_of_wait_for_card = 16;

Clock::duration until(Clock::time_point time, Clock::duration at_most) {
    return std::clamp<Clock::duration>(time - Clock::now() + std::chrono::milliseconds(1), {}, at_most);
}

}  // namespace

void Engine::wake_progress() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!asleep_.load(std::memory_order_relaxed)) return;
    const std::uint64_t one = 1;
    // A full counter (EAGAIN) wakes it as well.
    [[maybe_unused]] const auto written = write(doorbell_, &one, sizeof one);
}

void Engine::progress() {
    progress_thread_ = gettid();
    Spinner spinner(patience_);
    while (!stopping_.load(std::memory_order_acquire)) {
        take_inbox();
        bool active = advance_works();
        active |= drain_links();
        if (failed_.load(std::memory_order_acquire)) {
            fail_works();
            let_go_of_cards();
        }
        beat();
        if (Clock::now() - last_poll_ > connection_interval) poll_connections({});
        if (active) {
            end_idling();
            spinner.restart();
            continue;
        }
        begin_idling();
        if (!works_.empty() && spinner.wait()) continue;
        publish_status();
        check_suspicions();
        check_deadlines();
        sleep();
        if (!needs_polling()) spinner.restart();
    }
    take_inbox();
    fail_works();
    drain_cards();
}

void Engine::take_inbox() {
    if (!inbox_.load(std::memory_order_acquire)) return;
    std::vector<Notice> notices;
    std::vector<std::shared_ptr<WaitQuery>> questions;
    {
        const std::lock_guard lock(mutex_);
        inbox_.store(false, std::memory_order_relaxed);
        for (const auto& work : new_works_) forgive_stopped_time(*work);
        works_.insert(works_.end(), new_works_.begin(), new_works_.end());
        new_works_.clear();
        notices.swap(notices_);
        questions.swap(questions_);
        for (const Notice& notice : notices) {
            const auto rank = static_cast<std::size_t>(notice.rank);
            // What came another way may have overtaken what a data connection brings, which has a farewell of its own.
            if (!notice.farewell || (notice.from >= 0 && linked_[rank])) continue;
            departed_[rank] = true;
            someone_departed_.store(true, std::memory_order_release);
        }
    }
    for (const auto& question : questions) {
        if (!question->work->done.is_set()) question->answer = timeout_of(*question->work, "");
        question->answered.set();
    }
    for (const Notice& notice : notices) {
        if (notice.complaint != Complaint::none)
            hear_complaint(notice);
        else if (!notice.farewell)
            fail(told_by(notice));
    }
    for (const Notice& notice : notices)  // after its reason to leave, if it told of one
        if (notice.farewell) control_->pass_on_farewell(notice.from, notice.rank);
}

bool Engine::advance_works() {
    bool active = false;
    for (std::size_t i = 0; i < works_.size();) {
        Work& work = *works_[i];
        try {
            if (work.lane == nullptr) {
                work.lane = executor_->try_begin(work.call);
                if (work.lane != nullptr) {
                    work.lane->postpone(work.call.deadline);  // a receive that waited for its turn
                    work.lane->driven_by_progress.store(true, std::memory_order_release);
                }
            }
            if (work.lane != nullptr) active |= work.lane->advance();
        } catch (const EngineError& error) {
            fail(error.failure);
        }
        if (work.lane == nullptr || !work.lane->finished() || failed_.load(std::memory_order_acquire)) {
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

// True if anything came, or could not be looked at because a caller is at it.
bool Engine::drain_links() {
    bool active = false;
    if (works_.empty()) return false;
    for (const auto& link : executor_->attached())
        if (link->shares_memory()) active |= link->drain();
    return drain_sockets() || active;
}

// Whom callers wait for now that nothing comes: the rank that holds up a work that one waits for, or else the oldest.
void Engine::begin_idling() {
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

void Engine::end_idling() {
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

void Engine::finish(Work& work, std::optional<Failure> failure) {
    end_idling();
    if (work.lane != nullptr) {
        const Call& call = work.lane->call();
        if (call.is_point()) work.other = call.installed->communicator->members[call.other];
        executor_->end(*work.lane, !failure);
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

// Whoever waits for us has a data connection to us; over the control connections the notice may have no way, where
// the ranks between have left.
void Engine::tell_waiters() {
    std::optional<Notice> notice;
    std::vector<TcpLink*> links;
    {
        const std::lock_guard lock(mutex_);
        notice.swap(untold_);
        if (notice) links = tcp_links_;
    }
    for (TcpLink* link : links) link->send_notice(*notice);
}

void Engine::fail_works() {
    tell_waiters();
    if (!works_.empty()) executor_->abandon();
    for (const auto& work : works_) finish(*work, failure_of(work->call));
    works_.clear();
}

// The time that this process has missed, stopped or starved, is held against nobody.
void Engine::forgive_stopped_time(Work& work) {
    Call& call = work.call;
    const auto since = std::max(away_since_, call.deadline - seconds(call.timeout));
    if (since >= came_back_) return;
    call.deadline += came_back_ - since;
    if (work.lane != nullptr) work.lane->postpone(call.deadline);
}

void Engine::check_deadlines() {
    const auto now = Clock::now();
    const auto looked_last = std::exchange(looked_at_deadlines_, now);
    // With every beat, and more often while calls wait: later, this process was away.
    if (now - looked_last >= 2 * liveness_.interval()) {
        away_since_ = looked_last;
        came_back_ = now;
        for (const auto& work : works_) forgive_stopped_time(*work);
    }
    for (const auto& work : works_) {
        if (now >= work->call.deadline) {
            fail(timeout_of(*work, ", and its timeout of " + readable(work->call.timeout) + " s is up"));
        } else {
            fail_if_departed(*work);
            if (work->lane != nullptr && !work->told &&
                now >= work->call.deadline - seconds(work->call.timeout) + telling_delay) {
                work->told = true;
                work->lane->tell_waiting();
            }
        }
    }
    if (failed_.load(std::memory_order_acquire)) fail_works();
}

void Engine::check_suspicions() {
    std::vector<Notice> due;
    {
        const std::lock_guard lock(mutex_);
        const auto now = Clock::now();
        if (std::none_of(suspicions_.begin(), suspicions_.end(), [&](const auto& each) { return each.first <= now; }))
            return;
    }
    poll_connections({});  // a process that was stopped may have slept while the better reason came
    take_inbox();
    {
        const std::lock_guard lock(mutex_);
        const auto now = Clock::now();
        std::erase_if(suspicions_, [&](const auto& suspicion) {
            if (suspicion.first > now) return false;
            due.push_back(suspicion.second);
            return true;
        });
    }
    for (const Notice& notice : due) fail({notice.kind, notice.rank, host(notice.rank), "", -1, notice.text});
    if (failed_.load(std::memory_order_acquire)) fail_works();
}

Clock::duration Engine::sleep_at_most() {
    bool held_back = false;
    for (const auto& link : executor_->attached()) held_back |= !link->flush();
    if (held_back) return sleep_while_held_back;
    if (!leaving_.empty()) return longest_sleep_for_card;
    if (needs_polling()) {
        const auto waited = Clock::now() - idle_since_.value_or(Clock::now());
        return std::min(waited / part_of_wait_for_card, longest_sleep_for_card);
    }
    {
        const std::lock_guard lock(mutex_);
        if (works_.empty() && suspicions_.empty()) return until(next_beat_, longest_idle_sleep);
    }
    Clock::duration at_most = until(next_beat_, longest_sleep);
    for (const auto& work : works_) at_most = until(work->call.deadline, at_most);
    return at_most;
}

void Engine::sleep() {
    Clock::duration at_most = sleep_at_most();
    // Peers and other threads ring if they see these flags; what they did before we see now.
    std::uint32_t& sleeping = arena_->header().sleeping;
    asleep_.store(true, std::memory_order_relaxed);
    __atomic_store_n(&sleeping, works_.empty() ? 0 : 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    const bool awake = inbox_.load(std::memory_order_acquire) || stopping_.load(std::memory_order_acquire) ||
                       drain_links() || advance_works();
    if (awake) at_most = {};
    watch_data(!works_.empty());
    poll_connections(at_most);
    asleep_.store(false, std::memory_order_relaxed);
    __atomic_store_n(&sleeping, 0, __ATOMIC_RELAXED);
}

void Engine::poll_connections(Clock::duration at_most) {
    if (at_most > Clock::duration{}) {  // epoll_wait counts in milliseconds
        pollfd any{epoll_, POLLIN, 0};
        const auto whole = std::chrono::duration_cast<std::chrono::seconds>(at_most);
        const timespec timeout{whole.count(), static_cast<long>(std::chrono::nanoseconds(at_most - whole).count())};
        ppoll(&any, 1, &timeout, nullptr);
    }
    epoll_event events[16];
    const int count = epoll_wait(epoll_, events, 16, 0);
    last_poll_ = Clock::now();
    for (int i = 0; i < count; ++i) {
        const auto watched = static_cast<Watched>(events[i].data.u64 >> 32);
        const int peer = static_cast<int>(events[i].data.u64 & 0xffffffff);
        switch (watched) {
            case Watched::control: control_->read(peer); break;
            case Watched::data: drain_sockets(); break;
            case Watched::hangup:
                if (Link* link = executor_->link(peer)) link->drain();  // it may be being attached
                break;
            case Watched::doorbell:
                std::uint64_t rings;
                [[maybe_unused]] const auto taken = read(doorbell_, &rings, sizeof rings);
                break;
        }
    }
}

// Data connections wake the progress thread only while it has operations to drive: callers read them themselves.
void Engine::watch_data(bool wanted) {
    if (wanted == watches_data_ || (wanted && !has_sockets_.load(std::memory_order_acquire))) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key_of(Watched::data, 0);
    epoll_ctl(epoll_, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, data_epoll_, &event);
    watches_data_ = wanted;
}

}  // namespace multiring
