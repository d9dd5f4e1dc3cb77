"""The benchmark: what a rollout loses and what an auxiliary model gains, one way of training it against the others.

    options -> plan (arms, processes, memory, seconds) -> session: trainers, engines, rounds of windows, closing blocks
            -> figures -> page (Markdown, JSON), picture (PNG)

`load` says what is generated, `engine` drives the process that generates it, `trainers` those that train beside it.
"""
