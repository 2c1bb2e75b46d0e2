#include "call.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace multiring {

CommunicatorBase::CommunicatorBase(std::uint32_t id, std::uint16_t incarnation, std::vector<int> members_given,
                                   int self)
    : id(id), incarnation(incarnation), members(std::move(members_given)), self(self) {
    for (std::size_t i = 0; i < members.size(); ++i) member_of_[members[i]] = static_cast<int>(i);
}

int CommunicatorBase::member_of(int world_rank) const {
    const auto found = member_of_.find(world_rank);
    return found == member_of_.end() ? -1 : found->second;
}

std::string describe(const Call& call) {
    const CommunicatorBase& communicator = *call.installed->communicator;
    std::string text(call.called());
    if (call.number != no_number) text += " number " + std::to_string(call.number);
    if (call.is_point()) {
        text += call.collective == Collective::send ? " to " : " from ";
        text += call.other == any_member ? "any rank" : "rank " + std::to_string(communicator.members[call.other]);
        if (call.part_of == Collective::send) text += " with tag " + std::to_string(call.tag);
    }
    return text + " of communicator " + std::to_string(communicator.id);
}

Signature signature_of(const Call& call, std::uint16_t generation) {
    Signature signature{
        call.count, call.installed->schedule->plan, call.root, call.label, call.collective, call.dtype, call.op,
        generation};
    if (call.is_point()) {
        signature.collective = Collective::send;
        signature.plan = call.tag;
        signature.root = static_cast<std::uint32_t>(call.part_of);
    }
    return signature;
}

double age_of(const Call& call) {
    const auto since = call.deadline - seconds(call.timeout);
    return std::max(0.0, std::chrono::duration<double>(Clock::now() - since).count());
}

}  // namespace multiring
