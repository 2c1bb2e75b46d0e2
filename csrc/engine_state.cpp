#include "engine_state.hpp"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "labels.hpp"

namespace multiring {
namespace {

constexpr auto patience_for_labels = std::chrono::seconds(1);  // wait for other ranks to explain a mismatch

// Insert before the first line break: the lines after it explain labels.
void add_to_first_line(std::string& message, const std::string& text) {
    message.insert(std::min(message.find('\n'), message.size()), text);
}

}  // namespace

void throw_shut_down() {
    throw EngineError({ErrorKind::error, -1, "", "", -1,
                       "this communicator was shut down: call multiring.init() again and use the one it returns"});
}

void EngineState::check_owned() const {
    if (is_disowned())
        throw EngineError({ErrorKind::error, options_.rank, options_.host(options_.rank), "", -1,
                           "this process was forked from rank " + std::to_string(options_.rank) +
                               ", to which the communicator belongs: call it there"});
}

void EngineState::check_open() const {
    check_owned();
    if (is_closed()) throw_shut_down();
}

void EngineState::check_usable() const {
    check_open();
    if (has_failed()) raise(raised());
}

void EngineState::check_can_start(const Call& call) const {
    if (has_failed() && !is_closed() && !is_disowned()) {
        Failure failure = raised();
        if (failure.collective.empty()) {
            failure.collective = call.called();
            add_to_first_line(failure.message, "; this " + failure.collective + " was not started");
        }
        raise(std::move(failure));
    }
    check_usable();
}

std::optional<Failure> EngineState::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

Clock::time_point EngineState::failed_since() const {
    const std::lock_guard lock(mutex_);
    return failed_since_;
}

std::optional<Notice> EngineState::fail(Failure failure) {
    const bool is_mismatch = failure.kind == ErrorKind::mismatch;
    if (is_mismatch) explain_labels(failure.message);
    if (failure.kind == ErrorKind::resource && failure.rank < 0) {  // it is this rank that lacks it
        failure.rank = options_.rank;
        failure.host = options_.host(options_.rank);
        failure.message = options_.rank_name(options_.rank) + ": " + failure.message;
    }
    const std::lock_guard lock(mutex_);
    // A rank that leaves still hears of mismatches, and tells others of them.
    if (failure_) {  // another rank's words may explain the labels of ours, which others wait for as well
        if (!is_mismatch || failure_->kind != ErrorKind::mismatch ||
            !take_over_labels(failure_->message, failure.message))
            return {};
    } else {
        if (closed_.load(std::memory_order_relaxed) && !is_mismatch) return {};
        failure_ = std::move(failure);
        failed_since_ = Clock::now();
    }
    untold_ = Notice{-1,
                     failure_->kind,
                     failure_->rank,
                     failure_->message.substr(0, Notice::longest_text),
                     failure_->seconds,
                     false,
                     failure_->witness,
                     failure_->disagreement,
                     failure_->apart};
    failed_.store(true, std::memory_order_release);
    return untold_;
}

std::optional<Notice> EngineState::take_untold() {
    const std::lock_guard lock(mutex_);
    return std::exchange(untold_, {});
}

Failure EngineState::raised() const {
    count_as_raised();
    if (auto found = failure()) return *std::move(found);
    throw_shut_down();  // what goes wrong while a rank leaves is not kept
}

// Throws `failure`; a mismatch waits for a moment for the labels that other ranks have not told yet.
void EngineState::raise(Failure failure) const {
    while (failure.kind == ErrorKind::mismatch && lacks_labels(failure.message)) {
        Clock::time_point since;
        std::string known;
        {
            const std::lock_guard lock(mutex_);
            since = failed_since_;
            known = failure_->message;
        }
        if (take_over_labels(failure.message, known)) continue;
        if (Clock::now() > since + patience_for_labels) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    contrast_labels(failure.message);
    throw EngineError(std::move(failure));
}

Failure EngineState::failure_of(const Call& call) const {
    Failure failure = raised();
    if (failure.seconds == 0) failure.seconds = age_of(call);
    if (failure.collective.empty()) {
        failure.collective = call.called();
        failure.number = static_cast<std::int64_t>(call.number);
        add_to_first_line(failure.message, "; in flight here: " + describe(call));
    }
    return failure;
}

bool EngineState::close() {
    const std::lock_guard lock(mutex_);
    return !closed_.exchange(true);
}

std::optional<Failure> EngineState::unheard() const {
    std::optional<Failure> unheard = failure();
    if (unheard && (raised_.load() || unheard->kind != ErrorKind::mismatch)) unheard.reset();
    return unheard;
}

void EngineState::end() {
    const std::lock_guard lock(mutex_);
    if (!failure_) {
        failure_ = {ErrorKind::error, options_.rank, "", "", -1, "the engine was shut down"};
        failed_since_ = Clock::now();
    }
    failed_.store(true, std::memory_order_release);
}

}  // namespace multiring
