#include "frame.hpp"

#include <cstdio>

namespace multiring {

std::string plan_id(std::uint64_t number) {
    char text[13];
    std::snprintf(text, sizeof text, "%012llx", static_cast<unsigned long long>(number >> 15 & 0xffffffffffff));
    return text;
}

// Whoever reads it looks for the difference: what is the same on both sides is left out, but where the operations
// differ it says which call of the program this is. A plan differs with a count, a root or a type: alone it is said.
std::string Signature::describe(bool receives, const Signature* other) const {
    const Collective called = part_of();
    if (called == Collective::barrier) return "barrier()";
    const bool is_alike = other != nullptr && other->part_of() == called;
    const Signature& beside = is_alike ? *other : *this;
    std::string arguments;
    const auto add = [&](bool differs, const std::string& argument) {
        if (is_alike && !differs) return;
        arguments += (arguments.empty() ? "" : ", ") + argument;
    };
    add(dtype != beside.dtype, "dtype=" + std::string(name(dtype)));
    add(count != beside.count, "count=" + std::to_string(count));
    if (reduces(called)) add(op != beside.op, "op=" + std::string(name(op)));
    if (has_root(called)) add(root != beside.root, "root=" + std::to_string(root));
    if (called == Collective::send) add(tag() != beside.tag(), "tag=" + std::to_string(tag()));
    if (label != 0) add(label != beside.label, "label=" + describe_label(label));
    if (label == 0 && beside.label != 0) add(true, "no label");
    if (is_alike && arguments.empty() && !is_message()) add(plan != beside.plan, "plan=" + plan_id(plan));
    return std::string(name(called == Collective::send && receives ? Collective::recv : called)) + "(" + arguments +
           ")";
}

// FNV-1a of the description and the plan.
std::uint64_t Signature::fingerprint() const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : describe(false, nullptr) + std::to_string(plan))
        hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return hash;
}

}  // namespace multiring
