// Append-only logs of a run that continues from a checkpoint.  A log that was lost, cut or edited since keeps its
// readable part: the run is worth more than its log.
#pragma once
#include <cstdint>
#include <string>

namespace pare {

struct ResumedLog {
  uint64_t bytes = 0;  // to keep; the rest is to be cut off
  std::string note;    // empty, or how it differs from what the checkpoint expects
};

// Resumes JSON lines, whose member `step_key` is the step that they belong to.  The first `bytes` bytes were there when
// the checkpoint of step `last` was written.  If they are not whole lines of steps up to `last`, the file is written
// again with all of its lines that are.
ResumedLog resume_lines(const std::string& path, const std::string& step_key, uint64_t bytes, int64_t last);

// Resumes TensorBoard events: keeps the whole records at the beginning of the file, at most `bytes` bytes.
ResumedLog resume_events(const std::string& path, uint64_t bytes);

}  // namespace pare
