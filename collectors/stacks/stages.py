"""Folds sampled call stacks into the stages of an engine's work. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_STACKS = 100_000
"""Different stacks of one profile that are looked at."""
MAX_FRAMES = 200
"""Innermost functions of a stack that are looked at."""
OTHER = "other"

RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (stage, re.compile(pattern))
    for stage, pattern in (
        # vLLM, SGLang and the shards of TGI, in this order of precedence: a stack that is in
        # several of them at once is in the innermost, as sampling is within the model's step.
        ("sample", r"\b(_?sample|sample_tokens|apply_grammar_bitmask) \(\S*(model_runner|sampler)"),
        ("sample", r"(NextTokenChooser|\bnext_token_chooser)\S* \("),
        ("detokenize", r" \(\S*(output_processor|detokenizer\w*)\.py\)|\bdecode_token \("),
        ("tokenize", r"\b_?(async_)?(tokenize|encode)\w* \(\S*(token|render|preprocess|input)"),
        ("tokenize", r"\b\w*apply_chat_template\w* \("),
        ("update", r"\b(update_from_output|process_batch_result\w*) \("),
        (
            "schedule",
            r"\b(schedule|get_next_batch_to_run|get_new_batch_prefill|grammar_bitmask) \(",
        ),
        ("schedule", r"\b(FilterBatch|concatenate) \(\S*(server|causal_lm)"),
        # The core waits for its workers to compute.
        ("execute", r"\bcollective_rpc \(|\bFutureWrapper\."),
        ("execute", r"\b(execute_model|execute_dummy_batch|run_batch|forward_batch_generation) \("),
        ("execute", r"\b(Prefill|Decode|generate_token) \(\S*(server|causal_lm)"),
    )
)
"""Stage → a function and its file (``name (path)``) anywhere in the stack."""
WAITING = re.compile(
    r"\b(select|poll|_?wait\w*|sleep|get|_?recv\w*|accept|acquire\w*|dequeue|read|readline|"
    r"join|sched_yield|_?worker|run|run_forever|run_until_complete|_run_once) \(\S*"
    r"(select|epoll|threading|queue|socket|zmq|connection|asyncio|shm_broadcast|popen_fork|"
    r"subprocess|thread|ssl|distributed/utils)\S*\)$"
)
"""The innermost function of a thread that has nothing to do."""
SERVING = re.compile(r" \(\S*(entrypoints/|http_server|uvicorn|starlette|fastapi|http/)\S*\)")
"""A function of the web server."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Samples of one process."""

    stages: tuple[tuple[str, int], ...]
    """Stage → samples, most first."""
    stacks: tuple[tuple[str, int], ...]
    """Stack → samples, most first: names of functions and files without their folders."""

    @property
    def samples(self) -> int:
        """Stacks taken."""
        return sum(count for _, count in self.stages)


def fold(text: str, *, most: int = 50) -> Profile:
    """The profile that lines of ``outer (file);inner (file) COUNT`` hold; others are passed over.

    ``most`` stacks are kept, the frequent ones.
    """
    stages: Counter[str] = Counter()
    stacks: Counter[str] = Counter()
    for frames, count in _lines(text):
        stages[stage_of(frames)] += count
        stacks[";".join(_without_folder(frame) for frame in frames)] += count
    return Profile(tuple(stages.most_common()), tuple(stacks.most_common(most)))


def stage_of(frames: Sequence[str]) -> str:
    """Stage of one stack of ``function (file)``, the outermost first."""
    whole = ";".join(frames)
    for stage, pattern in RULES:
        if pattern.search(whole):
            return stage
    if frames and WAITING.search(frames[-1]):
        return "wait"
    return "api" if SERVING.search(whole) else OTHER


def _lines(text: str) -> Iterator[tuple[list[str], int]]:
    for number, line in enumerate(text.splitlines()):
        if number >= MAX_STACKS:
            return
        stack, _, count = line.rpartition(" ")
        if stack and count.isdecimal():
            yield stack.split(";")[-MAX_FRAMES:], int(count)


def _without_folder(frame: str) -> str:
    function, bracket, path = frame.partition(" (")
    return f"{function}{bracket}{path.rpartition('/')[2]}"
