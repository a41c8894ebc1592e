#pragma once

// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).
struct Lion {
  static constexpr int kNumMoments = 1;
  static constexpr Sign kSigns[] = {Sign::kAny, Sign::kAny};

  struct Scalars {
    float grad_factor;  // unscale and clip
    float decay;        // 1 - lr * weight_decay
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float lr;
  };

  template <typename Number>
  static inline Number step(Number param, Number raw_grad, Number& exp_avg, Number&, const Scalars& k) {
    const Number grad = raw_grad * k.grad_factor;
    const Number direction = k.beta1 * exp_avg + k.one_minus_beta1 * grad;
    exp_avg = k.beta2 * exp_avg + k.one_minus_beta2 * grad;
    return param * k.decay - k.lr * sign_of(direction);
  }
};
