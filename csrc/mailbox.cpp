#include "mailbox.hpp"

#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "errors.hpp"

namespace multiring {

LocalTransport::LocalTransport(int peer, int self, Receiver& receiver, std::shared_ptr<Arena> mine,
                               std::unique_ptr<PeerArena> theirs, Descriptor doorbell)
    : Transport(peer),
      receiver_(receiver),
      self_(self),
      mine_(std::move(mine)),
      theirs_(std::move(theirs)),
      doorbell_(std::move(doorbell)),
      outgoing_(static_cast<Mailbox*>(mine_->allocate(sizeof(Mailbox)))) {
    std::memset(static_cast<void*>(outgoing_), 0, sizeof(Mailbox));
    releases_.type = FrameType::release;
    const auto entry = static_cast<std::uint32_t>(mine_->offset(outgoing_) / cache_line);
    __atomic_store_n(&mine_->mailbox_directory()[peer], entry, __ATOMIC_RELEASE);
}

void LocalTransport::disown() noexcept {
    doorbell_.reset();
    theirs_->unmap();
}

// The peer may attach us later than we attach it: until then it has no mailbox for us.
const Mailbox* LocalTransport::incoming() {
    const Mailbox* found = incoming_.load(std::memory_order_relaxed);
    if (found != nullptr) return found;
    const std::byte* directory = theirs_->at(theirs_->header().mailboxes, 0);
    const auto* entries = reinterpret_cast<const std::uint32_t*>(directory);
    const std::uint32_t entry = __atomic_load_n(&entries[self_], __ATOMIC_ACQUIRE);
    if (entry == 0) return nullptr;
    found = reinterpret_cast<const Mailbox*>(theirs_->at(std::uint64_t{entry} * cache_line, sizeof(Mailbox)));
    incoming_.store(found, std::memory_order_relaxed);
    return found;
}

bool LocalTransport::put_in_slot(const Frame& frame) {
    if (posted_ - read_by_peer_ == mailbox_slots) {
        const Mailbox* theirs = incoming();
        if (theirs == nullptr) return false;
        read_by_peer_ = __atomic_load_n(&theirs->drained, __ATOMIC_ACQUIRE);
        if (posted_ - read_by_peer_ == mailbox_slots) return false;
    }
    Frame& slot = outgoing_->slots[posted_ % mailbox_slots];
    constexpr std::size_t lap_bytes = sizeof slot.lap;
    std::memcpy(reinterpret_cast<std::byte*>(&slot) + lap_bytes, reinterpret_cast<const std::byte*>(&frame) + lap_bytes,
                sizeof slot - lap_bytes);
    __atomic_store_n(&slot.lap, ++posted_, __ATOMIC_RELEASE);
    return true;
}

void LocalTransport::put(const Frame& frame) {
    if (queued_.empty() && put_in_slot(frame)) return;
    queued_.push_back(frame);
    held_back_.store(true, std::memory_order_relaxed);
}

void LocalTransport::put_releases() {
    if (releases_.token_count == 0) return;
    Frame frame;
    std::memcpy(static_cast<void*>(&frame), &releases_, sizeof frame);
    releases_.token_count = 0;
    put(frame);
}

void LocalTransport::post(const Frame& frame, const std::byte*) {
    const std::lock_guard lock(send_mutex_);
    // Releases go first: the data may be the answer that allows the peer to overwrite what we have read.
    put_releases();
    put(frame);
    messages_sent_ += frame.bytes != 0;
    bytes_sent_ += frame.bytes;
}

void LocalTransport::notify() {
    // Either we see that the peer sleeps, or the peer, about to sleep, sees the descriptor.
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&theirs_->header().sleeping, __ATOMIC_RELAXED) != 0) {
        const std::uint64_t one = 1;
        // A full counter (EAGAIN) wakes the peer as well.
        [[maybe_unused]] const auto written = write(doorbell_.get(), &one, sizeof one);
    }
}

void LocalTransport::give_back(Payload payload, std::size_t) {
    const std::lock_guard lock(send_mutex_);
    releases_.tokens[releases_.token_count++] = payload.token;
    if (releases_.token_count == tokens_per_frame)
        put_releases();
    else
        held_back_.store(true, std::memory_order_relaxed);
}

bool LocalTransport::flush() {
    if (!held_back_.load(std::memory_order_relaxed)) return true;
    const std::lock_guard lock(send_mutex_);
    put_releases();
    while (!queued_.empty() && put_in_slot(queued_.front())) queued_.pop_front();
    held_back_.store(!queued_.empty(), std::memory_order_relaxed);
    notify();
    return queued_.empty();
}

bool LocalTransport::drain() {
    const Mailbox* theirs = incoming();
    if (theirs == nullptr) return false;
    const std::unique_lock lock(receive_mutex_, std::try_to_lock);
    if (!lock) return true;
    const std::uint32_t before = drained_;
    for (;;) {
        const Frame& slot = theirs->slots[drained_ % mailbox_slots];
        if (__atomic_load_n(&slot.lap, __ATOMIC_ACQUIRE) != drained_ + 1) break;
        const Frame frame = slot;
        ++drained_;
        if (frame.type == FrameType::release) {
            ReleaseFrame releases;
            std::memcpy(&releases, &frame, sizeof releases);
            for (int i = 0; i < releases.token_count && i < tokens_per_frame; ++i)
                receiver_.released(peer, releases.tokens[i]);
        } else {
            messages_received_.fetch_add(frame.bytes != 0, std::memory_order_relaxed);
            bytes_received_.fetch_add(frame.bytes, std::memory_order_relaxed);
            receiver_.deliver(*this, frame, {theirs_->at(frame.argument, frame.bytes), frame.token});
        }
    }
    if (drained_ == before) return false;
    __atomic_store_n(&outgoing_->drained, drained_, __ATOMIC_RELEASE);
    return true;
}

Traffic LocalTransport::traffic() const {
    const std::lock_guard lock(send_mutex_);
    return timed({messages_sent_, bytes_sent_, messages_received_.load(std::memory_order_relaxed),
                  bytes_received_.load(std::memory_order_relaxed)});
}

}  // namespace multiring
