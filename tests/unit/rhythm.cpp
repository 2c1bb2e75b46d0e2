// Steps that a rhythm of calls tells, a line each on standard input:
//
//   call SECONDS [TIMES]    calls come so much later than the ones before
//   look                    prints the steps since the look before
#include "rhythm.hpp"

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

using namespace multiring;

int main() {
    Rhythm rhythm;
    Clock::time_point now = Clock::now();
    rhythm.call(now);
    Rhythm::Gaps before = rhythm.gaps();
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string what;
        words >> what;
        if (what == "call") {
            double gap = 0;
            int times = 1;
            words >> gap >> times;
            for (int call = 0; call < times; ++call) rhythm.call(now += seconds(gap));
        } else if (what == "look") {
            const Rhythm::Gaps gaps = rhythm.gaps();
            std::printf("%d\n", Rhythm::steps(before, gaps));
            before = gaps;
        }
    }
}
