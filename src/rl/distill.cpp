#include "rl/distill.h"

#include <algorithm>
#include <map>

namespace pare {

LossSpec student_loss_spec(const ActorKeys& actor, const DistillKeys& distill, double temperature) {
  constexpr KlLoss kl[] = {KlLoss::k2, KlLoss::k3, KlLoss::exact, KlLoss::exact_forward};  // of DistillKl
  LossSpec spec = loss_spec(actor, temperature);
  spec.kl = kl[static_cast<size_t>(distill.kl_type)];
  spec.kl_coef = static_cast<float>(distill.lambda);
  spec.entropy_coef = 0;
  return spec;
}

Update student_update(const ActorKeys& actor, const DistillKeys& distill, int64_t max_response_length,
                      std::span<const Trajectory> samples, std::span<const TokenPlan> plans, const Update& dense,
                      const TokenOuts& teacher, bool first,
                      const std::function<TokenOuts(const std::vector<Group>&)>& logprobs) {
  // As the sparse policy sees them, which drew them: none rejected, no token weighted.
  std::vector<Trajectory> own(samples.begin(), samples.end());
  for (Trajectory& s : own) {
    s.ruling = Ruling::none;
    s.correction.reset();
    s.kl_correction.reset();
    s.ref_logprob = first ? s.old_logprob : std::nullopt;
    s.old_logprob = s.logprob;
  }
  Update u = make_update(actor, max_response_length, own, plans);
  if (distill.kl_type == DistillKl::exact_reverse || distill.kl_type == DistillKl::exact_forward) return u;

  std::map<size_t, size_t> trained;  // member of `dense` of each sample that it has
  for (size_t m = 0; m < dense.sample_of.size(); m++) trained[dense.sample_of[m]] = m;
  const std::vector<int64_t> rows = loss_row_offsets(u.groups);
  const auto set = [&](size_t member, std::span<const double> t) {
    expect(std::ssize(t) == rows[member + 1] - rows[member], "teacher and student have other tokens of a sample");
    std::copy(t.begin(), t.end(), u.terms.ref_logprob.begin() + rows[member]);
  };
  std::vector<size_t> others;  // members of u
  std::vector<Group> groups;   // of those
  size_t member = 0;
  for (const Group& g : u.groups) {
    const size_t first = others.size();
    for (const Member& m : g.members) {
      if (const auto t = trained.find(u.sample_of[member]); t != trained.end()) {
        set(member, teacher.of(teacher.logprob, t->second));
      } else if (!own[u.sample_of[member]].ref_logprob) {
        if (others.size() == first) groups.push_back({g.prefix, {}, g.shard});
        others.push_back(member);
        groups.back().members.push_back(m);
      }
      member++;
    }
  }
  if (others.empty()) return u;
  const TokenOuts t = logprobs(groups);
  for (size_t i = 0; i < others.size(); i++) set(others[i], t.of(t.logprob, i));
  return u;
}

}  // namespace pare
