"""The Trinity workflow that rolls out with the model and rewards by a `token_rule`. In the YAML:

    default_workflow_type: cpu_rollout.workflow.TokenRuleWorkflow
    workflow_args: {rule: {seed: 7, kind: share, noise: 0.05}}

Each experience says in its info what was planted: "planted" is 1 where the reward was flipped, else 0. With
`workflow_args: {hidden_state: 32}` it also has "hidden_state", a vector of that width: a stand-in for the pooled hidden
state that a workflow would store of a real model.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow

from cpu_rollout.token_rule import RuleSettings, end_of_turn_id, judge, load_rule


class TokenRuleWorkflow(Workflow):
    """One user turn, `repeat_times` responses in one request, rewards by the rule."""

    is_async = True
    can_reset = True
    can_repeat = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.repeat_times = 1
        self.model_folder = model.config.model_path
        self.end_id = end_of_turn_id(self.model_folder)
        self.reset(task)

    def reset(self, task: Task) -> None:
        self.task = task
        self.settings = RuleSettings(**task.workflow_args["rule"])  # Trinity adds keys of its own beside ours
        self.state_width = int(task.workflow_args.get("hidden_state", 0))

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    async def run_async(self) -> list[Experience]:
        rule = load_rule(self.settings, self.model_folder)
        options = {**asdict(self.task.rollout_args), "n": self.repeat_times}
        messages = [{"role": "user", "content": self.task.task_desc}]
        experiences = await self.model.chat_async(messages, **options)
        for i, experience in enumerate(experiences):
            tokens = self.response_tokens(experience)
            run = i + self.run_id_base
            verdict = judge(rule, tokens, f"{self.task.batch_id}/{self.task.task_id}/{run}")
            experience.reward = verdict.reward
            experience.info = {**(experience.info or {}), "planted": verdict.planted}
            if self.state_width:
                experience.info["hidden_state"] = pooled_state(tokens, self.state_width)
            experience.metrics = {**(experience.metrics or {}), "planted": float(verdict.planted)}
            experience.eid.run = run
        return list(experiences)

    def response_tokens(self, experience: Experience) -> list[int]:
        """The response's token ids without a closing EOS, which stands last wherever it stands."""
        tokens = experience.tokens[experience.prompt_length :].tolist()
        return tokens[:-1] if tokens and tokens[-1] == self.end_id else tokens


def pooled_state(tokens: list[int], width: int) -> list[float]:
    """The mean over the response's tokens of a fixed random vector for each token id, shape (width,)."""
    if not tokens:
        return [0.0] * width
    ids, counts = np.unique(tokens, return_counts=True)
    vectors = np.stack([np.random.default_rng(token).standard_normal(width) for token in ids.tolist()])
    pooled: list[float] = (counts @ vectors / len(tokens)).tolist()
    return pooled
