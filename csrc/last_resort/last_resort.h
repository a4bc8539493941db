// Ends the process when Python cannot: a thread of its own, which needs no lock of the interpreter, and handlers of signals
// that would end the process without an explanation.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace freescale {

// End the process with exit code 1 after `seconds`, unless this is called again or `disarm_last_resort` before. `message` is
// then written to stderr, with what has arrived over `connections` (descriptor and rank), which is only looked at. Time in
// which the whole process is stopped does not count.
void arm_last_resort(double seconds, const std::string& message, const std::vector<std::pair<int, int>>& connections);

void disarm_last_resort();

// From now on, a signal that means a crash ends the process with exit code 1, after it has written `message` to stderr.
void name_crashes(const std::string& message);

}  // namespace freescale
