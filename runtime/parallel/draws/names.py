"""The names of those functions of torch that draw random numbers."""

from __future__ import annotations

FACTORIES = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"})
IN_PLACE = frozenset(
    {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
)
DROPOUTS = frozenset(
    {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"}
    | {"alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"}
)
SAMPLERS = frozenset(
    {"normal", "bernoulli", "multinomial", "poisson", "binomial", "rrelu", "rrelu_", "gumbel_softmax"}
    | {"_standard_gamma", "_sample_dirichlet", "svd_lowrank", "pca_lowrank"}
    | {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_", "orthogonal_"}
)
LAYERS = frozenset(
    {"scaled_dot_product_attention", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"}
    | {"fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices"}
    | {"fractional_max_pool3d_with_indices"}
)
"""Those that draw only if they are told to, by the probability of a dropout, and pools at random places."""

DRAWS = FACTORIES | IN_PLACE | DROPOUTS | SAMPLERS | LAYERS
