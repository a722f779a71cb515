// The data of a report as one JSON document, which charts.js and page.js draw.
#pragma once
#include <string>
#include <vector>

namespace pare {

// Runs that share their whole configuration but trainer.seed and the output directory form a group; the first run's
// group is the baseline.  Pure ASCII without '<', so that it can stand inside a <script> element.
//
//   groups    [{name, runs: [index of a run], config: {key: value}}]
//   runs      [{name, path, seed, planned, steps: [..], series: {metric: [value or null]}, totals: {..},
//               samples: [{step, group, member, prompt, pieces or response, logprobs, ..}], sampled: one of how many}]
//   keys      every configuration key, in the order of the first run's file
//   defaults  {key: value}
std::string report_data(const std::vector<std::string>& directories);

}  // namespace pare
