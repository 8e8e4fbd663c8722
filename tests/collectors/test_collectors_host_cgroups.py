"""Control groups of both versions and of hybrids, in fake trees and one real quota."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_machine import FakeMachine
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.host import cgroups
from latencyprism.collectors.host.cgroups import Group, Hierarchies, Memory, Quotas
from latencyprism.collectors.host.files import Files

CONTAINER = "docker-" + "ab" * 32 + ".scope"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    fake = FakeMachine(tmp_path)
    (fake.proc / "self/mountinfo").unlink()
    return fake


def files(machine: FakeMachine) -> Files:
    return Files(str(machine.proc), str(machine.sys))


def find(machine: FakeMachine, controller: str, cgroup: str) -> Group | None:
    machine.write("proc/7/cgroup", cgroup)
    hierarchies = Hierarchies(files(machine))
    return hierarchies.group(hierarchies.memberships(7), controller)


def below(machine: FakeMachine, group: Group | None) -> str | None:
    return str(group.folder.relative_to(machine.sys / "fs/cgroup")) if group else None


def test_version_2_has_all_controllers_in_one_tree(machine: FakeMachine) -> None:
    machine.mount("cgroup2", "")
    group = find(machine, "cpu", "0::/kubepods/pod1/app\n")

    assert below(machine, group) == "kubepods/pod1/app"
    assert group is not None
    assert group.unified
    assert [below(machine, level) for level in group.upwards()] == [
        "kubepods/pod1/app",
        "kubepods/pod1",
        "kubepods",
    ]
    assert find(machine, "memory", "0::/kubepods/pod1/app\n") == group


def test_version_1_has_a_tree_for_each_controller(machine: FakeMachine) -> None:
    machine.mount("cgroup", "cpu,cpuacct", "cpu,cpuacct")
    machine.mount("cgroup", "memory", "memory")
    text = "4:cpu,cpuacct:/lab\n2:memory:/other/deep\n1:name=systemd:/user.slice\n"

    assert below(machine, find(machine, "cpu", text)) == "cpu,cpuacct/lab"
    assert below(machine, find(machine, "memory", text)) == "memory/other/deep"


def test_hybrid_takes_the_version_that_has_the_controller(machine: FakeMachine) -> None:
    machine.mount("cgroup", "cpu", "cpu")
    machine.mount("cgroup2", "unified")
    text = "1:cpu:/lab\n0::/lab2\n"

    assert below(machine, find(machine, "cpu", text)) == "cpu/lab"
    assert below(machine, find(machine, "memory", text)) == "unified/lab2"


def test_a_container_s_own_mount_begins_at_its_group(machine: FakeMachine) -> None:
    machine.mount("cgroup", "cpu", "cpu", root="/docker/abc")

    assert below(machine, find(machine, "cpu", "1:cpu:/docker/abc/worker\n")) == "cpu/worker"
    assert find(machine, "cpu", "1:cpu:/docker/other\n") is None


def test_groups_outside_of_the_own_namespace_are_found_where_the_host_s_tree_is_mounted(
    machine: FakeMachine,
) -> None:
    machine.mount("cgroup2", "own")
    assert find(machine, "cpu", "0::/../../kubepods/pod1\n") is None

    machine.mount("cgroup2", "host", root="/../..")
    assert below(machine, find(machine, "cpu", "0::/../../kubepods/pod1\n")) == "host/kubepods/pod1"


def test_no_tree_no_group(machine: FakeMachine) -> None:
    assert find(machine, "cpu", "0::/lab\n") is None
    machine.mount("cgroup", "memory", "memory")
    assert find(machine, "cpu", "2:memory:/lab\n") is None
    assert find(machine, "cpu", "") is None


def test_mount_points_with_spaces(tmp_path: Path) -> None:
    line = "30 25 0:26 /a\\040b /sys/fs\\040x/cgroup rw - cgroup2 cgroup2 rw\n"
    (mount,) = cgroups.mounts(line + "nonsense\n31 25 0:3 / /proc rw - proc proc rw\n")

    assert (str(mount.root), str(mount.point)) == ("/a b", "/sys/fs x/cgroup")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/system.slice/{CONTAINER}", True),
        ("/docker/" + "ab" * 32, True),
        ("/kubepods/besteffort/pod1234/" + "ab" * 32, True),
        ("/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + "ab" * 32 + ".scope", True),
        ("/machine.slice/libpod-" + "ab" * 32 + ".scope", True),
        ("/lxc.payload.box", True),
        ("/slurm/uid_1000/job_77/step_0", True),
        ("/system.slice/vllm.service", True),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service", True),
        ("/", False),
        ("/user.slice/user-1000.slice/session-3.scope", False),
        ("/user.slice/user-1000.slice/user@1000.service", False),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/term-1.scope", False),
        ("/system.slice/ssh.service", False),
        ("/system.slice/docker.service", False),
        ("/system.slice/cron.service", False),
    ],
)
def test_what_holds_one_server_and_nothing_else(path: str, expected: bool) -> None:
    assert cgroups.is_container(path) is expected


def test_members_of_a_container(machine: FakeMachine) -> None:
    machine.mount("cgroup2", "")
    machine.write("proc/7/cgroup", f"0::/system.slice/{CONTAINER}\n")
    machine.write(f"sys/fs/cgroup/system.slice/{CONTAINER}/cgroup.procs", "7\n9\n0\n")
    hierarchies = Hierarchies(files(machine))

    group = hierarchies.container(hierarchies.memberships(7))

    assert group is not None
    assert hierarchies.members(group) == [7, 9]
    assert hierarchies.container({"": "/user.slice"}) is None


def memory(machine: FakeMachine, cgroup: str) -> Memory:
    group = find(machine, "memory", cgroup)
    assert group is not None
    return Memory(files(machine), group)


def test_memory_of_version_2_with_the_tightest_limit_above(machine: FakeMachine) -> None:
    machine.mount("cgroup2", "")
    machine.write("sys/fs/cgroup/pod/memory.max", "1000\n")
    machine.write("sys/fs/cgroup/pod/app/memory.max", "max\n")
    machine.write("sys/fs/cgroup/pod/app/memory.current", "400\n")
    machine.write("sys/fs/cgroup/pod/app/memory.events", "low 0\noom 3\noom_kill 1\n")
    read = memory(machine, "0::/pod/app\n")

    first = read.read()
    machine.write("sys/fs/cgroup/pod/app/memory.events", "low 0\noom 4\noom_kill 3\n")
    machine.write("sys/fs/cgroup/pod/app/memory.max", "800\n")
    read.find_limit()
    second = read.read()
    read.close()

    assert first == {
        "cgroup_memory_bytes": 400,
        "cgroup_memory_limit_bytes": 1000,
        "oom_kills": None,
    }
    assert (second["oom_kills"], second["cgroup_memory_limit_bytes"]) == (2, 800)


def test_memory_of_version_1_without_a_limit(machine: FakeMachine) -> None:
    machine.mount("cgroup", "memory", "memory")
    machine.write("sys/fs/cgroup/memory/lab/memory.usage_in_bytes", "400\n")
    machine.write("sys/fs/cgroup/memory/lab/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("sys/fs/cgroup/memory/lab/memory.oom_control", "under_oom 0\noom_kill 2\n")
    read = memory(machine, "2:memory:/lab\n")
    read.read()

    assert read.read() == {
        "cgroup_memory_bytes": 400,
        "cgroup_memory_limit_bytes": None,
        "oom_kills": 0,
    }


def test_the_root_s_memory_is_the_machine_s_and_not_told(machine: FakeMachine) -> None:
    machine.mount("cgroup", "memory", "memory")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "400\n")

    assert set(memory(machine, "2:memory:/\n").read().values()) == {None}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("cgroup2", "anon N0=10 N1=20\nfile N0=1 N1=2\nkernel_stack N0=9 N1=9\n", {0: 11, 1: 22}),
        (
            "cgroup",
            "total=7 N0=3 N1=4\nfile=1 N0=1\nhierarchical_total=9 N0=4 N1=5\n",
            {0: 4, 1: 5},
        ),
        ("cgroup", "total=7 N0=3 N1=4\n", {0: 3, 1: 4}),
        ("cgroup2", "", {}),
        ("cgroup2", "anon Nx=1 N0=y N1\n", {}),
    ],
)
def test_memory_by_node(
    machine: FakeMachine, kind: str, text: str, expected: dict[int, int]
) -> None:
    machine.mount(kind, "", "memory" if kind == "cgroup" else "")
    machine.write("sys/fs/cgroup/lab/memory.numa_stat", text)
    group = find(machine, "memory", "2:memory:/lab\n" if kind == "cgroup" else "0::/lab\n")

    assert group is not None
    assert cgroups.memory_by_node(files(machine), group) == expected


def test_quotas_of_all_levels_add_up(machine: FakeMachine) -> None:
    machine.mount("cgroup2", "")
    group = find(machine, "cpu", "0::/pod/app\n")
    assert group is not None
    quotas = Quotas(files(machine))
    quotas.watch([group, group])

    def throttle(pod_usec: int, app_usec: int) -> tuple[int, int] | None:
        for path, usec in (("pod", pod_usec), ("pod/app", app_usec)):
            text = f"nr_periods 9\nnr_throttled {usec}\nthrottled_usec {usec}\n"
            # In place, as the kernel does: the file is kept open.
            file = machine.sys / "fs/cgroup" / path / "cpu.stat"
            machine.write(str(file.relative_to(machine.root)), text)
        return quotas.throttled()

    assert throttle(10, 20) is None
    assert throttle(11, 25) == (6000, 6)
    quotas.close()
    assert quotas.throttled() is None


@given(st.text(max_size=300))
def test_no_text_of_the_kernel_s_files_raises(text: str) -> None:
    cgroups.mounts(text)
    for path in cgroups.memberships(text).values():
        cgroups.is_container(path)
    cgroups.throttling(text.encode())
    cgroups.oom_kills(text.encode())


@pytest.fixture
def quota() -> Iterator[tuple[Group, int]]:
    """A real group with a quota of a tenth of a core, and a process in it that burns."""
    if os.geteuid() != 0:
        pytest.skip("making a control group needs root")
    hierarchies = Hierarchies(Files())
    paths = dict.fromkeys(hierarchies.memberships(os.getpid()), "/")
    top = hierarchies.group(paths, "cpu")
    folder = Path(f"{top.folder}/latencyprism-test-{os.getpid()}") if top else None
    if top is None or folder is None:
        pytest.skip("no control group has the CPU controller here")
    try:
        folder.mkdir()
        name, text = ("cpu.max", "10000 100000") if top.unified else ("cpu.cfs_quota_us", "10000")
        (folder / name).write_text(text)
    except OSError as error:
        pytest.skip(f"a control group with a quota can't be made here: {error}")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        (folder / "cgroup.procs").write_text(str(burner.pid))
        yield (
            Group(folder=type(top.folder)(folder), top=top.folder, unified=top.unified),
            burner.pid,
        )
        burner.kill()
    for _ in range(100):
        try:
            folder.rmdir()
            break
        except OSError:
            time.sleep(0.02)


@pytest.mark.root
def test_a_real_quota_is_seen_to_throttle(quota: tuple[Group, int]) -> None:
    group, pid = quota
    hierarchies = Hierarchies(Files())
    assert hierarchies.group(hierarchies.memberships(pid), "cpu") == group
    quotas = Quotas(Files())
    quotas.watch([group])
    quotas.throttled()
    throttled_ns = 0
    deadline = time.monotonic() + 10
    while not throttled_ns and time.monotonic() < deadline:
        time.sleep(0.1)
        throttled_ns, _ = quotas.throttled() or (0, 0)
    quotas.close()

    assert throttled_ns > 0
