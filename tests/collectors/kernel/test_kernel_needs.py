from collections.abc import Set

import pytest

from latencyprism.collectors.kernel.needs import GIVES, INITIAL_PID_NAMESPACE, Machine, missing


def machine(
    *,
    version: tuple[int, int] = (6, 1),
    arch: str = "x86_64",
    capabilities: Set[str] = frozenset({"CAP_BPF", "CAP_PERFMON"}),
    btf: bool = True,
    uprobes: bool = True,
    pid_namespace: str | None = INITIAL_PID_NAMESPACE,
    lockdown: str | None = "[none] integrity confidentiality",
) -> Machine:
    return Machine(
        version=version,
        arch=arch,
        capabilities=capabilities,
        btf=btf,
        uprobes=uprobes,
        pid_namespace=pid_namespace,
        lockdown=lockdown,
    )


@pytest.mark.parametrize("capabilities", [{"CAP_BPF", "CAP_PERFMON"}, {"CAP_SYS_ADMIN"}])
def test_a_machine_that_has_all_lacks_nothing(capabilities: set[str]) -> None:
    assert missing(machine(capabilities=capabilities)) == {tier: [] for tier in GIVES}


@pytest.mark.parametrize(
    ("lacking", "wanted"),
    [
        (machine(version=(5, 7)), "Linux 5.8"),
        (machine(arch="riscv64"), "x86_64, aarch64"),
        (machine(capabilities={"CAP_BPF"}), "CAP_PERFMON"),
        (machine(capabilities=frozenset()), "CAP_BPF"),
        (machine(pid_namespace="pid:[4026532000]"), "pid namespace"),
        (machine(lockdown="none integrity [confidentiality]"), "locked down"),
    ],
)
def test_what_every_tier_lacks_is_named(lacking: Machine, wanted: str) -> None:
    for lacks in missing(lacking).values():
        assert any(wanted in lack for lack in lacks)


def test_tracepoints_need_types_and_functions_do_not() -> None:
    lacks = missing(machine(btf=False))

    assert {tier for tier in lacks if lacks[tier]} == {"run_queue", "sockets", "frames"}


def test_functions_need_uprobes_and_tracepoints_do_not() -> None:
    lacks = missing(machine(uprobes=False))

    assert {tier for tier in lacks if lacks[tier]} == {"tls", "gpu"}


def test_what_a_machine_does_not_tell_is_not_held_against_it() -> None:
    assert not any(missing(machine(pid_namespace=None, lockdown=None)).values())
