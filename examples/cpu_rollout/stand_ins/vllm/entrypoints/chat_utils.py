"""Stand-in: names for multi-modal prompts, which are refused."""

ChatTemplateContentFormat = str
ConversationMessage = dict


def parse_chat_messages(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("this is examples/cpu_rollout's stand-in for vllm; multi-modal needs vllm itself")


async def parse_chat_messages_async(*args: object, **kwargs: object) -> None:
    parse_chat_messages()
