// The progress thread: drives the operations that no caller drives, watches the connections, and sleeps when there is
// nothing to do.
#include <unistd.h>

#include <algorithm>

#include "engine.hpp"

namespace multiring {
namespace {

constexpr auto connection_interval = std::chrono::milliseconds(1);  // between looks at the connections while busy
constexpr Clock::duration longest_sleep = std::chrono::milliseconds(100), longest_idle_sleep = std::chrono::seconds(1);
constexpr Clock::duration sleep_while_held_back = std::chrono::milliseconds(1);

Clock::duration until(Clock::time_point time, Clock::duration at_most) {
    return std::clamp<Clock::duration>(time - Clock::now() + std::chrono::milliseconds(1), {}, at_most);
}

}  // namespace

void Engine::progress() {
    progress_thread_ = gettid();
    Spinner spinner(cores_.patience());
    while (!stopping_.load(std::memory_order_acquire)) {
        take_inbox();
        bool active = operations_.advance();
        active |= drain_transports();
        if (state_.has_failed()) {
            operations_.fail_all();
            operations_.let_go_of_devices();
        }
        beat();
        if (Clock::now() - peers_.last_poll() > connection_interval) peers_.poll({});
        if (active) {
            operations_.end_idling();
            spinner.restart();
            continue;
        }
        operations_.begin_idling();
        if (!operations_.works().empty() && spinner.wait()) continue;
        detector_.publish_status(operations_.works());
        check_suspicions();
        operations_.check_deadlines();
        sleep();
        if (!operations_.needs_polling()) spinner.restart();
    }
    take_inbox();
    operations_.fail_all();
    operations_.drain_devices();
}

void Engine::take_inbox() {
    if (!doorbell_.has_news()) return;
    doorbell_.forget_news();
    const std::vector<Notice> notices = peers_.take_notices();
    operations_.take_new();
    for (const Notice& notice : notices) {
        if (notice.complaint != Complaint::none)
            detector_.hear_complaint(notice);
        else if (!notice.farewell)
            peers_.fail_now(detector_.told_by(notice));
    }
    for (const Notice& notice : notices)  // after its reason to leave, if it told of one
        if (notice.farewell) peers_.pass_on_farewell(notice);
}

// Several times a second, whatever else the progress thread does.
void Engine::beat() {
    if (!detector_.begin_beat()) return;
    const Works& works = operations_.works();
    if (slow_links_.expects()) slow_links_.look(peers_.connection_counts(), Clock::now());
    detector_.count(operations_.counts(), slow_links_.network());
    detector_.publish_status(works);
    check_suspicions();
    operations_.check_deadlines();
    detector_.send_beats(works);
    look_for_the_slow();
    if (state_.has_failed()) return;
    if (detector_.check_silence(works)) operations_.fail_all();
    detector_.look_at_transports(works);
    detector_.complain_of_missing_connections();
    if (detector_.check_complaints()) operations_.fail_all();
    detector_.report_lateness(works);
}

// A rank that waits for a slow link is not slow, and a link on which a slow rank sends is not: what was named first is.
void Engine::look_for_the_slow() {
    std::vector<std::string> lines;
    if (slow_links_.expects())
        lines = slow_links_.observe(detector_.statuses(), Clock::now(), slow_ranks_.slowest().has_value());
    const std::vector<std::string> of_ranks =
        slow_ranks_.observe(detector_.statuses(), executor_.rhythm, Clock::now(), slow_links_.slowest().has_value());
    lines.insert(lines.end(), of_ranks.begin(), of_ranks.end());
    if (options_.rank != 0) return;  // the others would say the same
    for (const std::string& line : lines) detector_.report(line);
}

void Engine::check_suspicions() {
    if (!peers_.has_due_suspicions()) return;
    peers_.poll({});  // a process that was stopped may have slept while the better reason came
    take_inbox();
    peers_.fail_for_suspicions(Clock::now());
    if (state_.has_failed()) operations_.fail_all();
}

bool Engine::drain_transports() {
    return !operations_.works().empty() && peers_.drain();
}

Clock::duration Engine::sleep_at_most() {
    if (!peers_.flush()) return sleep_while_held_back;
    if (const auto at_most = operations_.longest_sleep_for_device()) return *at_most;
    const Works& works = operations_.works();
    if (works.empty() && !peers_.has_suspicions()) return until(detector_.next_beat(), longest_idle_sleep);
    Clock::duration at_most = until(detector_.next_beat(), longest_sleep);
    for (const auto& work : works) at_most = until(work->call.deadline, at_most);
    return at_most;
}

void Engine::sleep() {
    Clock::duration at_most = sleep_at_most();
    // Peers and other threads ring if they see these flags; what they did before we see now.
    std::uint32_t& sleeping = arena_->header().sleeping;
    doorbell_.set_asleep(true);
    __atomic_store_n(&sleeping, operations_.works().empty() ? 0 : 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    const bool awake = doorbell_.has_news() || stopping_.load(std::memory_order_acquire) || drain_transports() ||
                       operations_.advance();
    if (awake) at_most = {};
    peers_.watch_data(!operations_.works().empty());
    peers_.poll(at_most);
    doorbell_.set_asleep(false);
    __atomic_store_n(&sleeping, 0, __ATOMIC_RELAXED);
}

}  // namespace multiring
