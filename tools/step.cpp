// `make step`: the step of src/ref/step.cpp in numbers, then what each switch changes.
#include "ref/step.h"

#include <cmath>
#include <cstdio>
#include <string>

#include "base/rng.h"

namespace pare::ref {
namespace {

const std::string kVocabulary = "0123456789+=.";  // '.' ends a response

std::string text(const Tokens& tokens) {
  std::string s;
  for (const int32_t t : tokens) s += kVocabulary[t];
  return s;
}

Tokens tokens(const std::string& text) {
  Tokens t;
  for (const char c : text) t.push_back(static_cast<int32_t>(kVocabulary.find(c)));
  return t;
}

const StepShape kShape{.vocab = static_cast<int64_t>(kVocabulary.size()),
                       .width = 8,
                       .heads = 4,
                       .kv_heads = 2,
                       .head_dim = 4,
                       .ffn = 12,
                       .rope_theta = 10000,
                       .rms_eps = 1e-6f};

// Normal, with a variance of 1 / inputs; norms are 1.
StepWeights random_weights() {
  StepWeights w(kShape);
  Rng rng(rng_key(1, RngStream::init, 0));
  for (Matrix* m : w.all())
    for (double& x : m->data) x = m->rows == 1 ? 1 : rng.normal() / std::sqrt(static_cast<double>(m->columns));
  return w;
}

StepOptions options() {
  StepOptions o;
  o.seed = 1929;
  o.prompt = tokens("12+30+25=");
  o.max_tokens = 10;
  o.eos = 12;
  for (uint64_t k = 0; k < 4; k++) o.uids.push_back(sequence_uid(0, 0, 0, k));
  // A random model answers nothing right: the reward is 1/2 for each of the digits 6 and 7.
  o.reward = [](const Tokens& response) {
    const std::string s = text(response);
    return (s.find('6') != std::string::npos ? 0.5 : 0) + (s.find('7') != std::string::npos ? 0.5 : 0);
  };
  o.lr = 0.03f;
  return o;
}

void print_responses(const StepResult& step) {
  std::printf("  %-11s %6s %10s\n", "response", "reward", "advantage");
  for (const StepResponse& r : step.responses)
    std::printf("  %-11s %6.2f %10.4f\n", (text(step.prefix) + text(r.tokens)).c_str(), r.reward, r.advantage);
}

// Prints the sampler's and the learner's log-probs of the first response.
void print_logprobs(const StepResult& step) {
  const StepResponse& r = step.responses[0];
  int same = 0, all = 0;
  for (size_t i = 0; i < step.responses.size(); i++)
    for (size_t t = 0; t < step.responses[i].tokens.size(); t++, all++)
      same += static_cast<float>(step.updates[0].logprobs[i][t]) == step.responses[i].sampled[t];
  std::printf("  %-10s", "token");
  for (const int32_t t : r.tokens) std::printf(" %7c", kVocabulary[t]);
  std::printf("\n  %-10s", "sampler");
  for (const float x : r.sampled) std::printf(" %7.4f", x);
  std::printf("\n  %-10s", "learner");
  for (const double x : step.updates[0].logprobs[0]) std::printf(" %7.4f", x);
  std::printf("\n  equal as floats, of all responses: %d of %d tokens\n", same, all);
}

// d loss / d w of some parameters, by the backward pass and by central differences.
void print_gradient(const StepOptions& o, StepWeights w, StepResult& step) {
  struct Entry {
    const char* name;
    Matrix StepWeights::*part;
    int64_t i, j;
  };
  std::printf("  %-18s %12s %18s\n", "entry", "gradient", "finite difference");
  for (const Entry& e : {Entry{"embedding['='][0]", &StepWeights::embedding, 11, 0},
                         Entry{"qkv[0][3]", &StepWeights::qkv, 0, 3}, Entry{"down[5][7]", &StepWeights::down, 5, 7}}) {
    double& x = (w.*e.part)[e.i][e.j];
    const double keep = x, h = 1e-5;
    x = keep + h;
    const double up = step_loss(o, w, step);
    x = keep - h;
    const double low = step_loss(o, w, step);
    x = keep;
    std::printf("  %-18s %12.8f %18.8f\n", e.name, (step.updates[0].gradient.*e.part)[e.i][e.j], (up - low) / (2 * h));
  }
}

StepResult run(const StepOptions& o) {
  StepWeights w = random_weights();
  return grpo_step(o, w);
}

long tokens_in_loss(const StepResult& step) {
  size_t n = 0;
  for (const StepResponse& r : step.responses) n += r.weight.size();
  return static_cast<long>(n);
}

double rounded(double loss) { return std::abs(loss) < 1e-9 ? 0 : loss; }  // not -0.000000

// Prints how much is trained on and the norm of the gradient: every switch changes them.
void print_trained(const StepResult& step) {
  size_t sampled = 0, responses = 0;
  for (const StepResponse& r : step.responses) {
    sampled += r.tokens.size();
    responses += !r.weight.empty();
  }
  std::printf("  trained on %zu of %zu responses, %ld of %zu tokens; norm of the gradient %.6f\n", responses,
              step.responses.size(), tokens_in_loss(step), sampled, step.updates[0].norm);
}

void print_step() {
  const StepOptions o = options();
  StepResult step = run(o);
  int64_t parameters = 0;
  for (const Matrix* m : random_weights().all()) parameters += std::ssize(m->data);
  std::printf("GRPO, one step of a one-layer Llama with %ld random parameters\n\n", static_cast<long>(parameters));
  std::printf("1-3  rollout of %zu responses to \"%s\", reward, advantage\n", o.uids.size(), text(o.prompt).c_str());
  print_responses(step);
  std::printf("\n4-6  loss: log-probs of the first response's tokens\n");
  print_logprobs(step);
  std::printf("\n6    backward: d loss / d w\n");
  print_gradient(o, random_weights(), step);
  std::printf("  norm of the gradient %.6f\n", step.updates[0].norm);
  std::printf("\n7    AdamW, rate %.2f: the loss of these responses %.6f -> ", o.lr, rounded(step.updates[0].loss));
  StepWeights w = random_weights();
  step = grpo_step(o, w);
  std::printf("%.6f\n", step_loss(o, w, step));
}

void print_updates() {
  StepOptions o = options();
  o.updates = 3;
  const StepResult step = run(o);
  std::printf("\nThree updates on the same responses (updates = 3)\n");
  for (size_t u = 0; u < step.updates.size(); u++)
    std::printf("  update %zu: loss %9.6f, %2ld of %ld tokens clipped, norm %.6f\n", u + 1,
                rounded(step.updates[u].loss), static_cast<long>(step.updates[u].clipped), tokens_in_loss(step),
                step.updates[u].norm);
}

void print_dash() {
  StepOptions o = options();
  o.dash_threshold = 0.75;
  std::printf("\n[DASH] no training on advantages below %.2f (dash_threshold)\n", o.dash_threshold);
  print_trained(run(o));
}

void print_nat() {
  StepOptions o = options();
  o.nat_tokens = 2;
  const StepResult step = run(o);
  std::printf("\n[NAT] a random beginning of each response, 2 tokens or more (nat_tokens)\n");
  print_trained(step);
  for (const StepResponse& r : step.responses) {
    std::printf("  %-11s weights", text(r.tokens).c_str());
    for (const double w : r.weight)
      std::printf(" %.2f", w * static_cast<double>(step.responses.size() * r.tokens.size()));
    std::printf("\n");
  }
}

void print_rpo() {
  StepOptions o = options();
  o.rpo_earlier = run(o).responses[2].tokens;
  o.rpo_max_cut = 5;
  const StepResult step = run(o);
  std::printf("\n[RPO] responses continue \"%s\", cut to \"%s\" (rpo_earlier, rpo_max_cut = 5)\n",
              text(o.rpo_earlier).c_str(), text(step.prefix).c_str());
  print_responses(step);
  print_trained(step);
}

void print_sparse_rl() {
  StepOptions o = options();
  o.blocks = 2;
  o.veto = 0.5;
  const StepResult step = run(o);
  std::printf("\n[Sparse-RL] the sampler attends to 2 blocks of 4 tokens (blocks), veto of xi < %.1f (veto)\n", o.veto);
  print_responses(step);
  for (const StepResponse& r : step.responses) {
    std::printf("  %-11s xi", text(r.tokens).c_str());
    for (size_t t = 0; t < r.tokens.size(); t++) std::printf(" %.2f", std::exp(r.old[t] - r.sampled[t]));
    std::printf("%s\n", r.weight.empty() ? "  rejected" : "");
  }
  print_trained(step);
}

// The mean KL of sampler and policy in the second half of forty steps, from each of which the adapter alone is kept.
double adapted_kl(float lambda) {
  StepOptions o = options();
  o.blocks = 2;
  o.rank = 2;
  o.distill_lambda = lambda;
  o.lr = 0.02f;
  StepAdapter adapter(kShape, o.rank);
  Rng rng(rng_key(1, RngStream::lora, 0));
  for (double& x : adapter.a.data) x = rng.normal() / std::sqrt(static_cast<double>(adapter.a.columns));  // B is 0
  double kl = 0;
  for (o.step = 1; o.step <= 40; o.step++) {
    StepWeights w = random_weights();
    const StepResult step = grpo_step(o, w, &adapter);
    if (o.step > 20) kl += step.sampler_updates[0].kl / 20;
  }
  return kl;
}

void print_distill_sparse() {
  std::printf(
      "\n[DistillSparse] that sampler learns, too: an adapter of rank 2 (rank), from the policy (distill_lambda)\n");
  for (const float lambda : {0.0f, 1.0f, 10.0f})
    std::printf("  KL of sampler and policy in steps 21 to 40, with a weight of %2.0f: %.4f\n", lambda,
                adapted_kl(lambda));
}

}  // namespace
}  // namespace pare::ref

int main() {
  pare::ref::print_step();
  pare::ref::print_updates();
  pare::ref::print_dash();
  pare::ref::print_nat();
  pare::ref::print_rpo();
  pare::ref::print_sparse_rl();
  pare::ref::print_distill_sparse();
}
