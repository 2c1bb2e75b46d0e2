// Makes copies as a Pace says, for test_pace.py. Each three arguments are a stretch: how many copies, and the bytes a
// nanosecond at which those left in the caches and those past them go. Every tenth copy takes a hundred times as long.
#include "pace.hpp"

#include <cstdio>
#include <cstdlib>

int main(int count, char** arguments) {
    multiring::Pace pace(multiring::Pace::for_copies);
    for (int i = 1; i + 2 < count; i += 3) {
        const int copies = std::atoi(arguments[i]);
        const double rates[] = {std::atof(arguments[i + 1]), std::atof(arguments[i + 2])};
        int streamed = 0;
        for (int copy = 0; copy < copies; ++copy) {
            const bool streams = pace.streams();
            const double bytes = 1 << 17, nanoseconds = bytes / rates[streams] * (copy % 10 == 9 ? 100 : 1);
            pace.note(streams, 1 << 17, std::chrono::nanoseconds(static_cast<long>(nanoseconds)));
            streamed += streams;
        }
        std::printf("%d\n", streamed);
    }
}
