"""What a reader copies from a page works: commands with their flags, and YAML blocks as settings."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from mps_trainer.bench import options as bench_flags
from mps_trainer.cli.app import app
from mps_trainer.config import Settings
from mps_trainer.config.settings import load_settings
from mps_trainer.tasks import load_task
from mps_trainer.tasks.registry import BUILT_IN_TASKS

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial.md"
# Not CHANGELOG.md: it may name what was there once.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
CONFIGS = sorted((ROOT / "examples/tasks").glob("*.yaml"))
OPERATOR = "mps_trainer.operator.AuxTrainer"
_ENDS_A_COMMAND = {"|", "||", "&&", ";", "&", ">", ">>", "<", "<<", "2>", "(", ")"}


def name(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def here_documents(path):
    """What the page's shell blocks write into files, and the blocks without it."""
    pattern = re.compile(r"<<\s*'?(\w+)'?\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
    shell = blocks(path, "bash")
    written = [match[2] for block in shell for match in pattern.finditer(block)]
    return written, [pattern.sub("\n", block) for block in shell]


def words(line):
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def commands_of(line):
    """The arguments of each `mps-trainer` on a line of shell."""
    found = None
    for word in [*words(line), ";"]:
        if word in _ENDS_A_COMMAND:
            if found is not None:
                yield found
            found = None
        elif found is not None:
            found.append(word)
        elif word == "mps-trainer" or word.endswith("/mps-trainer"):
            found = []


def copied_commands(path):
    """Of the shell blocks, where a whole command stands."""
    for block in here_documents(path)[1]:
        for line in block.replace("\\\n", " ").splitlines():
            if "mps-trainer" in line:
                yield from commands_of(line)


def named_commands(path):
    """Of `mps-trainer ...` in the text, where arguments may be left out."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for quoted in re.findall(r"(?<!`)`(mps-trainer [^`]+)`", text):
        yield [word for word in quoted.split()[1:] if word != "..."]


@pytest.fixture(scope="module")
def group():
    from typer.main import get_command

    return get_command(app)


def flags(command):
    if command.name == "bench":  # it hands all of its flags on
        return {flag for action in bench_flags.parser()._actions for flag in action.option_strings}
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def unknown(group, arguments):
    """What of a command does not exist; None when all of it does."""
    arguments = list(arguments)
    while arguments and arguments[0].startswith("-"):
        if arguments[0] not in flags(group):
            return arguments[0]
        arguments.pop(0)
    if not arguments:
        return None
    command = group.commands.get(arguments[0].rstrip(",.:"))
    if command is None:
        return arguments[0]
    own = arguments[1 : arguments.index("--")] if "--" in arguments else arguments[1:]
    known = flags(command)
    return next((word for word in own if word.startswith("-") and word.partition("=")[0] not in known), None)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_and_flag_of_a_page_exists(page, group):
    said = [*copied_commands(page), *named_commands(page)]
    assert [arguments for arguments in said if unknown(group, arguments) is not None] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_command_to_copy_has_the_arguments_that_it_needs(page, group):
    for arguments in copied_commands(page):
        command = group.commands.get(arguments[0]) if arguments else None
        if command is not None and "--help" not in arguments:
            # Parses, converts and checks choices; it runs nothing.
            command.make_context(arguments[0], list(arguments[1:]), allow_interspersed_args=True)


def test_a_wrong_command_is_noticed(group):
    assert unknown(group, ["plan", "x.yaml"]) is None
    assert unknown(group, ["run", "x.yaml", "--ray", "private", "--", "--plugin-dir", "p"]) is None
    assert unknown(group, ["plam", "x.yaml"]) == "plam"
    assert unknown(group, ["run", "x.yaml", "--rays", "private"]) == "--rays"
    assert list(commands_of("cd a && mps-trainer plan x.yaml | head -3  # why")) == [["plan", "x.yaml"]]


def operator_arguments(tree):
    """The `args` of our operator, wherever a piece of YAML has them."""
    if isinstance(tree, list):
        for item in tree:
            yield from operator_arguments(item)
    elif isinstance(tree, dict):
        if isinstance(tree.get("args"), dict) and tree.get("name", OPERATOR) == OPERATOR:
            yield tree["args"]
        for key, value in tree.items():
            if key != "args":
                yield from operator_arguments(value)


def yaml_of(page):
    return [*blocks(page, "yaml"), *(text for text in here_documents(page)[0] if "operators:" in text)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_yaml_of_a_page_loads_as_settings(page):
    for text in yaml_of(page):
        for args in operator_arguments(yaml.safe_load(text)):
            settings = load_settings(args)
            if settings.task in BUILT_IN_TASKS and "checkpoint" not in settings.task_args:
                load_task(settings.task, settings.task_args)


def test_the_tutorial_has_what_it_promises():
    assert len(list(copied_commands(TUTORIAL))) > 10
    written = [args for text in yaml_of(TUTORIAL) for args in operator_arguments(yaml.safe_load(text))]
    assert any(args.get("task") == "preference_classifier" for args in written)


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_a_config_of_the_examples_runs_with_the_tutorials_yaml(config):
    """Each goes behind examples/tutorial/trinity.yaml, and its filter leaves what the trainer waits for."""
    tree = yaml.safe_load((ROOT / "examples/tutorial/trinity.yaml").read_text() + config.read_text())
    [args] = operator_arguments(tree)
    settings = load_settings(args)
    task = load_task(settings.task, settings.task_args)
    assert sum(parameter.numel() for parameter in task.build_model().parameters()) > 0
    made = tree["buffer"]["batch_size"] * tree["algorithm"]["repeat_times"]
    rule = settings.filter
    dropped = int(rule.value) if rule.drop == "top_k" else rule.num_in_share(made)
    assert settings.use == "filter"
    assert 0 < dropped <= made - tree["buffer"]["train_batch_size"]
    assert settings.min_version < tree["buffer"]["total_steps"] * settings.steps_per_batch


def test_each_built_in_task_has_a_page_and_a_config():
    for task in BUILT_IN_TASKS:
        assert (ROOT / f"docs/tasks/{task}.md").exists(), task
        found = [
            path for path in (ROOT / "examples").rglob("*.yaml") if re.search(rf"task: {task}\b", path.read_text())
        ]
        assert found, f"no YAML in examples/ uses {task}"


def test_the_readme_names_every_page():
    readme = (ROOT / "README.md").read_text()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tasks").glob("*.md")]
    assert [name(page) for page in pages if f"]({name(page)})" not in readme] == []


def test_the_index_of_results_names_every_page():
    folder = ROOT / "docs/results"
    index = (folder / "README.md").read_text()
    pages = [page.name for page in folder.glob("*.md") if page.name != "README.md"]
    assert [page for page in pages if f"]({page})" not in index] == []


def test_settings_named_in_text_exist():
    """`key: value` in a task's page with a key that looks like ours."""
    keys = set(Settings.model_fields)
    for page in (ROOT / "docs/tasks").glob("*.md"):
        for key in re.findall(r"`(min_\w+|steps_\w+|on_\w+|score_\w+): ", page.read_text()):
            assert key in keys, f"{key} in {page.name}"
