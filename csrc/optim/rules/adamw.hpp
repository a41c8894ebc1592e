#pragma once

// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).
struct AdamW {
  static constexpr int kNumMoments = 2;
  static constexpr Sign kSigns[] = {Sign::kAny, Sign::kNonNegative};

  struct Scalars {
    float grad_factor;  // unscale and clip
    float decay;        // 1 - lr * weight_decay
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float root_factor;  // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;  // lr / (1 - beta1^t)
  };

  // The order of operations is a public promise (zerooffload/docs/numerics.md).
  template <typename Number>
  static inline Number step(Number param, Number raw_grad, Number& exp_avg, Number& exp_avg_sq,
                            const Scalars& k) {
    const Number grad = raw_grad * k.grad_factor;
    const Number decayed = param * k.decay;
    exp_avg = k.beta1 * exp_avg + k.one_minus_beta1 * grad;
    exp_avg_sq = k.beta2 * exp_avg_sq + k.one_minus_beta2 * (grad * grad);
    const Number denominator = square_root(exp_avg_sq) * k.root_factor + k.eps;
    return decayed - k.step_size * (exp_avg / denominator);
  }
};
