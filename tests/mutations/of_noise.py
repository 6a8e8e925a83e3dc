"""Mutants of the randomness: coins, noise, exact draws (rules 1, 3, 9, 14, 15)."""

from __future__ import annotations

from mutant import Mutant

FILE = "dpmixmin/privacy/noise.py"
TESTS = "tests/privacy/test_noise.py"
EXACT = "tests/privacy/test_noise_exact.py"

NOISE = (
    Mutant(
        1,
        "batches of fixed size instead of coins",
        FILE,
        "        return draws < threshold\n",
        "        return np.argsort(np.argsort(draws)) < round(rate * count)\n",
        (f"{TESTS}::test_rule_1_batches_are_independent_coins_marginally_and_pairwise",),
    ),
    Mutant(
        1,
        "one coin for all units",
        FILE,
        "np.frombuffer(self.random_bytes(8 * count), dtype",
        "np.frombuffer(self.random_bytes(8) * count, dtype",
        (f"{TESTS}::test_rule_1_batches_are_independent_coins_marginally_and_pairwise",),
    ),
    Mutant(
        1,
        "coins of another rate",
        FILE,
        "int(Fraction(rate) * 2**63)",
        "int(Fraction(rate) * 2**62)",
        (f"{TESTS}::test_rule_1_batches_are_independent_coins_marginally_and_pairwise",),
    ),
    Mutant(
        3,
        "model-sized noise halved",
        FILE,
        "return draws * (std / 2)",
        "return draws * (std / 4)",
        (f"{TESTS}::test_model_sized_noise_is_gaussian_with_the_asked_for_deviation",),
    ),
    Mutant(
        3,
        "half of the model gets the noise of the other half",
        FILE,
        "torch.cat([cosines.sum(dim=0), sines.sum(dim=0)])",
        "torch.cat([cosines.sum(dim=0), cosines.sum(dim=0)])",
        (
            f"{TESTS}::test_model_sized_noise_is_gaussian_with_the_asked_for_deviation",
            f"{TESTS}::test_model_sized_noise_is_independent_across_coordinates_and_calls",
        ),
    ),
    Mutant(
        9,
        "coins of exp(-x) that stop at the wrong parity",
        FILE,
        "return count % 2 == 1",
        "return count % 2 == 0",
        (f"{EXACT}::test_bernoulli_exp_is_exact",),
    ),
    Mutant(
        9,
        "the whole part of x is forgotten",
        FILE,
        "for _ in range(whole):",
        "for _ in range(min(whole, 1)):",
        (f"{EXACT}::test_bernoulli_exp_is_exact", f"{EXACT}::test_bernoulli_exp_frequencies"),
    ),
    Mutant(
        9,
        "integers by remainder",
        FILE,
        "            if candidate < bound:\n                return candidate\n",
        "            return candidate % bound\n",
        (f"{EXACT}::test_integer_below_gives_every_value_the_same_share_of_first_bytes",),
    ),
    Mutant(
        9,
        "shuffling by swaps with any place",
        FILE,
        "other = self.integer_below(last + 1)",
        "other = self.integer_below(count)",
        (f"{EXACT}::test_every_permutation_has_the_same_exact_probability",),
    ),
    Mutant(
        9,
        "the number of repetitions is not random",
        FILE,
        "return _count_at(bits, mean, shape)",
        "return round(mean)",
        (f"{EXACT}::test_repetitions_follow_their_law",),
    ),
    Mutant(
        9,
        "repetitions of another shape",
        FILE,
        "fail * (count - 1 + eta) / count",
        "fail * (count + eta) / (count + 1)",
        (
            f"{EXACT}::test_repetitions_sit_on_the_steps_of_the_exact_distribution_function",
            f"{EXACT}::test_repetitions_follow_their_law",
        ),
    ),
    Mutant(
        14,
        "bytes from a seed",
        FILE,
        "return _stretch(os.urandom, count)",
        "return np.random.default_rng(0).bytes(count)",
        (f"{TESTS}::test_rule_14_global_seeds_do_not_touch_private_draws",),
    ),
    Mutant(
        14,
        "bytes from numpy's global generator",
        FILE,
        "return _stretch(os.urandom, count)",
        "return np.random.bytes(count)",
        (
            f"{TESTS}::test_rule_14_global_seeds_do_not_touch_private_draws",
            f"{TESTS}::test_rule_14_private_draws_do_not_touch_the_global_generators",
        ),
    ),
    Mutant(
        14,
        "model-sized noise from torch's global generator",
        FILE,
        "            block[:] = _box_muller(self.random_bytes(64 * ((len(block) + 1) // 2)))[: len(block)]\n",
        "            block[:] = 2 * __import__('torch').randn(len(block)).numpy()\n",
        (f"{TESTS}::test_rule_14_global_seeds_do_not_touch_private_draws",),
    ),
    Mutant(
        14,
        "a key that everybody knows",
        FILE,
        "algorithms.AES(draw(32))",
        "algorithms.AES(bytes(32))",
        (
            f"{TESTS}::test_rule_14_no_block_of_a_long_request_repeats",
            f"{TESTS}::test_rule_14_a_key_comes_from_the_operating_system_for_every_piece",
        ),
    ),
    Mutant(
        14,
        "one stream for the whole life of a process",
        FILE,
        "encryptor = Cipher(algorithms.AES(draw(32)), modes.CTR(bytes(16))).encryptor()\n",
        "globals().setdefault('_S', Cipher(algorithms.AES(draw(32)), modes.CTR(bytes(16))).encryptor())\n"
        "        encryptor = _S\n",
        (f"{TESTS}::test_rule_14_a_forked_child_does_not_repeat_its_parent",),
    ),
    Mutant(
        14,
        "a source that can be copied",
        FILE,
        "    def __reduce_ex__(self, protocol):\n",
        "    def _refuse(self, protocol):\n",
        (f"{TESTS}::test_rule_14_a_source_cannot_be_copied",),
    ),
    Mutant(
        14,
        "a test seed that passes for private",
        FILE,
        "    private = False\n",
        "    private = True\n",
        (f"{TESTS}::test_rule_14_insecure_seed_reproduces_and_is_not_private",),
    ),
    Mutant(
        15,
        "rounded noise is cut down instead of rounded",
        FILE,
        "result = np.rint(value)",
        "result = np.floor(value)",
        (f"{TESTS}::test_rule_15_rounded_gaussian_cells_at_scale_2",),
    ),
    Mutant(
        15,
        "open roundings are left to float64",
        FILE,
        "for index in np.flatnonzero(ambiguous):",
        "for index in np.flatnonzero(ambiguous[:0]):",
        (f"{TESTS}::test_rule_15_draws_next_to_a_rounding_boundary_are_exact",),
    ),
    Mutant(
        15,
        "rounded noise of one sign",
        FILE,
        "return np.where(negative, -integers, integers)",
        "return integers",
        (f"{TESTS}::test_rule_15_signs_of_os_draws_are_fair",),
    ),
)
